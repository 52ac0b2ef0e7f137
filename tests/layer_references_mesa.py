"""Plain loops of the Mesa layer and of log-linear attention, from their published equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layer_references import Parameters, gate, outer, output, softplus_decay, spread, times, unit, views
from torch import Tensor

ROWS = ["mesa_net", "log_linear_mamba2", "log_linear_gated_delta_net"]
LEVELS = 3  # fewer than the buckets of five tokens: the last holds more than one
SMALL = {
    "mesa_net": ["learner.chunk=3"],
    "log_linear_mamba2": ["learner.chunk=3", f"optimizer.levels={LEVELS}"],
    "log_linear_gated_delta_net": ["learner.chunk=3", f"optimizer.levels={LEVELS}"],
}
NOT_APPLICABLE = {(row, "forms") for row in ROWS}  # they have one


def mesa_net(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`G_t = γ_t G_{t−1} + β_t v_t k_tᵀ`, `H_t = γ_t H_{t−1} + β_t k_t k_tᵀ`, `o_t = G_t (H_t + Λ)⁻¹ q_t`,
    `Λ = softplus(θ) + 1/4`."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    beta, gamma = (torch.sigmoid(gate(p, name, x)) for name in ("write_gate.", "decay_gate."))
    ridge = torch.diag_embed(F.softplus(p["learner.slow.ridge"]) + 0.25)
    g = h = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    rows = []
    for t in range(x.shape[1]):
        keep, write = spread(gamma[:, :, t], g), spread(beta[:, :, t], g)
        g = keep * g + write * outer(v[:, :, t], k[:, :, t])
        h = keep * h + write * outer(k[:, :, t], k[:, :, t])
        solved = torch.linalg.solve(h + ridge, q[:, :, t])
        rows.append(torch.einsum("bhij,bhj->bhi", g, solved))
    return output(p, x, rows)


# -- log-linear attention ----------------------------------------------------------------------------------------------


def buckets(t: int) -> list[range]:
    """The tokens up to t by level: t itself, then for every bit of t a bucket, from the last tokens to the first."""
    found, end, size = [range(t, t + 1)], t, 1
    while end:
        length = end & size
        found.append(range(end - length, end))
        end, size = end - length, 2 * size
    return found


def read_weights(p: Parameters, x: Tensor) -> Tensor:
    """`λ = softplus(l ∘ θ x)`, `[B, H, T, n]`."""
    logit = torch.einsum("btd,hnd->bhtn", x, p["optimizer.level_weight"])
    return F.softplus(p["optimizer.level_scale"].unsqueeze(1) * logit)


def log_linear(
    q: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor, weights: Tensor, delta: bool
) -> list[Tensor]:
    """Every token's memory is followed by itself: `M_s = write_s k_sᵀ v_s`, moved by all later tokens; the weight with
    which token t reads it is that of its bucket, and of the last one for buckets beyond."""
    identity = torch.eye(q.shape[-1], dtype=q.dtype)
    memories: list[Tensor] = []
    rows = []
    for t in range(q.shape[2]):
        move = spread(keep[:, :, t], k[:, :, t, :, None]) * identity
        if delta:
            move = move @ (identity - spread(write[:, :, t], move) * outer(k[:, :, t], k[:, :, t]))
        memories = [move @ memory for memory in memories]
        memories.append(spread(write[:, :, t], move) * outer(k[:, :, t], v[:, :, t]))
        y = torch.zeros_like(q[:, :, t])
        for number, bucket in enumerate(buckets(t)):
            weight = weights[:, :, t, min(number, weights.shape[-1] - 1)]
            for s in bucket:
                y = y + weight.unsqueeze(-1) * times(q[:, :, t], memories[s])
        rows.append(y)
    return rows


def log_linear_mamba2(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    step, keep = F.softplus(gate(p, "decay_gate.", x)), softplus_decay(p, "decay_gate.", x)
    return output(p, x, log_linear(*views(p, x, num_heads), step, keep, read_weights(p, x), delta=False))


def log_linear_gated_delta_net(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = α_t (I − β_t k_tᵀ k_t) S_{t−1} + β_t k_tᵀ v_t`."""
    q, k, v = views(p, x, num_heads)
    keep = softplus_decay(p, "decay_gate.", x)
    write = torch.sigmoid(gate(p, "write_gate.", x))
    return output(p, x, log_linear(unit(F.silu(q)), unit(F.silu(k)), v, write, keep, read_weights(p, x), delta=True))
