"""One call of a pretrained model with attached layers: its mask, its documents, the cache in which states travel."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError


class Call:
    """What the attached modules need of a call of the model, which their own arguments do not hold.

    Args:
        model: the model.
        name: of a module inside one of its blocks.
    """

    def __init__(self, model: nn.Module, name: str):
        self.mask: Tensor | None = None
        self.starts: Tensor | None = None  # of documents after the first
        self.cache: Any = None
        self.read_before: int | None = None  # tokens that the cache held before the call
        self.embeddings: Tensor | None = None
        parts = name.split(".")
        paths = [".".join(parts[:count]) for count in range(1, len(parts))]
        lists = [path for path in paths if isinstance(model.get_submodule(path), nn.ModuleList)]
        if not lists:
            raise MetaTTTError(f"{name} is in no list of blocks, in which attached layers follow calls of the model")
        base = model.get_submodule(lists[0].rpartition(".")[0])
        blocks: Any = model.get_submodule(lists[0])
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._hooks = [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            embedding.register_forward_hook(self._embedded),
            *(one.register_forward_pre_hook(self._enter, with_kwargs=True) for one in blocks),
            *(one.register_forward_hook(self._leave) for one in blocks),
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model has nothing of the last call
        return self.__dict__ | {"mask": None, "starts": None, "cache": None, "embeddings": None}

    def state(self, name: str) -> Any:
        """The state of a module before this call; None at the start."""
        held = states_in(self.cache).get(name)
        if held is None and self.read_before:
            raise MetaTTTError("the cache has read tokens that the attached layers have not: begin with a new cache")
        return held

    def keep(self, name: str, state: Any) -> None:
        if self.cache is not None:
            states_in(self.cache)[name] = state

    def valid(self, count: int) -> Tensor | None:
        """`[B, count]` real tokens of this call; None: all."""
        if self.mask is None:
            return None
        valid = self.mask[:, -count:].bool()
        return None if bool(valid.all()) else valid

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = kwargs | signature(module.forward).bind_partial(*args, **kwargs).arguments
        mask, places = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
            raise MetaTTTError("attached layers need an attention_mask [B, T], 1 for real tokens, or none")
        self.mask, self.cache, self.read_before, self.starts = mask, None, None, None
        self.embeddings = given.get("inputs_embeds")
        if isinstance(places, Tensor) and places.ndim == 2:  # documents one after the other, as Transformers packs them
            starts = places == 0 if mask is None else (places == 0) & mask[:, -places.shape[1] :].bool()
            self.starts = starts if bool(starts[:, 1:].any()) else None

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        self.cache = next((one for one in given if hasattr(one, "get_seq_length")), None)
        if self.read_before is None:  # of the first block: attentions of later ones see that it has grown
            self.read_before = 0 if self.cache is None else self.cache.get_seq_length()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if y.requires_grad:  # gradient checkpointing runs the block again, maybe after another call
            given = self.mask, self.starts, self.embeddings
            y.register_hook(lambda _: self._again(*given))

    def _again(self, *given: Tensor | None) -> None:
        self.mask, self.starts, self.embeddings = given
        self.cache, self.read_before = None, None

    def _embedded(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.embeddings = output


class Followed:
    """Mixed into the class of a cache: what is done to the cache is done to the states of attached layers."""

    metattt_states: dict[str, Any]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        for name, state in self.metattt_states.items():
            count = len(state.inputs if hasattr(state, "inputs") else state.pos)
            self.metattt_states[name] = state.select(torch.arange(count).repeat_interleave(repeats))

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
        cache.__class__ = type(type(cache).__name__, (Followed, type(cache)), {})
        cache.metattt_states = {}
    states: dict[str, Any] = cache.metattt_states
    return states
