"""The columns on which the tokens of a call are laid out, so that the mini-batches of all sequences end together.

Token j of a sequence that has read `pos` tokens belongs to place `(pos + j) mod b` of its mini-batch. Where sequences
differ in this phase, or documents start inside a sequence, tokens are laid out in *columns*: a document starts at a
multiple of b, a continued one at its phase, and unfilled columns change nothing (η = 0, α = β = 1, κ = 0).

The layout depends on the values of masks and positions. They are fetched from the device once, unless they are on the
host already; the layout is computed on the host, and what tensors need of it goes back: no block of a sequence waits
for the device. Flags that are on the host, and phases that are known there, need no transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.tokens import Block, consecutive, each
from metattt.modules import RECORDING, expand_like, transformed
from metattt.state import Context, State

Host = tuple[Tensor | None, Tensor | None]


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


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to the device without waiting."""
    return x.to(device, non_blocking=device.type == "cuda")


def make_layout(
    ctx: Context,
    state: State,
    period: int | None,
    block: int,
    open_last: bool = False,
    host: Host | None = None,
    open_: Tensor | None = None,
    lead: Tensor | None = None,
) -> ColumnLayout:
    """The layout of one call.

    Args:
        state: the state before the call, with the positions of the sequences.
        period: tokens after which the rule repeats itself; None if it does not depend on the phase.
        block: tokens per step of the scan; equal to `period` if there is one.
        open_last: the mini-batches that sequences leave open share one block, the last. In each block before it a
            sequence completes its mini-batch or has no token, so kernels can run it.
        host: `ctx.valid` and `ctx.first` on the host, where they are at hand.
        open_: `[B]` columns before the first real token; None: its place in its mini-batch.
        lead: `[B]` column of the first place in `ctx`, less than `open_` if that place holds no token. None: `open_`.
    """
    length, phase, end = ctx.positions.shape[1], 0 if period is None else state.phase, None
    open_last = open_last and period is not None and length > 1
    if ctx.first is None and phase is not None:
        blocks, last = consecutive(length, phase, block)
        if ctx.valid is None:
            return ColumnLayout(blocks, None, None, 0 if period is None else last)
        if torch.compiler.is_compiling():
            return _padded(ctx.valid, ctx.valid, each(blocks), 0 if period is None else None)
        seen = ctx.valid.cpu() if host is None or host[0] is None else host[0]
        ends = seen.sum(1) + phase
        phases, cut = (ends % block).unique(), ends[ends % block > 0] // block
        end = 0 if period is None else int(phases) if len(phases) == 1 else None
        if not open_last or len(cut) == 0 or bool(cut.min() == ends.max() // block):
            return _padded(ctx.valid, seen, each(blocks), end)
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
    return _unaligned(ctx, open_, lead, open_last, block, 0 if period is None else end, host)


def _padded(valid: Tensor, seen: Tensor, plain: Sequence[Block], end: int | None) -> ColumnLayout:
    """Sequences that start at the same phase and end in the same mini-batch, or with one: columns are tokens. `seen` is
    `valid` on the host."""
    parts = seen.split([x.length for x in plain], dim=1)
    commits = [part[:, -1] for part in parts]
    counts = [x.filled - x.length + part.sum(1) for x, part in zip(plain, parts, strict=True)]
    blocks = _told_apart(plain, commits, counts, [None] * len(parts), valid.device)
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
    on_device = [to_device(torch.stack(list(rows)), device) if rows else None for rows in (commits, filled)]
    begun = [x for x, any_ in zip(restarts, some, strict=True) if any_ and x is not None]
    again = to_device(torch.stack(begun), device) if begun else None
    starts = iter(() if again is None else again)
    return [
        x._replace(
            commit=x.commit is True and (everywhere[i] or on_device[0][i]),  # type: ignore[index]
            filled=x.filled if bool((filled[i] == x.filled).all()) else on_device[1][i],  # type: ignore[index]
            restart=next(starts) if some[i] else None,
            begins=restarts[i] if some[i] else None,
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
    ctx: Context, open_: Tensor, lead: Tensor, open_last: bool, block: int, end: int | None, host: Host | None
) -> ColumnLayout:
    """Different phases, documents that start inside a sequence, or sequences that end in different mini-batches."""
    batch, length = ctx.positions.shape
    device, tracing = ctx.positions.device, torch.compiler.is_compiling()
    if ctx.first is not None and tracing:
        raise MetaTTTError(
            "reset= needs a layout that depends on its values, which torch.compile and torch.export cannot trace: call "
            "the layer eagerly, or one document a call without reset="
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
    columns = length + block - 1
    if not tracing:
        if open_last:
            ends = torch.where(valid, column + 1, 0).amax(1)
            open_at = ends // block * block  # where a mini-batch begins that stays open
            may_move = ((open_at > 0) | (open_ == 0)).unsqueeze(1) & (column >= open_at.unsqueeze(1))
            column = torch.where(may_move, column + (open_at.max() - open_at).unsqueeze(1), column)
        columns = int(torch.where(valid, column, 0).max()) + 1
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
        last = torch.where(valid, column, -1).amax(1) // block
        commits = [x | ((i < last) & part.any(1)) for i, (x, part) in enumerate(zip(commits, parts, strict=True))]
    filled = [
        (torch.arange(1, size + 1, device=open_.device) * part).amax(1)
        for size, part in zip(lengths, parts, strict=True)
    ]
    again = [None if restart is None else restart[:, i] for i in range(len(blocks))]
    made = _told_apart(blocks, commits, filled, again, device)
    return ColumnLayout(made, to_device(column, device), to_device(is_filled, device), end)
