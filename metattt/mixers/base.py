"""The contract of mixers: called like a `TTTLayer`, with one function to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_integer
from metattt.inner.faults import FAILURES, explain
from metattt.inner.packing import Packing, check_flags, pack
from metattt.modules import check_finite
from metattt.state import Context, State, Tensors


class Mixer(nn.Module, ABC):
    """A sequence layer that is one recurrence, published as a whole: `y, state = mixer(x, state, mask=..., reset=...)`.

    It stands wherever a `TTTLayer` or a `Combined` does. What it carries from call to call is in `state.learner`, by
    the names of `carried`; `state.weights`, `state.task` and `state.optimizer` are empty.

    Args:
        dim: model width D.
        chunk_size: c, tokens that are computed together; it changes no result.
        group_size: chunks that the backward pass computes again together; None is one, 0 stores everything.

    Raises:
        MetaTTTError: sizes that are none.
    """

    causal = True  #: no output depends on a later token
    refuse_nan = True  #: as of `TTTLayer`

    def __init__(self, dim: int, chunk_size: int, group_size: int | None):
        super().__init__()
        check_integer("dim", dim)
        check_integer("layer.chunk_size", chunk_size)
        self.dim, self.chunk_size, self.group_size = dim, chunk_size, group_size

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "group_size" and value is not None:
            check_integer("layer.group_size", value, 0, advice=" (0 stores everything, null is one chunk)")
        super().__setattr__(name, value)

    @property
    @abstractmethod
    def carried(self) -> dict[str, tuple[int, ...]]:
        """What a sequence carries: shapes without `[B]`, by name."""

    @abstractmethod
    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """Reads tokens.

        Args:
            x: `[B, T, D]`, 0 at padding, which stands behind the real tokens.
            memory: what the call before has returned, empty at the start of a sequence.
            ctx: `valid` tells real tokens, `first` where documents start: nothing of what was before may pass it.

        Returns:
            Outputs `[B, T, D]`, anything at padding, and `carried` after the last real token.
        """

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        packing: Packing | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, State]:
        """As `TTTLayer.forward`.

        Args:
            x: `[B, T, D]`.
            state: what the previous call returned; None at the start.
            mask, reset, packing, in_place: as there.

        Returns:
            Outputs `[B, T, D]` and the new state.

        Raises:
            MetaTTTError: shapes, types or devices that do not fit, a state that is none of this layer, or NaN in `x`
                (checked on CPU, if `refuse_nan`).
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise MetaTTTError(f"x has shape {shape}, expected [B, T, {self.dim}] with at least one token")
        if state is not None and not isinstance(state, State):
            raise MetaTTTError(
                f"the state is from another layer: it is a {type(state).__name__}, expected a State, or None"
            )
        flags: dict[str, Any] = {"mask": mask, "reset": reset}
        try:
            return self._read(x, state, mask, reset, packing)
        except FAILURES as error:
            explain(error, x, self.parameters(), state, flags)
            raise

    def _read(
        self, x: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor, State]:
        placed = packing is not None
        if packing is not None:
            x = packing.clear(x)
        elif mask is not None or reset is not None:
            check_flags(x, mask, reset)
            packing = pack(mask, reset, x.device)
            x = x if packing is None else packing.sort(x)
        if self.refuse_nan:
            check_finite(x)
        if state is not None:
            self._check_state(x, state)
        if packing is None:
            pos = x.new_zeros(x.shape[0], dtype=torch.long) if state is None else state.pos
            positions = torch.arange(x.shape[1], device=x.device) + pos.unsqueeze(1)
            ctx, pos = Context(positions, None, None, 1), pos + x.shape[1]
        else:
            positions, pos = packing.positions(packing.start if state is None else state.pos)
            ctx = Context(positions, packing.valid, packing.first, 1)
        y, memory = self.mix(x, {} if state is None else state.learner, ctx)
        if packing is not None:
            y = packing.blank(y) if placed else packing.restore(packing.blank(y))
        return y, State(pos, 0, {}, {}, {}, memory)

    def _check_state(self, x: Tensor, state: State) -> None:
        if state.pos.shape[0] != x.shape[0]:
            raise MetaTTTError(
                f"the state is for {state.pos.shape[0]} sequences, x holds {x.shape[0]}: start with state=None"
            )
        found = {name: tuple(tensor.shape[1:]) for name, tensor in state.learner.items()}
        if found != self.carried or any((state.weights, state.task, state.optimizer)):
            raise MetaTTTError(f"the state is from another layer: it carries {found}, this layer {self.carried}")

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
