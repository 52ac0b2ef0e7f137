"""The layout of tokens: padding goes to the end, and sequences go onto columns on which their mini-batches end
together.

Token j of a sequence that has read `pos` tokens belongs to place `(pos + j) mod b` of its mini-batch. Where sequences
differ in this phase, or documents start inside a sequence, tokens are laid out in *columns*: a document starts at a
multiple of b, a continued one at its phase, and unfilled columns change nothing (η = 0, α = β = 1, κ = 0).

The layout depends on the values of masks and positions. They are fetched from the device once, unless they are on the
host already; the layout is computed on the host, and what tensors need of it goes back: no block of a sequence waits
for the device. Flags that are on the host, and phases that are known there, need no transfer. All layers of a model
share one `Packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import Block, consecutive, each
from metattt.modules import RECORDING, expand_like, transformed
from metattt.state import Context, State


class ColumnLayout(NamedTuple):
    """The layout of one call: its blocks, and how tokens get to columns and back.

    Attributes:
        blocks: what the scan walks over.
        column: `[B, T]` column of each token, one past the last for padding; None if columns are tokens.
        is_filled: `[B, columns]` filled columns; None if all are.
        phase: `pos mod b` after the call, None if it differs between sequences.
    """

    blocks: Sequence[Block]
    column: Tensor | None
    is_filled: Tensor | None
    phase: int | None

    def scatter(self, x: Tensor) -> Tensor:
        """`[B, H, T, ...]` to `[B, H, columns, ...]`, zeros in unfilled columns."""
        assert self.is_filled is not None
        batch, columns = self.is_filled.shape
        laid = x.new_zeros(batch * (columns + 1), x.shape[1], *x.shape[3:])
        laid = laid.index_copy(0, self._rows(columns + 1), x.transpose(1, 2).flatten(0, 1))
        return laid.unflatten(0, (batch, columns + 1))[:, :columns].transpose(1, 2)

    def gather(self, y: Tensor) -> Tensor:
        """The inverse of `scatter` on filled columns."""
        assert self.column is not None
        rows = y.transpose(1, 2).flatten(0, 1).index_select(0, self._rows(y.shape[2]))
        return rows.unflatten(0, self.column.shape).transpose(1, 2)

    def _rows(self, columns: int) -> Tensor:
        """`[B·T]` rows of the tokens, where sequences of so many columns follow each other."""
        assert self.column is not None
        first = columns * torch.arange(len(self.column), device=self.column.device)
        return (self.column.clamp(max=columns - 1) + first.unsqueeze(1)).flatten()


def take_columns(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` `[B or 1, H or 1, N]` of `x` `[B, H, T, ...]`."""
    return x.gather(2, expand_like(index, x).expand(*x.shape[:2], -1, *x.shape[3:]))


# -- padding -----------------------------------------------------------------------------------------------------------


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

    def layout(self, ctx: Context, state: State, period: int | None, block: int) -> ColumnLayout:
        """As `make_layout`, once for all layers with the same `pos` and the same mini-batches."""
        if torch.compiler.is_compiling():
            return make_layout(ctx, state, period, block)
        key = (id(state.pos), state.phase, period, block)
        if key not in self._layouts:
            self._layouts[key] = state.pos, make_layout(ctx, state, period, block, self.host)
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
    flags = [None if x is None else x.cpu() for x in (mask, reset)]  # the one time that the host waits for the device
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
        order = _sent(host_order, device)
    host = _sorted(flags[0], flags[1], host_order)
    valid, first = (None if x is None else _sent(x, device) for x in host)
    return Packing(order, valid, first, host)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to the device without waiting."""
    return x.to(device, non_blocking=device.type == "cuda")


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


# -- columns -----------------------------------------------------------------------------------------------------------


Host = tuple[Tensor | None, Tensor | None]


def make_layout(
    ctx: Context,
    state: State,
    period: int | None,
    block: int,
    host: Host | None = None,
    open_: Tensor | None = None,
    lead: Tensor | None = None,
) -> ColumnLayout:
    """The layout of one call.

    Args:
        state: the state before the call, with the positions of the sequences.
        period: tokens after which the rule repeats itself; None if it does not depend on the phase.
        block: tokens per step of the scan; equal to `period` if there is one.
        host: `ctx.valid` and `ctx.first` on the host, where they are at hand.
        open_: `[B]` columns before the first real token; None: its place in its mini-batch.
        lead: `[B]` column of index 0 in `ctx`; below `open_` where `ctx` begins with unfilled slots. None: the same.
    """
    length, phase = ctx.positions.shape[1], 0 if period is None else state.phase
    if ctx.first is None and phase is not None:
        blocks, end = consecutive(length, phase, block)
        if ctx.valid is not None:
            return _padded(ctx.valid, phase, period, block, each(blocks), host)
        return ColumnLayout(blocks, None, None, 0 if period is None else end)
    if ctx.positions.shape[0] == 0:  # no sequences, which any layout is right for
        return ColumnLayout(consecutive(length, 0, block)[0], None, None, None)
    if period is None or (open_ is None and phase is not None and not torch.compiler.is_compiling()):
        at = "cpu" if not torch.compiler.is_compiling() else state.pos.device  # the host knows it, and lays tokens out
        open_ = torch.full(state.pos.shape, phase or 0, dtype=torch.long, device=at)
        lead = open_ if lead is None or period is None else lead
    open_ = state.pos % block if open_ is None else open_
    lead = open_ if lead is None else lead
    if ctx.first is None and length == 1:
        return _single(ctx, open_, block)
    return _unaligned(ctx, open_, lead, block, None if period is not None else 0, host)


def _padded(
    valid: Tensor, phase: int, period: int | None, block: int, plain: Sequence[Block], host: Host | None
) -> ColumnLayout:
    """Sequences that start at the same phase and end at different ones: columns are tokens."""
    seen = valid if torch.compiler.is_compiling() else valid.cpu() if host is None or host[0] is None else host[0]
    parts = seen.split([x.length for x in plain], dim=1)
    commits = [part[:, -1] for part in parts]
    counts = [x.filled - x.length + part.sum(1) for x, part in zip(plain, parts, strict=True)]
    blocks = _told_apart(plain, commits, counts, [None] * len(parts), valid.device)
    end: int | None = 0 if period is None else None
    if period is not None and not torch.compiler.is_compiling():
        ends = (seen.sum(1) + phase) % block
        end = int(ends[0]) if len(ends) and bool((ends == ends[0]).all()) else None
    return ColumnLayout(blocks, None, valid, end)


def _told_apart(
    blocks: Sequence[Block],
    commits: Sequence[Tensor],
    filled: Sequence[Tensor],
    restarts: Sequence[Tensor | None],
    device: torch.device,
) -> list[Block]:
    """Blocks with what differs between sequences as tensors on the device, and plain numbers where it does not (kernels
    take those)."""
    if torch.compiler.is_compiling():
        return [
            x._replace(commit=commit if x.commit is True else False, filled=count, restart=again)
            for x, commit, count, again in zip(blocks, commits, filled, restarts, strict=True)
        ]
    everywhere = [bool(commit.all()) for commit in commits]
    some = [again is not None and bool(again.any()) for again in restarts]
    on_device = [_sent(torch.stack(list(rows)), device) if rows else None for rows in (commits, filled)]
    begun = [x for x, any_ in zip(restarts, some, strict=True) if any_ and x is not None]
    again = _sent(torch.stack(begun), device) if begun else None
    starts = iter(() if again is None else again)
    return [
        x._replace(
            commit=x.commit is True and (everywhere[i] or on_device[0][i]),  # type: ignore[index]
            filled=x.filled if bool((filled[i] == x.filled).all()) else on_device[1][i],  # type: ignore[index]
            restart=next(starts) if some[i] else None,
            whole=bool((commits[i] | (filled[i] == 0)).all()),
        )
        for i, x in enumerate(blocks)
    ]


def _single(ctx: Context, phase: Tensor, block: int) -> ColumnLayout:
    """One token per sequence, at different phases."""
    seen = torch.ones_like(phase) if ctx.valid is None else ctx.valid[:, 0].long()
    commit = (phase + seen == block) & (seen > 0)
    known = commit.device.type == "cpu" and not (torch.compiler.is_compiling() or transformed() or RECORDING.get())
    # Decoding need not compute a commit that no sequence takes. (In training every parameter then has a derivative.)
    nobody = known and not torch.is_grad_enabled() and not commit.any()
    return ColumnLayout([Block(1, phase, False if nobody else commit, phase + seen)], None, ctx.valid, None)


def _unaligned(
    ctx: Context, open_: Tensor, lead: Tensor, block: int, end: int | None, host: Host | None
) -> ColumnLayout:
    """Different phases, or documents that start inside a sequence."""
    batch, length = ctx.positions.shape
    device, tracing = ctx.positions.device, torch.compiler.is_compiling()
    if ctx.first is not None and tracing:
        raise MetaTTTError(
            "reset= needs a layout that depends on its values, which torch.compile cannot trace: call the layer eagerly"
        )
    valid, first = (ctx.valid, ctx.first) if host is None else host
    if not tracing:
        open_, lead = torch.stack([open_, lead]).cpu() if open_.device == lead.device else (open_.cpu(), lead.cpu())
        valid, first = (None if x is None else x.cpu() for x in (valid, first))
    valid = open_.new_ones(batch, length, dtype=torch.bool) if valid is None else valid
    index = torch.arange(length, device=open_.device).expand(batch, -1)
    column = index + lead.unsqueeze(1)
    restart = None
    if first is not None:
        document = first.cumsum(1)
        sizes = torch.zeros(batch, int(document.max()) + 1, dtype=torch.long, device=open_.device)
        sizes.scatter_add_(1, document, valid.long())
        sizes[:, 0] += torch.where(sizes[:, 0] > 0, open_, 0)
        room = (sizes + block - 1) // block * block
        begin = torch.where(first, index, 0).cummax(1).values  # the document's first token
        column = torch.where(document > 0, (room.cumsum(1) - room).gather(1, document) + index - begin, column)
    columns = length + block - 1 if tracing else int(torch.where(valid, column, 0).max()) + 1
    if first is not None:
        restart = torch.zeros(batch, (columns + block - 1) // block + 1, dtype=torch.bool, device=open_.device)
        restart = restart.scatter(1, torch.where(first & valid, column // block, restart.shape[1] - 1), True)
    column = torch.where(valid, column, columns)
    is_filled = torch.zeros(batch, columns + 1, dtype=torch.bool, device=open_.device).scatter(1, column, True)[:, :-1]
    lengths = [min(block, columns - start) for start in range(0, columns, block)]
    blocks = [Block(size, 0, True if size == block else False, size) for size in lengths]  # noqa: SIM210 (as above)
    parts = is_filled.split(lengths, dim=1)
    commits = [part[:, -1] for part in parts]
    if restart is not None:  # a document that ends has no use for its weights: its last mini-batch counts as whole
        commits = [*(x | restart[:, i] for i, x in enumerate(commits[:-1], 1)), commits[-1]]
    filled = [
        (torch.arange(1, size + 1, device=open_.device) * part).amax(1)
        for size, part in zip(lengths, parts, strict=True)
    ]
    again = [None if restart is None else restart[:, i] for i in range(len(blocks))]
    made = _told_apart(blocks, commits, filled, again, device)
    return ColumnLayout(made, _sent(column, device), _sent(is_filled, device), end)
