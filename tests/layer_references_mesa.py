"""Plain loops of the Mesa layer and of log-linear attention, from their published equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layer_references import Parameters, gate, output, outer, spread, times, views
from torch import Tensor

ROWS = ["mesa_net"]
SMALL = {"mesa_net": ["learner.chunk=3"]}
NOT_APPLICABLE = {(row, "forms") for row in ROWS}  # they have one


def unit(z: Tensor) -> Tensor:
    return F.silu(z) / F.silu(z).norm(dim=-1, keepdim=True)


def mesa_net(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`G_t = γ_t G_{t−1} + β_t v_t k_tᵀ`, `H_t = γ_t H_{t−1} + β_t k_t k_tᵀ`, `o_t = G_t (H_t + Λ)⁻¹ q_t`,
    `Λ = softplus(θ) + 1/4`."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
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
