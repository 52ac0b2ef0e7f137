"""What a layer carries between calls, and what it knows about the tokens of one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from metattt.nested import count_bytes, count_sequences, map_tensors, move_tensors
from metattt.torch_private import register_namedtuple

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

Tensors = dict[str, Tensor]
Named = TypeVar("Named", bound=type)

WHOLE_CALL = 2**31  #: the mini-batch size that stands for all tokens of a call, or of each document in it


def in_files(kind: Named) -> Named:
    """Lets files of torch hold the named tuple `kind`: those of `torch.save`, and programs of
    `torch.export.save`. They can be loaded once its module is imported, as every layer does."""
    torch.serialization.add_safe_globals([kind])
    register_namedtuple(kind, serialized_type_name=f"metattt.{kind.__name__}")
    return kind


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

    @property
    def places(self) -> Tensor:
        """`[B, T]` places of the tokens in the call, or in the document that begins in it, from 0."""
        begun = self.positions[:, :1]  # of the document that an earlier call has begun
        return self.positions - (begun if self.first is None else torch.where(self.first.cumsum(1) > 0, 0, begun))


class DataGates(NamedTuple):
    """Per-token numbers of a rule for data, each `[B, H or 1, T]`: token t is stored with weight `write_t`, and the
    weights of all earlier tokens are multiplied by `keep_t`.

    Attributes:
        write: weight of the token (β of MesaNet, Δ of Mamba-2).
        keep: share of the past that stays (γ, α), between 0 and 1; None: all.
        levels: `[B, H, T, n]` weights λ of the n levels of a hierarchical state in what the token reads; None: all 1.
        decay: `[B, H, T, n]` logarithm of a `keep` for each of the n channels of a memory; None: there is none.
        blend: share of the learner's solution in the query that the token reads with (α of GKA); None: 1.
    """

    write: Tensor
    keep: Tensor | None = None
    levels: Tensor | None = None
    decay: Tensor | None = None
    blend: Tensor | None = None

    def masked(self, valid: Tensor | None) -> DataGates:
        """Padding changes nothing: it writes 0 and keeps all. `valid` `[B, T]`; None: all tokens are real."""
        if valid is None:
            return self
        keep = None if self.keep is None else torch.where(valid.unsqueeze(1), self.keep, 1)
        decay = None if self.decay is None else torch.where(valid[:, None, :, None], self.decay, 0)
        return self._replace(write=torch.where(valid.unsqueeze(1), self.write, 0), keep=keep, decay=decay)


@in_files
class State(NamedTuple):
    """The hidden state of one layer for `B` sequences: pass it to the next call to continue.

    Attributes:
        pos: `[B]` tokens read since the start of the document.
        phase: `pos mod b` as a plain integer where it is the same for all sequences, else None.
        weights: the learner's weights by slot (see `metattt.memory`) and name:
            `[B, H, *shape]`.
        task, optimizer, learner: what these parts carry (convolution tails, gate pools, keys and values): `[B, ...]`
            each.
    """

    pos: Tensor
    phase: int | None
    weights: dict[str, Tensors]
    task: Tensors
    optimizer: Tensors
    learner: Tensors

    def __repr__(self) -> str:
        """Names and shapes without numbers, one line for each slot of the weights and each part."""
        slots = self.weights if isinstance(self.weights, Mapping) else {"": self.weights}
        held = {f"weights: {slot} -> ": x for slot, x in slots.items()}
        held |= {f"{name}: ": x for name in ("task", "optimizer", "learner") if (x := getattr(self, name)) != {}}
        pos: Any = self.pos
        with suppress(RuntimeError, AttributeError):  # no values on the meta device and under torch.vmap; or no tensor
            pos = pos.tolist() if pos.numel() <= 8 else pos
        lines = [f"State(pos={_shown(pos)}, phase={self.phase!r:.20}", *(name + _shown(x) for name, x in held.items())]
        return ",\n  ".join(lines) + ")"

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """A state with `function` applied to every tensor."""
        return map_tensors(function, self)

    def to(self, *args: Any, **kwargs: Any) -> State:
        """The state on another device, or in another type: see `move_tensors`."""
        return move_tensors(self, *args, **kwargs)

    def detach(self) -> State:
        """Detaches the state: gradients of later losses do not reach earlier tokens."""
        return self.map(Tensor.detach)

    def select(self, index: Tensor | Sequence[int]) -> State:
        """The states of the sequences `index` (to reorder beams or drop finished sequences): numbers, or True for those
        that stay, on any device."""
        index = torch.as_tensor(index)
        index = index if index.numel() or index.dtype == torch.bool else index.long()  # of [] torch makes fractions
        if index.dtype == torch.bool:  # as numbers; flags for others are refused
            index = torch.arange(count_sequences(self), device=index.device)[index.flatten()]
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors."""
        return count_bytes(self)

    def save(self, path: str | Path, model: nn.Module | None = None) -> None:
        """Writes the state to a file of safetensors: what was learned, apart from the model that learned it.

        Args:
            path: the file. An existing file is replaced after the new one is completely written.
            model: the layer that it belongs to: then `load` can check that it gets the same one.

        Raises:
            MetaTTTError: the file cannot be written.
        """
        from metattt.checkpoints.states import write_state

        write_state(path, self, model)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", model: nn.Module | None = None) -> State:
        """Reads a file of `save`, bit for bit.

        Args:
            path: the file.
            device: where the tensors go.
            model: the layer that will use it, compared with the one that saved it; None: not compared.

        Raises:
            MetaTTTError: a file that is damaged or holds something else, or a state of another model.
        """
        from metattt.checkpoints.states import read_state

        return read_state(path, cls, device, model)


def _shown(value: object, most: int = 8) -> str:
    """A tensor by its shape, a dictionary by its first names; other things by their beginning."""
    if isinstance(value, Mapping):
        named = [f"{name} {_shown(x)}" for name, x in list(value.items())[:most]]
        return ", ".join(named) + (f" and {len(value) - most} more" if len(value) > most else "")
    return str(list(value.shape)) if isinstance(value, Tensor) else f"{value!r:.80}"
