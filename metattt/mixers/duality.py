"""The scan of Mamba-2 in matrix products: state space duality (arXiv 2405.21060, Sec. 6)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from metattt.mixers.by_fla import scan_by_fla
from metattt.mixers.chunks import by_chunks
from metattt.ops.chunk import chunk_read, chunk_state, decays_of_logs


def duality(
    x: Tensor,
    log_decay: Tensor,
    b: Tensor,
    c: Tensor,
    memory: Tensor,
    first: Tensor | None,
    chunk_size: int,
    group_size: int | None,
    matmul_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`h_t = a_t h_{t−1} + x_t b_tᵀ`, `y_t = h_t c_t`, with one decay `a_t` per head.

    Args:
        x: `[B, T, H, P]`, what is written (Δ x of the layer).
        log_decay: log a `[B, T, H]`, at most 0.
        b, c: `[B, T, G, N]`; group g serves heads g H/G to (g + 1) H/G − 1.
        memory: h `[B, H, P, N]` before the first token.
        first: `[B, T]` True where a document starts, and h from 0; None: nowhere.
        chunk_size, group_size: as in `by_chunks`.
        matmul_dtype: type to which operands of matmuls may be rounded; where it has 16 bits, the kernels of
            flash-linear-attention are used if they are there. None: none.

    Returns:
        y `[B, T, H, P]` and h after the last token.
    """
    if first is None and matmul_dtype is not None:
        plain = partial(duality, first=None, chunk_size=chunk_size, group_size=group_size)
        found = scan_by_fla(x, log_decay, b, c, memory, matmul_dtype, plain)
        if found is not None:
            return found
    if first is not None:
        log_decay = log_decay.masked_fill(first.unsqueeze(-1), -torch.inf)  # a = 0
    return by_chunks(_chunk, memory, (x, log_decay, b, c), (), chunk_size, group_size)


def _chunk(memory: Tensor, x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: `Y = (C Bᵀ ∘ L) X` for what was written in it, `exp(ℓ_1 + … + ℓ_t) C h` for what was before."""
    groups, heads = b.shape[2], x.shape[2]
    x = x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # [B, G, R, c, P]
    log_decay = log_decay.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)  # [B, G, R, c]
    b, c = (one.transpose(1, 2).unsqueeze(2) for one in (b, c))  # [B, G, 1, c, N]
    h = memory.unflatten(1, (groups, heads // groups))  # [B, G, R, P, N]
    within, kept = decays_of_logs(log_decay)
    y, h = chunk_read(c, b, x, within, kept, h.mT), chunk_state(x, b, within, kept, h)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3), h.flatten(1, 2)
