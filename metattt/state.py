"""What a layer carries between calls, and what it knows about the tokens of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class Context(NamedTuple):
    """The tokens of one call, after padding has been moved to the end (`metattt.inner.packing`).

    Attributes:
        positions: `[B, T]` tokens since the start of the document.
        valid: `[B, T]` True for real tokens, which come first; None if all are real.
        first: `[B, T]` True for the first token of a packed document; None if there are none.
        mini_batch_size: b of the inner optimizer (tokens).
    """

    positions: Tensor
    valid: Tensor | None
    first: Tensor | None
    mini_batch_size: int

    @property
    def lengths(self) -> Tensor:
        """`[B]` number of real tokens."""
        if self.valid is None:
            return torch.full_like(self.positions[:, 0], self.positions.shape[1])
        return self.valid.sum(1)


class State(NamedTuple):
    """The hidden state of one layer for `B` sequences: hand it back to go on at the next token.

    Attributes:
        pos: `[B]` tokens read since the start of the document.
        phase: `pos mod b` as a plain integer where it is the same for all sequences, else None.
        weights: the learner's weights by role (`anchor`, `commit`, `weights`, `update`, `momentum`) and name: `[B, H, *shape]`.
        task, optimizer, learner: what these parts carry (convolution tails, gate pools, keys and values): `[B, ...]` each.
    """

    pos: Tensor
    phase: int | None
    weights: dict[str, Tensors]
    task: Tensors
    optimizer: Tensors
    learner: Tensors

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """A state with `function` applied to every tensor."""
        return State(*(_map(function, part) for part in self))

    def to(self, *args: Any) -> State:
        """Moves every tensor to a device. Types are kept: positions stay integers, weights stay fp32 or wider."""
        return self.map(lambda tensor: tensor.to(*args))

    def detach(self) -> State:
        """Cuts the graph: later losses no longer reach what was read so far."""
        return self.map(Tensor.detach)

    def select(self, index: Tensor) -> State:
        """The states of the sequences `index` (to reorder beams or drop finished sequences)."""
        return self.map(lambda tensor: tensor.index_select(0, index))

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors."""
        storage: dict[int, int] = {}
        self.map(lambda tensor: storage.update({tensor.data_ptr(): tensor.nbytes}) or tensor)
        return sum(storage.values())


def _map(function: Callable[[Tensor], Tensor], part: Any) -> Any:
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, Mapping):
        return {key: _map(function, value) for key, value in part.items()}
    return part


torch.serialization.add_safe_globals([State])
