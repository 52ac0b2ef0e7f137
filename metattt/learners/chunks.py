"""Decayed sums over tokens, a chunk of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from metattt.ops.chunk import decays
from metattt.state import Context, DataGates
from metattt.tasks.base import Views


class Chunk(NamedTuple):
    """Consecutive tokens of `S_t = keep_t S_{t−1} + write_t x_t`, whose sum is 0 before the first token of a document.

    With S_0 the sum before the chunk, `S_t = kept_t S_0 + Σ_{s≤t} decay_ts write_s x_s`. Factors are products, never
    quotients: they may be arbitrarily small, or 0.

    Attributes:
        k, v, q: views `[B, H, c, d]`.
        write: `[B, H or 1, c]`.
        decay: `Π_{s<r≤t} keep_r`, `[B, H or 1, c, c]`, lower triangular.
        kept: `Π_{r≤t} keep_r`, `[B, H or 1, c]`.
        levels, blend: `[B, H, c, n]` and `[B, H or 1, c]`, or None.
        positions: `[B, c]` of the tokens in their documents.
        after: `[B]` the position of the token that would follow.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    write: Tensor
    decay: Tensor
    kept: Tensor
    levels: Tensor | None
    blend: Tensor | None
    positions: Tensor
    after: Tensor

    @property
    def mix(self) -> Tensor:
        """The decay from token s to token t: `[B, H or 1, c, c]`."""
        return self.decay * self.write.unsqueeze(-2)


def chunks(views: Views, ctx: Context, gates: DataGates, size: int) -> Iterator[Chunk]:
    """The tokens of a call, at most `size` at a time, in the type of the gates; padding is inert in these."""
    k, v, q = (view.to(gates.write.dtype) for view in (views.k, views.v, views.q))
    keep = torch.ones_like(gates.write) if gates.keep is None else gates.keep
    if ctx.first is not None:
        keep = torch.where(ctx.first.unsqueeze(1), 0, keep)
    count = k.shape[2]
    for start in range(0, count, size):
        part = slice(start, min(start + size, count))
        positions = ctx.positions[:, part]
        after = positions[:, -1] + 1
        if ctx.valid is not None:  # padding counts on from the last real token
            real = ctx.valid[:, part].sum(1, keepdim=True)
            after = torch.cat([positions, after.unsqueeze(1)], 1).gather(1, real).squeeze(1)
        decay, kept = decays(keep[:, :, part])
        given = (k, v, q, gates.write, gates.levels, gates.blend)
        *cut, levels, blend = (None if x is None else x[:, :, part] for x in given)
        yield Chunk._make([*cut, decay, kept, levels, blend, positions, after])


def together(parts: Iterator[Chunk], most: int) -> Iterator[list[Chunk]]:
    """Consecutive chunks of one length, at most `most`."""
    some: list[Chunk] = []
    for part in parts:
        if len(some) == most or (some and part.k.shape[2] != some[0].k.shape[2]):
            yield some
            some = []
        some.append(part)
    yield some


def joined(parts: list[Chunk]) -> Chunk:
    """Chunks of one length as one, `[B, H, chunks, c, ·]`. (Its positions are those of the last.)"""
    *given, positions, after = zip(*parts, strict=True)
    return Chunk._make([*(None if x[0] is None else torch.stack(x, 2) for x in given), positions[-1], after[-1]])
