"""One call of a pretrained model with attached layers: its mask, its documents, the cache in which states travel."""

from __future__ import annotations

import threading
from collections import Counter
from inspect import signature
from typing import Any

from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.models.language_model import document_starts


class Given(threading.local):
    """What a call of the model was given; every thread has its own.

    Attributes:
        mask: `[B, T]` 1 for real tokens.
        starts: `[1 or B, T]` first tokens of documents after others.
        cache: the cache, in which states travel.
        read_before: tokens that the cache held before the call.
        embeddings: `[B, T, D]` of the tokens.
        entered: what has entered the last MLP.
        uses: how often each module has been called: blocks may share one.
    """

    mask: Tensor | None = None
    starts: Tensor | None = None
    cache: Any = None
    read_before: int | None = None
    embeddings: Tensor | None = None
    entered: Tensor | None = None

    def __init__(self) -> None:
        self.uses: Counter[str] = Counter()


class Call:
    """What the attached modules need of a call of the model, which their own arguments do not hold.

    Args:
        model: the model.
        name: of a module inside one of its blocks.
    """

    def __init__(self, model: nn.Module, name: str):
        self.given = Given()
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts))]
        lists = [path for path in paths if isinstance(model.get_submodule(path), nn.ModuleList)]
        if not lists:
            raise MetaTTTError(f"{name} is in no list of blocks, in which attached layers follow calls of the model")
        base = model.get_submodule(lists[0].rpartition(".")[0])
        blocks: Any = model.get_submodule(lists[0])
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self.hooks = [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            embedding.register_forward_hook(self._embedded),
            *(one.register_forward_pre_hook(self._enter, with_kwargs=True) for one in blocks),
            *(one.register_forward_hook(self._leave) for one in blocks),
        ]

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "given"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, given=Given())  # a copy of the model has nothing of the last call

    def state(self, name: str) -> Any:
        """The state of a module before this call; None at the start."""
        held = states_in(self.given.cache).get(f"{name} {self.given.uses[name]}")
        if held is None and self.given.read_before:
            raise MetaTTTError(
                "the cache has read tokens that the attached layers have not, or In-Place TTT has read padding, from "
                "which it does not go on (it generates from texts of one length): begin with a new cache"
            )
        return held

    def keep(self, name: str, state: Any) -> None:
        """Keeps the state of a module after this call; None: nothing can follow."""
        states, key = states_in(self.given.cache), f"{name} {self.given.uses[name]}"
        states.pop(key, None)
        if state is not None:
            states[key] = state
        self.given.uses[name] += 1

    def valid(self, count: int) -> Tensor | None:
        """`[B, count]` real tokens of this call; None: all."""
        if self.given.mask is None:
            return None
        valid = self.given.mask[:, -count:].bool()
        return None if bool(valid.all()) else valid

    def starts(self, batch: int) -> Tensor | None:
        """`[batch, T]` where documents begin after others; None: nowhere."""
        return None if self.given.starts is None else self.given.starts.expand(batch, -1)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        words = kwargs | signature(module.forward).bind_partial(*args, **kwargs).arguments
        mask, places = words.get("attention_mask"), words.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise MetaTTTError(
                "attached layers need an attention_mask [B, T], 1 for real tokens, or none (a static cache makes "
                "another: use cache_implementation=dynamic; so do some models that see images)"
            )
        if places is None and (words.get("seq_idx") is not None or words.get("cu_seq_lens_q") is not None):
            raise MetaTTTError("packed documents need position_ids: let the collator have return_position_ids=True")
        given = self.given
        given.mask, given.cache, given.read_before, given.starts = mask, None, None, None
        given.embeddings, given.uses = words.get("inputs_embeds"), Counter()
        if mask is None and isinstance(places, Tensor) and places.ndim == 2:  # as Transformers sees packed documents
            given.starts = document_starts(places)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        words = (*args, *kwargs.values())
        cache: Any = next((one for one in words if hasattr(one, "get_seq_length")), None)
        self.given.cache = cache
        if self.given.read_before is None:  # of the first block: attentions of later ones see that it has grown
            try:
                self.given.read_before = 0 if cache is None else cache.get_seq_length()
            except ValueError:  # without an attention, a cache does not count
                self.given.read_before = int(cache.has_previous_state())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if y.requires_grad:  # gradient checkpointing runs the block again, maybe after another call
            given = self.given
            kept = given.mask, given.starts, given.embeddings
            y.register_hook(lambda _: self._again(*kept))

    def _again(self, *kept: Tensor | None) -> None:
        given = self.given
        given.mask, given.starts, given.embeddings = kept
        given.cache, given.read_before = None, None

    def _embedded(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.given.embeddings = output


class Followed:
    """Mixed into the class of a cache: what is done to the cache is done to the states of attached layers."""

    metattt_states: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _followed, (type(self).__mro__[2],), self.__dict__

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        for name, state in self.metattt_states.items():
            self.metattt_states[name] = state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.metattt_states.clear()

    def crop(self, max_length: int) -> None:
        raise MetaTTTError("attached layers cannot forget tokens: assisted generation is not supported")

    def _select(self, index: Tensor) -> None:
        for name, state in self.metattt_states.items():
            self.metattt_states[name] = state.select(index)


def states_in(cache: Any) -> dict[str, Any]:
    """The states of attached layers that a cache holds."""
    if cache is None:
        return {}
    if not isinstance(cache, Followed):
        cache.__class__ = _followed_class(type(cache))
        cache.metattt_states = {}
    return cache.metattt_states


def _followed_class(kind: type) -> type:
    return type(kind.__name__, (Followed, kind), {})


def _followed(kind: type) -> Any:
    """An empty cache of this kind that is followed, for `pickle` and `copy`."""
    return object.__new__(_followed_class(kind))
