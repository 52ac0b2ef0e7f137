"""The element-wise scan that Mamba and Longhorn share: `h_t = a_t ∘ h_{t−1} + b_t`, `y_t = h_t q_t`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metattt.mixers.chunks import by_chunks

Gates = Callable[..., tuple[Tensor, Tensor]]


def scan(
    gates: Gates,
    memory: Tensor,
    query: Tensor,
    first: Tensor | None,
    tokens: Sequence[Tensor],
    shared: Sequence[Tensor],
    chunk_size: int,
    group_size: int | None,
) -> tuple[Tensor, Tensor]:
    """Reads tokens with decays and writes that are made for one chunk at a time.

    Nothing is divided by a decay, and no logarithm is taken of one: decays of 0 and 1 are exact.

    Args:
        gates: from tokens `[c, B, ...]` and `shared` to a and b, `[c, B, D, N]` each, 0 ≤ a ≤ 1.
        memory: h `[B, D, N]` before the first token.
        query: q `[B, T, N]`.
        first: `[B, T]` True where a document starts, and h from 0; None: nowhere.
        tokens: `[B, T, ...]` each, for `gates`.
        shared: parameters, for `gates`.
        chunk_size, group_size: as in `by_chunks`.

    Returns:
        y `[B, T, D]` and h `[B, D, N]` after the last token.
    """
    starts = () if first is None else (first,)

    def step(memory: Tensor, query: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(0, 1) for x in given[: len(starts) + len(tokens)]]
        a, b = gates(*rows[len(starts) :], *given[len(rows) :])
        if starts:
            a = a.masked_fill(rows[0][..., None, None], 0)
        few = a.device.type != "cpu" or torch.compiler.is_compiling()
        h, memory = (doubling if few else one_by_one)(a, b, memory)
        y = (h @ query.transpose(0, 1).unsqueeze(-1)).squeeze(-1)
        return y.transpose(0, 1), memory

    return by_chunks(step, memory, (query, *starts, *tokens), shared, chunk_size, group_size)


def one_by_one(a: Tensor, b: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """h `[c, B, D, N]` of c tokens and the last of it, one after the other: fewest operations, for a CPU."""
    states = []
    for decay, write in zip(a.unbind(0), b.unbind(0), strict=True):
        memory = torch.addcmul(write, decay, memory)
        states.append(memory)
    return torch.stack(states), memory


def doubling(a: Tensor, b: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The same in ⌈log₂ c⌉ rounds over all tokens (Hillis and Steele's scan): few launches, for other devices.

    After round j, `(a_t, b_t)` is the map of the last 2^j tokens up to t.
    """
    b = torch.cat([torch.addcmul(b[:1], a[:1], memory.unsqueeze(0)), b[1:]])
    reach = 1
    while reach < len(a):
        b = torch.cat([b[:reach], torch.addcmul(b[reach:], a[reach:], b[:-reach])])
        a = torch.cat([a[:reach], a[reach:] * a[:-reach]])
        reach *= 2
    return b, b[-1].clone()  # a state must not hold on to a whole chunk
