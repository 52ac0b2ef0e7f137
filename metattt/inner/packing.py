"""Padding and packed documents of a call: padding goes to the end of every sequence, and all layers of a model share
one `Packing` and its layouts (`metattt.inner.columns`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.columns import ColumnLayout, make_layout, to_device
from metattt.modules import expand_like
from metattt.state import Context, State


class Packing:
    """Padding and documents of one call, for one layer or for all layers of a model.

    Args:
        order: `[B, T]` tokens with padding moved to the end; None if it stands there.
        valid: `[B, T]` True for real tokens, in that order; None if all are real.
        first: `[B, T]` True for the first token of a packed document, likewise; None if there are none.
        host: `valid` and `first` on the host; None under `torch.compile`, which cannot look at values.
    """

    def __init__(
        self,
        order: Tensor | None,
        valid: Tensor | None,
        first: Tensor | None,
        host: tuple[Tensor | None, Tensor | None] | None,
    ):
        self.order, self.valid, self.first, self.host = order, valid, first, host
        self._start: Tensor | None = None
        self._moved: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._layouts: dict[tuple[object, ...], tuple[Tensor, ColumnLayout]] = {}

    def sort(self, x: Tensor) -> Tensor:
        """Tokens of `x` `[B, T, ...]` with padding last, and 0 there: junk at padding, NaN included, must not reach a
        gradient."""
        return self.clear(x if self.order is None else x.gather(1, expand_like(self.order, x).expand_as(x)))

    def clear(self, x: Tensor) -> Tensor:
        """Sorted tokens with 0 at padding, whatever stood there."""
        return x if self.valid is None else x.masked_fill(~self.valid.view(*self.valid.shape, *(1,) * (x.ndim - 2)), 0)

    def restore(self, y: Tensor) -> Tensor:
        """`y` `[B, T, ...]` back in the caller's columns."""
        return y if self.order is None else y.gather(1, expand_like(self.order.argsort(1), y).expand_as(y))

    def part(self, start: int, stop: int) -> Packing | None:
        """Of the sorted tokens `start` to `stop − 1` alone; None if all are real and no document starts among them."""
        assert self.host is not None
        here, there = (
            [None if x is None else x[:, start:stop] for x in two] for two in (self.host, (self.valid, self.first))
        )
        if here[0] is not None and here[0].all():
            here[0] = there[0] = None
        if here[1] is not None and not here[1].any():
            here[1] = there[1] = None
        return None if here[0] is here[1] is None else Packing(None, there[0], there[1], (here[0], here[1]))

    @property
    def start(self) -> Tensor:
        """`[B]` zeros: the position of fresh sequences, the same tensor for all layers."""
        if self._start is None:
            flags = self.valid if self.valid is not None else self.first
            assert flags is not None
            self._start = flags.new_zeros(flags.shape[0], dtype=torch.long)
        return self._start

    def positions(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T]` tokens since the start of the document, and `[B]` that number after the call; `pos` `[B]` were read
        before.

        Layers of a model that pass the same `pos` get the same tensors back.
        """
        if torch.compiler.is_compiling():
            return self._count(pos)
        if id(pos) not in self._moved:
            self._moved[id(pos)] = pos, *self._count(pos)  # `pos` is kept, so that its id is not given away
        return self._moved[id(pos)][1:]

    def _count(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        flags = self.valid if self.valid is not None else self.first
        assert flags is not None
        steps = torch.arange(flags.shape[1], device=flags.device).expand_as(flags)
        positions = steps + pos.unsqueeze(1)
        if self.first is not None:
            start = torch.where(self.first, steps, -1).cummax(1).values
            positions = torch.where(start < 0, positions, steps - start)
        lengths = torch.full_like(pos, flags.shape[1]) if self.valid is None else self.valid.sum(1)
        last = (lengths - 1).clamp(min=0).unsqueeze(1)
        return positions, torch.where(lengths > 0, positions.gather(1, last).squeeze(1) + 1, pos)

    def layout(self, ctx: Context, state: State, period: int | None, block: int, open_last: bool) -> ColumnLayout:
        """As `make_layout`, once for all layers with the same `pos` and the same mini-batches."""
        if torch.compiler.is_compiling():
            return make_layout(ctx, state, period, block, open_last)
        key = (id(state.pos), state.phase, period, block, open_last)
        if key not in self._layouts:
            self._layouts[key] = state.pos, make_layout(ctx, state, period, block, open_last, self.host)
        return self._layouts[key][1]


class Call(NamedTuple):
    """What a layer knows about one call besides its tokens and its state.

    Attributes:
        ctx: positions of the tokens, padding and starts of documents.
        after: `[B]` tokens since the start of the document, after the call.
        packing: where padding and documents lie; None if there are none.
        donate_state: the weights of the state may be written over.
    """

    ctx: Context
    after: Tensor
    packing: Packing | None
    donate_state: bool


def check_flags(tokens: Tensor, mask: Tensor | None, reset: Tensor | None) -> None:
    """Checks that flags have the shape and type for `tokens` `[B, T, ...]`.

    Raises:
        MetaTTTError: flags of another type or shape.
    """
    for name, flags in (("mask", mask), ("reset", reset)):
        if flags is not None and (
            not isinstance(flags, Tensor) or flags.shape != tokens.shape[:2] or flags.dtype != torch.bool
        ):
            found = f"{flags.dtype} of shape {list(flags.shape)}" if isinstance(flags, Tensor) else type(flags).__name__
            raise MetaTTTError(f"{name} is {found}, expected torch.bool of shape {list(tokens.shape[:2])}")


def pack(mask: Tensor | None, reset: Tensor | None, device: torch.device) -> Packing | None:
    """The packing of a call, from `[B, T]` flags; None if there is neither padding nor a document that starts.

    Args:
        mask, reset: on the device, where the host waits for them, or on the host.
        device: of the tokens.

    Raises:
        MetaTTTError: a start that no token of the call follows. (`torch.compile` cannot look, and drops it.)
    """
    if torch.compiler.is_compiling():
        if mask is None and reset is None:
            return None
        order = None if mask is None else _order(mask)
        return Packing(order, *_sorted(mask, reset, order), None)
    # The one time that the host waits for the device. A copy: a backward pass reads it, the caller's may be refilled.
    flags = [None if x is None else x.to("cpu", copy=True) for x in (mask, reset)]
    if flags[0] is not None and flags[0].all():
        mask = flags[0] = None
    if flags[1] is not None and not flags[1].any():
        reset = flags[1] = None
    if mask is None and reset is None:
        return None
    if flags[0] is not None and flags[1] is not None:
        lost = flags[1] & (flags[0].flip(1).cumsum(1).flip(1) == 0)  # on padding, and no token comes after it
        if lost.any():
            raise MetaTTTError(
                f"reset marks padding of sequence {int(lost.any(1).int().argmax())} that no token of this call "
                "follows: mark the first token of a document, in the call that brings it (reset & mask leaves such "
                "marks out)"
            )
    order = host_order = None
    if flags[0] is not None and (flags[0][:, 1:] & ~flags[0][:, :-1]).any():
        host_order = _order(flags[0])
        order = to_device(host_order, device)
    host = _sorted(flags[0], flags[1], host_order)
    valid, first = (None if x is None else to_device(x, device) for x in host)
    return Packing(order, valid, first, host)


def _order(mask: Tensor) -> Tensor:
    return mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def _sorted(mask: Tensor | None, reset: Tensor | None, order: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The flags with padding last. A start that is marked on padding belongs to the next real token."""
    if mask is None:
        return None, reset
    if order is not None:
        mask = mask.gather(1, order)
    if reset is not None:
        starts = reset.cumsum(1)
        count = F.pad(starts if order is None else starts.gather(1, order), (1, 0))
        reset = (count[:, 1:] > count[:, :-1]) & mask
    return mask, reset
