"""Where tokens go: padding to the end, and every sequence onto a frame whose mini-batches end at common columns.

Token j of a sequence that has read `pos` tokens belongs to place `(pos + j) mod b` of its mini-batch. Where sequences differ in
this phase, or documents start inside a sequence, tokens are laid out on a *frame*: a document starts at a multiple of b, a
continued one at its phase, and unfilled columns change nothing (η = 0, α = β = 1, κ = 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.state import Context


class Block(NamedTuple):
    """Consecutive columns inside one mini-batch.

    Attributes:
        length: columns.
        phase: place of the first column in its mini-batch; `[B]` if it differs between sequences (then `length` is 1).
        commit: whether the mini-batch is complete after these columns; `[B]` if it differs.
        filled: tokens of the mini-batch seen by the end of these columns; `[B]` if it differs.
        restart: `[B]` sequences that start a document here; None if none does.
    """

    length: int
    phase: int | Tensor
    commit: bool | Tensor
    filled: int | Tensor
    restart: Tensor | None = None

    def whole(self, size: int) -> bool:
        """Whether this is one mini-batch of `size` tokens for all sequences, from its first token to its commit."""
        return self.length == size and isinstance(self.phase, int) and self.phase == 0 and self.commit is True and self.restart is None


@dataclass(frozen=True)
class Frame:
    """The layout of one call: its blocks, and how tokens get to columns and back.

    Attributes:
        blocks: what the scan walks over.
        source: `[B, columns]` token at each column, T where there is none; None if columns are tokens.
        column: `[B, T]` column of each token; None likewise.
        live: `[B, columns]` filled columns; None if all are.
        phase: `pos mod b` after the call, None if it differs between sequences.
    """

    blocks: Sequence[Block]
    source: Tensor | None
    column: Tensor | None
    live: Tensor | None
    phase: int | None

    def place(self, x: Tensor) -> Tensor:
        """`[B, H, T, ...]` to `[B, H, columns, ...]`, zeros in unfilled columns."""
        if self.source is None:
            return x
        padded = torch.cat([x, x.new_zeros(*x.shape[:2], 1, *x.shape[3:])], dim=2)
        return _gather(padded, self.source)

    def take(self, y: Tensor) -> Tensor:
        """The inverse of `place` on filled columns."""
        return y if self.column is None else _gather(y, self.column)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Columns `index` `[B, N]` of `x` `[B, H, T, ...]`."""
    index = index.view(index.shape[0], 1, index.shape[1], *(1,) * (x.ndim - 3))
    return x.gather(2, index.expand(-1, x.shape[1], -1, *x.shape[3:]))


# -- padding ---------------------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Tokens with padding moved to the end, and the way back (`order` is None if nothing moved)."""

    x: Tensor
    context: Context
    order: Tensor | None
    pos: Tensor  # [B] tokens since the start of the document, after the call

    def restore(self, y: Tensor) -> Tensor:
        """`[B, T, D]` back to the caller's columns, zeros at padding."""
        if self.context.valid is None:
            return y
        y = y * self.context.valid.unsqueeze(-1)
        if self.order is None:
            return y
        inverse = self.order.argsort(1)
        return y.gather(1, inverse.unsqueeze(-1).expand_as(y))


def pack(x: Tensor, mask: Tensor | None, reset: Tensor | None, pos: Tensor, mini_batch_size: int) -> Packed:
    """Moves padding of `x` `[B, T, D]` to the end and counts positions. `pos` `[B]` tokens were read before."""
    order = None
    if mask is not None and not torch.compiler.is_compiling() and bool(mask.all()):
        mask = None
    if reset is not None and not torch.compiler.is_compiling() and not bool(reset.any()):
        reset = None
    if mask is not None:
        order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        x = x.gather(1, order.unsqueeze(-1).expand_as(x))
        if reset is not None:
            # A start that is marked on padding belongs to the next real token.
            count = F.pad((reset.cumsum(1)).gather(1, order), (1, 0))
            reset = count[:, 1:] > count[:, :-1]
        mask = mask.gather(1, order)
        x = x.masked_fill(~mask.unsqueeze(-1), 0)  # junk at padding, NaN included, must not reach a gradient
        reset = None if reset is None else reset & mask
    steps = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
    positions = steps + pos.unsqueeze(1)
    if reset is not None:
        start = torch.where(reset, steps, -1).cummax(1).values
        positions = torch.where(start < 0, positions, steps - start)
    context = Context(positions, mask, reset, mini_batch_size)
    last = (context.lengths - 1).clamp(min=0).unsqueeze(1)
    after = torch.where(context.lengths > 0, positions.gather(1, last).squeeze(1) + 1, pos)
    return Packed(x, context, order, after)


# -- frames ----------------------------------------------------------------------------------------------------------------------


def make_frame(ctx: Context, phase: int | None, open_: Tensor, lead: Tensor, period: int | None, block: int) -> Frame:
    """The frame of one call.

    Args:
        phase: place in its mini-batch of the first token, if it is the same for all sequences.
        open_: `[B]` columns before the first real token: its place in its mini-batch.
        lead: `[B]` column of index 0 in `ctx`; below `open_` where `ctx` begins with unfilled slots.
        period: tokens after which the rule repeats itself; None if it never looks at the phase.
        block: tokens that the scan hands on together; equal to `period` if there is one.
    """
    length = ctx.positions.shape[1]
    if period is None:
        phase, open_, lead = 0, torch.zeros_like(open_), torch.zeros_like(lead)
    if ctx.first is None and phase is not None:
        return _aligned(ctx, phase, period, block, length)
    if ctx.first is None and length == 1:
        return _single(ctx, open_, block)
    return _unaligned(ctx, open_, lead, block, None if period is not None else 0)


def _aligned(ctx: Context, phase: int, period: int | None, block: int, length: int) -> Frame:
    """All sequences stand at the same place of their mini-batch: columns are tokens."""
    blocks, start = [], 0
    while start < length:
        size = min(block - phase, length - start)
        commit: bool | Tensor = False
        if phase + size == block:  # an explicit branch: under torch.compile the comparison itself is symbolic
            commit = True if ctx.valid is None else ctx.valid[:, start + size - 1]
        filled: int | Tensor = phase + size
        if ctx.valid is not None:
            filled = phase + ctx.valid[:, start : start + size].sum(1)
        blocks.append(Block(size, phase, commit, filled))
        start, phase = start + size, (phase + size) % block
    end: int | None = phase
    if period is None:
        end = 0
    elif ctx.valid is not None:
        end = None
    return Frame(blocks, None, None, ctx.valid, end)


def _single(ctx: Context, phase: Tensor, block: int) -> Frame:
    """One token per sequence, each at a place of its own."""
    live = None if ctx.valid is None else ctx.valid
    seen = torch.ones_like(phase) if live is None else live[:, 0].long()
    return Frame([Block(1, phase, (phase + seen == block) & (seen > 0), phase + seen)], None, None, live, None)


def _unaligned(ctx: Context, open_: Tensor, lead: Tensor, block: int, end: int | None) -> Frame:
    """Different phases, or documents that start inside a sequence."""
    batch, length = ctx.positions.shape
    if ctx.first is not None and torch.compiler.is_compiling():
        raise MetaTTTError("reset= needs a layout that depends on its values, which torch.compile cannot trace: call the layer eagerly")
    valid = torch.ones_like(ctx.positions, dtype=torch.bool) if ctx.valid is None else ctx.valid
    index = torch.arange(length, device=open_.device).expand(batch, -1)
    column = index + lead.unsqueeze(1)
    restart = None
    if ctx.first is not None:
        document = ctx.first.cumsum(1)
        sizes = torch.zeros(batch, int(document.max()) + 1, dtype=torch.long, device=open_.device)
        sizes.scatter_add_(1, document, valid.long())
        sizes[:, 0] += torch.where(sizes[:, 0] > 0, open_, 0)
        room = (sizes + block - 1) // block * block
        begin = torch.where(ctx.first, index, 0).cummax(1).values  # the document's first token
        column = torch.where(document > 0, (room.cumsum(1) - room).gather(1, document) + index - begin, column)
    columns = length + block - 1 if torch.compiler.is_compiling() else int(torch.where(valid, column, 0).max()) + 1
    if ctx.first is not None:
        restart = torch.zeros(batch, (columns + block - 1) // block + 1, dtype=torch.bool, device=open_.device)
        restart = restart.scatter(1, torch.where(ctx.first & valid, column // block, restart.shape[1] - 1), True)
    target = torch.where(valid, column, columns)
    source = torch.full((batch, columns + 1), length, dtype=torch.long, device=open_.device)
    source = source.scatter(1, target, index)[:, :-1]
    live = source < length
    blocks = []
    for number, start in enumerate(range(0, columns, block)):
        size = min(block, columns - start)
        places = torch.arange(1, size + 1, device=open_.device)
        filled = (places * live[:, start : start + size]).amax(1)
        commit: bool | Tensor = live[:, start + size - 1] if size == block else False
        again = None if restart is None else restart[:, number]
        if not torch.compiler.is_compiling():  # most blocks are like any other: then kernels can take them
            commit = True if commit is not False and bool(commit.all()) else commit  # type: ignore[union-attr]
            again = again if again is not None and bool(again.any()) else None
        blocks.append(Block(size, 0, commit, filled, again))
    return Frame(blocks, source, column.clamp(0, columns - 1), live, end)
