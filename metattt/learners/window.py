"""A window over data: a query sees the last few tokens of its document, and its first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.state import Context, Tensors
from metattt.tasks.base import Views

Estimate = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Predictions of queries `[N, H, T, d]` from keys and values `[N, G, S, d]`, of which they see `[N or 1, 1, T, S]`
(None: those up to their own)."""

EMPTY = -1  # the position of a place that holds no token


class Data(NamedTuple):
    """Tokens that queries may see: keys and values `[B, G, S, d]`, and `[B, S]` their documents, counted in this call,
    and their positions in these (`EMPTY`: no token)."""

    k: Tensor
    v: Tensor
    document: Tensor
    position: Tensor

    def __add__(self, other: Data) -> Data:  # type: ignore[override]
        """These tokens, then those."""
        pairs = zip(self, other, strict=True)
        return Data(*(torch.cat([one, two.to(one.dtype)], dim=2 if one.ndim == 4 else 1) for one, two in pairs))

    def cut(self, start: int, stop: int) -> Data:
        """The places from `start` to `stop`."""
        return Data(*(x[:, :, start:stop] if x.ndim == 4 else x[:, start:stop] for x in self))

    def take(self, rows: Tensor, wanted: Tensor) -> Data:
        """The places `rows` `[B, N]` where they are `wanted`; elsewhere empty ones, which hold zeros."""
        rows = rows.clamp(0, self.position.shape[1] - 1)
        position = torch.where(wanted, self.position.gather(1, rows), EMPTY)
        index, blank = rows[:, None, :, None], (position == EMPTY)[:, None, :, None]
        k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).masked_fill(blank, 0) for x in self[:2])
        return Data(k, v, self.document.gather(1, rows), position)


class Window:
    """The window of a query at position p: the positions p − size < s ≤ p of its document, and those below `sinks`.

    Queries are computed in chunks of `size` tokens, each from two windows of data and the sinks, so that time and
    memory are O(T · size).

    Args:
        size, sinks: tokens.
    """

    def __init__(self, size: int, sinks: int):
        self.size, self.sinks = size, sinks

    def scan(self, estimate: Estimate, views: Views, state: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and what the next call needs.

        Args:
            estimate: computes predictions from the data that queries see.
            views: of the new tokens; k and v may have fewer heads than q.
            state: `k`, `v` `[B, G, S, d]` and `position` `[B, S]`: places for the `sinks` first tokens of the document,
                then for the last others, `size − 1` once so many were read. Empty at the start.
            ctx: as for `NonParametric.scan`.
        """
        k, v, q = views[:3]
        document = torch.zeros_like(ctx.positions) if ctx.first is None else ctx.first.cumsum(1)
        real = ctx.positions if ctx.valid is None else torch.where(ctx.valid, ctx.positions, EMPTY)
        new = Data(k, v, document, real)
        first, past = self._carried(state, new)
        plain = ctx.first is None and ctx.valid is None
        head = min(self.size, q.shape[2])
        if plain and not state:
            y = estimate(q[:, :, :head], k[:, :, :head], v[:, :, :head], None)
        else:
            data = (first + past if self.sinks else past) + new.cut(0, head)
            y = estimate(
                q[:, :, :head], data.k, data.v, self._seen(ctx.positions[:, :head], document[:, :head], data, plain)
            )
        if head < q.shape[2]:
            y = torch.cat([y, self._chunks(estimate, q, new, first, ctx.positions, plain)], dim=2)
        return y, self._kept(new, first, past, ctx)

    def visible(self, positions: Tensor, data: Tensor) -> Tensor:
        """`[B, T, S]`: which tokens at positions `data` `[B, S]` of one document a query at `positions` `[B, T]`
        sees."""
        place, position = positions.unsqueeze(-1), data.unsqueeze(-2)
        near = position > place - self.size
        if self.sinks:
            near = near | (position < self.sinks)
        return (position > EMPTY) & (position <= place) & near

    def _carried(self, state: Tensors, new: Data) -> tuple[Data, Data]:
        """The sinks, and the last tokens before the call."""
        if not state:
            shape = list(new.k.shape)
            k, v = (x.new_zeros(*shape[:2], self.sinks, x.shape[3]) for x in (new.k, new.v))
            state = {"k": k, "v": v, "position": new.position.new_full((shape[0], self.sinks), EMPTY)}
        k, v = state["k"].to(new.k.dtype), state["v"].to(new.v.dtype)
        data = Data(k, v, torch.zeros_like(state["position"]), state["position"])
        return data.cut(0, self.sinks), data.cut(self.sinks, data.position.shape[1])

    def _seen(self, positions: Tensor, document: Tensor, data: Data, real: bool = False) -> Tensor:
        """`[B, 1, T, S]`: which data the queries see; the last T places of `data` are their own tokens. `real`: there
        is no padding among them."""
        seen = (data.document.unsqueeze(-2) == document.unsqueeze(-1)) & self.visible(positions, data.position)
        if real:
            return seen.unsqueeze(1)
        # A padded query sees its own token, so that its (unused) average is finite.
        count, width = seen.shape[-2:]
        own = torch.ones(count, width, dtype=torch.bool, device=seen.device).tril(width - count).triu(width - count)
        return (seen | own).unsqueeze(1)

    def _chunks(self, estimate: Estimate, q: Tensor, new: Data, first: Data, positions: Tensor, plain: bool) -> Tensor:
        """Predictions for all queries but the first `size`: `[B, H, T − size, d]`."""
        size, (batch, heads, total) = self.size, q.shape[:3]
        number = -(-(total - size) // size)
        missing = (number + 1) * size - total

        def fold(x: Tensor, start: int, length: int) -> Tensor:
            """`length` tokens of every chunk, from `start` on, as separate sequences."""
            if x.ndim == 2:
                return F.pad(x, (0, missing), value=EMPTY)[:, start:].unfold(1, length, size).flatten(0, 1)
            folded = F.pad(x, (0, 0, 0, missing))[:, :, start:].unfold(2, length, size)
            return folded.permute(0, 2, 1, 4, 3).flatten(0, 1)

        band = Data(*(fold(x, 1, 2 * size - 1) for x in new))
        if plain and not self.sinks:
            near = torch.ones(size, 2 * size - 1, dtype=torch.bool, device=q.device).tril(size - 1).triu()[None, None]
        else:
            at = fold(positions, size, size), fold(new.document, size, size)
            band = self._sinks_of_chunks(new, first, positions, number) + band if self.sinks else band
            near = self._seen(*at, band)
        y = estimate(fold(q, size, size), band.k, band.v, near)
        y = y.unflatten(0, (batch, number)).transpose(1, 2).reshape(batch, heads, number * size, y.shape[-1])
        return y[:, :, : total - size]

    def _sinks_of_chunks(self, new: Data, first: Data, positions: Tensor, number: int) -> Data:
        """The sinks of every chunk that lie before its two windows: those of the document that is open there."""
        begin = 1 + self.size * torch.arange(number, device=positions.device)  # the first token of the two windows
        place, document = positions[:, begin], new.document[:, begin]
        order = torch.arange(self.sinks, device=positions.device)
        rows = (begin - place).unsqueeze(-1) + order  # [B, chunks, sinks]; below 0 where they were carried
        wanted = rows < begin.view(-1, 1)
        rows = torch.where(rows < 0, order, rows + self.sinks)
        found = (first + new).take(rows.flatten(1), wanted.flatten(1))
        k, v, position = (
            x.unflatten(-2 if x.ndim == 4 else 1, (number, self.sinks)) for x in (found.k, found.v, found.position)
        )
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        return Data(k, v, document.unsqueeze(-1).expand_as(position).flatten(0, 1), position.flatten(0, 1))

    def _kept(self, new: Data, first: Data, past: Data, ctx: Context) -> Tensors:
        """The state after the call: sinks and last tokens of the last document."""
        data, before = past + new, past.position.shape[1]
        total = data.position.shape[1]
        size = min(total, self.size - 1)
        if ctx.first is None and ctx.valid is None and not self.sinks:
            kept = data.cut(total - size, total)
            if total > 4 * size:  # a state must not hold on to a long sequence
                kept = Data(*(x.clone() for x in kept))
            return {"k": kept.k, "v": kept.v, "position": kept.position}
        end = before + ctx.lengths.unsqueeze(1)  # of the real tokens
        last = data.document.gather(1, (end - 1).clamp(min=0))
        rows = end - size + torch.arange(size, device=end.device)
        kept = self._of(data, rows, last, lambda row, place: (row >= 0) & (place >= self.sinks))
        if self.sinks:
            # Where the document starts: in this call, or so many tokens before it as were read.
            start = end - 1 - data.position.gather(1, (end - 1).clamp(min=0))
            rows = torch.where(last > 0, start, before - ctx.positions[:, :1])
            rows = rows + torch.arange(self.sinks, device=end.device)
            sinks = self._of(data, rows, last, lambda row, place: row >= before)
            stays = (last == 0) & (first.position > EMPTY)
            position = torch.where(stays, first.position, sinks.position)
            wide = stays[:, None, :, None]
            k, v = (torch.where(wide, old, x) for old, x in ((first.k, sinks.k), (first.v, sinks.v)))
            kept = Data(k, v, first.document, position) + kept
        return {"k": kept.k, "v": kept.v, "position": kept.position}

    @staticmethod
    def _of(data: Data, rows: Tensor, last: Tensor, wanted: Callable[[Tensor, Tensor], Tensor]) -> Data:
        """The places `rows` `[B, N]` that are of the document `last` `[B, 1]`, and `wanted` by number and position."""
        total = data.position.shape[1]
        document, place = (x.gather(1, rows.clamp(0, total - 1)) for x in (data.document, data.position))
        return data.take(rows, (rows < total) & (document == last) & wanted(rows, place))
