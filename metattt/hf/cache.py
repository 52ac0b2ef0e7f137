"""What Transformers hands from call to call: our state in the place of keys and values."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.generation.static_step import WORTH, PlainStep, Step, one_token_step
from metattt.models.language_model import LanguageModel, LanguageModelState
from metattt.modules import TRACED
from metattt.nested import count_sequences
from metattt.optional import need

need("transformers", extra="hf", what="metattt.hf")
from transformers.cache_utils import Cache  # noqa: E402


class MetaTTTCache(Cache):
    """The state of a model after the tokens that it has read; its size does not grow with them, but for attention.

    Args:
        state: what was learned before, e.g. `LanguageModelState.load(...)`; it is copied, and stays as it is. None:
            nothing yet.

    `model.generate(..., cache=MetaTTTCache(state))` reads the prompt as what follows in the same document.
    A token that was read cannot be taken back (`crop`): the state is no list of tokens.
    """

    def __init__(self, state: LanguageModelState | None = None):
        super().__init__(layers=[])
        if state is not None and not isinstance(state, LanguageModelState):
            raise MetaTTTError(
                f"state is a {type(state).__name__}, expected a LanguageModelState of an earlier call, or None"
            )
        self._kept = None if state is None else state.map(torch.clone)
        self._seen = 0
        self._hidden: Tensor | int = 0  # [B] of these columns were padding
        self._step: Step | None = None  # holds the state while there is one
        self._within: object = None
        self._checked: object = None  # the call of `generate` whose mask has been looked at
        self._alike = 0  # tokens that were read one by one within the same call of `generate`

    @property
    def _state(self) -> LanguageModelState | None:
        return self._kept if self._step is None else self._step.state

    @_state.setter
    def _state(self, state: LanguageModelState | None) -> None:
        self._kept, self._step, self._alike = state, None, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": self._state, "_step": None, "_within": None}  # a copy does without the model

    @property
    def state(self) -> LanguageModelState | None:
        """A copy of the state, which later calls do not change; to be saved, or to go on from with another cache."""
        return None if self._state is None else self._state.map(torch.clone)

    def give_up(self) -> LanguageModelState | None:
        """The state itself: the model may write over it, and hands the next one to `take`."""
        return self._state

    def take(self, state: LanguageModelState, count: int, mask: Tensor | None = None) -> None:
        """The state after another `count` columns of tokens; False in `mask` `[B, count]` is padding."""
        self._state = state
        self._seen += count
        if mask is not None:
            self._hidden = self._hidden + (~mask).sum(1)

    def check_mask(self, before: Tensor, count: int, within: object) -> None:
        """Refuses a mask `[B, n]` of the columns that were read, if it hides what was read as a token. Where `count`
        is one token, once in a call of `generate`, and else on a CPU alone: a GPU would wait each time."""
        new = count > 1 or within is not self._checked or (within is None and not before.is_cuda)
        self._checked = within
        fits = self._seen > 0 and before.shape == (self.batch_size, self._seen)
        if new and fits and ((before == 0).sum(1) > self._hidden).any():
            raise MetaTTTError(
                "attention_mask hides columns that the cache has read, as padding that a text of a batch reads after "
                "its end: what was read cannot be taken back, so call without the cache, with all tokens"
            )

    def advance(self, model: LanguageModel, token: Tensor, within: object) -> Tensor:
        """The logits `[B, V]` after another token `[B]`, by a step that is recorded once there have been some
        (`metattt.generation.static_step`); `within`: the call of `generate`, in which `model` does not change."""
        if within is not self._within:
            self._state, self._within = self._state, within
        enough = self._alike in (WORTH["cpu"], TRACED)
        if self._step is None or (enough and isinstance(self._step, PlainStep)):
            state = self._state
            assert state is not None
            self._step = one_token_step(model, state, self._alike) if enough else PlainStep(model, state)
        self._alike += 1
        self._seen += 1
        return self._step(token)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of tokens (padding included) that were read through this cache, and not by a state that it was
        given."""
        return self._seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i continues from what sequence `beam_idx[i]` has read."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices`, in this order."""
        if self._state is not None:
            self._state = self._state.select(indices)
            kept = torch.as_tensor(indices).flatten()
            self._hidden = self._hidden if isinstance(self._hidden, int) else self._hidden[kept]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, one after the other."""
        if self._state is not None:
            self._state = self._state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))
            self._hidden = self._hidden if isinstance(self._hidden, int) else self._hidden.repeat_interleave(repeats)

    def reset(self) -> None:
        """Forgets everything."""
        self._state, self._seen, self._hidden = None, 0, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, but for 0 tokens: a token that a model has learned from cannot be taken back."""
        if tokens_to_remove:
            self.update()

    def update(self, *args: Any, **options: Any) -> NoReturn:
        """Refused: there are no keys and values."""
        raise MetaTTTError(
            "a MetaTTTCache cannot do that: it holds no keys and values, and a token that a model has learned from "
            "cannot be taken back; generate without speculation (greedy, sampling, beams)"
        )

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before the first call."""
        return -1 if self._state is None else count_sequences(self._state)

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self._kept is not None or self._step is not None

    is_linear = [False]  # noqa: RUF012 - else Transformers would hand over tokens again that were read
    is_compileable = False  # the state's tensors are new ones after every call
    is_croppable = False

    def __len__(self) -> int:
        return 0 if self._state is None else len(self._state.layers)

    def __repr__(self) -> str:
        return f"MetaTTTCache(columns={self._seen}, sequences={self.batch_size})"
