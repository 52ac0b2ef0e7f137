"""A linear recurrence over a chunk of n tokens, `S_t = g_t S_{t−1} + x_t`, as matrix products.

Decays are never divisors: a decay g may be arbitrarily small, and 0 or 1 exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, matmul_dtype: torch.dtype) -> Tensor:
    """`a @ b` with operands rounded to `matmul_dtype`; the result keeps the (wider) type of `a`, as sums do."""
    return a @ b if a.dtype == matmul_dtype else (a.to(matmul_dtype) @ b.to(matmul_dtype)).to(a.dtype)


def solve_unit_lower(system: Tensor, right: Tensor) -> Tensor:
    """X of `(I + T) X = R`, where T is what `system` holds below its diagonal; the rest of it is not read.

    Args:
        system: `[..., n, n]`.
        right: R, `[..., n, m]`.
    """
    # of transposes, as LAPACK has matrices by columns: the same numbers without a copy that changes the layout
    return torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False, unitriangular=True).mT


def decay_matrix(gate: Tensor) -> Tensor:
    """The share of what token s wrote that is left at token t: `D_ts = Π_{s<r≤t} g_r` for s ≤ t, and 0 above.

    D is the inverse of `I − diag(g) L` with the down-shift L, and is found by substitution.

    Args:
        gate: g, `[..., n]`.

    Returns:
        D, `[..., n, n]`.
    """
    identity = torch.eye(gate.shape[-1], dtype=gate.dtype, device=gate.device)
    return solve_unit_lower(torch.diag_embed(-gate[..., 1:], offset=-1), identity)


def decays(gate: Tensor) -> tuple[Tensor, Tensor]:
    """`decay_matrix(gate)`, and what is left at token t of what was before the chunk: `Π_{r≤t} g_r`, `[..., n]`."""
    between = decay_matrix(gate)
    return between, between[..., 0] * gate[..., :1]


def decays_of_logs(log_gate: Tensor) -> tuple[Tensor, Tensor]:
    """`decays` of gates whose logarithms are known, from −∞ to 0: sums are faster than a substitution.

    Every sum is computed separately. Differences of running sums would lose small terms, and would be NaN if a decay is
    0.
    """
    size = log_gate.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=log_gate.device).tril(-1)
    sums = torch.where(later, log_gate.unsqueeze(-1), 0).cumsum(-2).masked_fill(later.mT, -torch.inf)
    return sums.exp(), log_gate.cumsum(-1).exp()


def chunk_read(q: Tensor, k: Tensor, v: Tensor, mix: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    """`o_t = q_t S_t` for `S_t = kept_t S_0 + Σ_s mix_ts k_sᵀ v_s`: `[..., n, d_v]`.

    Args:
        q, k: `[..., n, d]`.
        v: `[..., n, d_v]`.
        mix: `[..., n, n]`, lower triangular.
        kept: `[..., n]`.
        start: S_0, `[..., d, d_v]`.
    """
    return ((q @ k.mT) * mix) @ v + kept.unsqueeze(-1) * (q @ start)


def chunk_state(k: Tensor, v: Tensor, mix: Tensor, kept: Tensor, start: Tensor) -> Tensor:
    """S_n of `chunk_read`, after the last token: `[..., d, d_v]`."""
    return kept[..., -1:, None] * start + (mix[..., -1, :, None] * k).mT @ v


def running_sum(gate: Tensor, x: Tensor, start: Tensor | None, chunk: int) -> Tensor:
    """Every `S_t = g_t S_{t−1} + x_t`.

    Args:
        gate: g, `[..., T]`.
        x: `[..., T, d]`.
        start: S_0, `[..., d]`; None: zero.
        chunk: tokens that are summed by one matrix product.

    Returns:
        S, `[..., T, d]`.
    """
    last = torch.zeros_like(x[..., :1, :]) if start is None else start.to(x.dtype).unsqueeze(-2)
    sums = []
    for gates, new in zip(gate.split(chunk, -1), x.split(chunk, -2), strict=True):
        between, kept = decays(gates)
        sums.append(kept.unsqueeze(-1) * last + between @ new)
        last = sums[-1][..., -1:, :]
    return torch.cat(sums, -2)
