"""Generalised delta rules and their relatives as plain loops over tokens, from their published equations (see
`layer_references`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from layer_references import (
    MUON,
    Parameters,
    gate,
    gradient,
    heads_of,
    mlp_predict,
    outer,
    output,
    polar_factor,
    residual_norm,
    rule,
    spread,
    times,
    unit,
    views,
    weights_of,
)
from layer_references import softplus_decay as decay_of_heads
from torch import Tensor

ROWS = [
    "gla",
    "hgrn2",
    "kda",
    "gated_delta_net2",
    "comba",
    "rwkv7",
    "delta_gradient",
    "preconditioned_delta_net",
    "delta_product",
    "gated_delta_product",
    "omega_net",
    "atlas",
]
SMALL = {"atlas": ["optimizer.mini_batch_size=4", "task.window=3"], "gla": ["optimizer.rank=3"]}


def low_rank(p: Parameters, x: Tensor, num_heads: int, between: object = None) -> Tensor:
    """`z = f(x) + c` for every channel, `[B, H, T, d]`."""
    hidden = x @ p["optimizer.down"].T if "optimizer.down" in p else x
    hidden = torch.tanh(hidden) if between == "tanh" else hidden
    return heads_of(hidden @ p["optimizer.up"].T + p["optimizer.bias"], num_heads)


def softplus_decay(p: Parameters, x: Tensor, num_heads: int) -> Tensor:
    """`exp(−exp(A_h) softplus(z))`."""
    rate = p["optimizer.log_rate"].exp().view(1, -1, 1, 1)
    return torch.exp(-rate * F.softplus(low_rank(p, x, num_heads)))


def gla(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = Diag(a_t) S_{t−1} + k_tᵀ v_t`, `a = σ(z)^(1/16)`, z of a projection of low rank (arXiv 2312.06635)."""
    q, k, v = views(p, x, num_heads)
    decay = torch.sigmoid(low_rank(p, x, num_heads)) ** (1 / 16)
    none = torch.zeros_like(k)
    return output(p, x, rule(q, k, v, none, none, decay, torch.ones_like(k[..., 0])))


def hgrn2(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = Diag(f_t) S_{t−1} + (1 − f_t)ᵀ i_t`, `f = σ(z)`, read by swish(q) (arXiv 2404.07904)."""
    q, v = (heads_of(x @ p[f"task.{name}.weight"].T, num_heads) for name in ("q", "v"))
    forget = torch.sigmoid(low_rank(p, x, num_heads))
    none = torch.zeros_like(forget)
    return output(p, x, rule(F.silu(q), 1 - forget, v, none, none, forget, torch.ones_like(q[..., 0])))


def kda(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ` (arXiv 2510.26692, Eq. 1)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    return output(p, x, rule(q, k, v, k, k, softplus_decay(p, x, num_heads), torch.sigmoid(gate(p, "lr_", x))))


def gated_delta_net2(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = (I − k_t (b_t ∘ k_t)ᵀ) Diag(a_t) S_{t−1} + k_t (w_t ∘ v_t)ᵀ` (arXiv 2605.22791)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    erase, write = (
        torch.sigmoid(heads_of(x @ p[f"task.{name}_gate.weight"].T, num_heads)) for name in ("erase", "write")
    )
    one = torch.ones_like(k[..., 0])
    return output(p, x, rule(q, k, write * v, erase * k, k, softplus_decay(p, x, num_heads), one))


def comba(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = S_{t−1}(α_t − β_t k_t (b k_t)ᵀ) + β_t v_t k_tᵀ`, read by `q_t − d b k_t` (arXiv 2506.02475)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    erased = torch.sigmoid(p["task.erase_logit"]).view(1, -1, 1, 1) * k
    q = q - p["task.correction_factor"].view(1, -1, 1, 1) * erased
    decay = decay_of_heads(p, "decay_gate.", x).unsqueeze(-1).expand_as(k)
    return output(p, x, rule(q, k, v, erased, k, decay, torch.sigmoid(gate(p, "lr_", x)), False))


def rwkv7(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_t = S_{t−1}(diag(w_t) − κ̂ᵀ(a ∘ κ̂)) + vᵀ k̃`, `w = exp(−e^(−1/2) σ(z))` (arXiv 2503.14456, Eq. 4–17)."""
    flat = x @ p["task.k.weight"].T
    q, v = (heads_of(x @ p[f"task.{name}.weight"].T, num_heads) for name in ("q", "v"))
    rate = torch.sigmoid(x @ p["task.rate_down"].T @ p["task.rate_up"].T + p["task.rate_bias"])
    removal = unit(heads_of(flat * p["task.removal_scale"], num_heads))
    replacement = heads_of(flat * (1 + (rate - 1) * p["task.replacement_rate"]), num_heads)
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(low_rank(p, x, num_heads, "tanh")))
    one, erased = torch.ones_like(q[..., 0]), heads_of(rate, num_heads) * removal
    return output(p, x, rule(q, replacement, v, removal, erased, decay, one, False))


def delta_gradient(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`W_t = W_{t−1}(I − η' k kᵀ) − η' ∇_y ℓ ⊗ k`, `η' = η/(1 + η)` (arXiv 2512.24695)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    eta = torch.sigmoid(gate(p, "lr_", x))
    eta = eta / (1 + eta)
    return output(p, x, rule(q, k, v, k, 2 * k, torch.ones_like(k), eta))


def preconditioned_delta_net(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """The gated delta rule that writes `M ∘ k`, `A_t = γ_t A_{t−1} + β_t k_t²`, `M = 1.5^(−r/(1 + |r|))`,
    `r = log(A + ε) − c` (arXiv 2604.21100)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(F.silu(q)), unit(F.silu(k))
    forget, step = decay_of_heads(p, "curvature_decay.", x), torch.sigmoid(gate(p, "curvature_step.", x))
    curvature, factors = torch.zeros_like(k[:, :, 0]), []
    for t in range(x.shape[1]):
        curvature = spread(forget[:, :, t], curvature) * curvature + spread(step[:, :, t], curvature) * k[:, :, t] ** 2
        distance = torch.log(curvature + 1e-6) - p["optimizer.centre"].view(1, -1, 1)
        factors.append(1.5 ** (-distance / (1 + distance.abs())))
    written = k * torch.stack(factors, 2)
    keep = decay_of_heads(p, "decay_gate.", x).unsqueeze(-1).expand_as(k)
    return output(p, x, rule(q, written, v, k, written, keep, torch.sigmoid(gate(p, "lr_", x))))


def products(p: Parameters, x: Tensor, num_heads: int, keep: Tensor | None, count: int = 2) -> Tensor:
    """`H_j = H_{j−1} − β_j k_j (k_jᵀ H_{j−1} − v_jᵀ)` for j = 1 … n, β = 2σ; the decay comes before the first."""
    q = unit(F.silu(heads_of(x @ p["task.q.weight"].T, num_heads)))
    keys, values = ((x @ p[f"task.{name}.weight"].T).chunk(count, -1) for name in ("k", "v"))
    betas = (2 * torch.sigmoid(x @ p["task.strength.weight"].T)).chunk(count, -1)
    keys = [unit(F.silu(heads_of(k, num_heads))) for k in keys]
    values, betas = [heads_of(v, num_heads) for v in values], [beta.transpose(1, 2) for beta in betas]
    state, rows = torch.zeros_like(outer(keys[0][:, :, 0], values[0][:, :, 0])), []
    for t in range(x.shape[1]):
        if keep is not None:
            state = spread(keep[:, :, t], state) * state
        for k, v, beta in zip(keys, values, betas, strict=True):
            error = times(k[:, :, t], state) - v[:, :, t]
            state = state - spread(beta[:, :, t], state) * outer(k[:, :, t], error)
        rows.append(times(q[:, :, t], state))
    return output(p, x, rows)


def delta_product(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return products(p, x, num_heads, None)


def gated_delta_product(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    return products(p, x, num_heads, decay_of_heads(p, "decay_gate.", x))


def polynomial(p: Parameters, z: Tensor) -> Tensor:
    """Features of degree 1 and 2 with `φ(a)·φ(b) = s_1 a·b + s_2 (a·b)²`: all d² products stand for the d (d + 1)/2
    different ones."""
    first, second = p["task.coefficient_roots"]
    return torch.cat([first * z, second * outer(z, z).flatten(-2)], -1)


def omega_net(p: Parameters, x: Tensor, num_heads: int, b: int, window: int = 4) -> Tensor:
    """`M_t = α_t M_{t−1} − η_t Σ_{i=t−c+1..t} γ_i ∇½‖φ(k_i) M_{t−1} − v_i‖²`, `y_t = φ(q_t) M_t` (arXiv 2505.23735,
    Eq. 9–10)."""
    q, k, v = views(p, x, num_heads)
    q, k = polynomial(p, unit(q)), polynomial(p, unit(k))
    gamma = torch.sigmoid(x @ p["task.gate_weight"].T + p["task.gate_bias"]).transpose(1, 2)
    eta, keep = 0.25 * torch.sigmoid(gate(p, "lr_", x)), torch.sigmoid(gate(p, "decay_gate.", x))
    state, rows = torch.zeros_like(outer(k[:, :, 0], v[:, :, 0])), []
    for t in range(x.shape[1]):
        total = torch.zeros_like(state)
        for i in range(max(0, t - window + 1), t + 1):
            error = times(k[:, :, i], state) - v[:, :, i]
            total = total + spread(gamma[:, :, i], state) * outer(k[:, :, i], error)
        state = spread(keep[:, :, t], state) * state - spread(eta[:, :, t], state) * total
        rows.append(times(q[:, :, t], state))
    return output(p, x, rows)


def atlas(p: Parameters, x: Tensor, num_heads: int, b: int, window: int = 3) -> Tensor:
    """`S = θ S − η Σ γ_i ∇ℓ`, `M = α M + NS5(S)` (arXiv 2505.23735, Eq. 57–58), once per mini-batch, with gradients at
    its start; θ and α are sigmoids of its mean. Token t reads after ⌊(t+1)/b⌋ mini-batches."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
    gamma = torch.sigmoid(x @ p["task.gate_weight"].T + p["task.gate_bias"]).transpose(1, 2)
    lr = torch.sigmoid(gate(p, "lr_", x))
    momentum, keep = gate(p, "momentum_gate.", x), gate(p, "decay_gate.", x)
    now = weights_of(p, x.shape[0])
    memory = {name: torch.zeros_like(w) for name, w in now.items()}
    total, rows = dict(memory), []
    for t in range(x.shape[1]):
        for i in range(max(0, t - window + 1), t + 1):
            loss = 0.5 * (residual_norm(p, k[:, :, i], mlp_predict(now, k[:, :, i])) - v[:, :, i]).square().sum(-1)
            found = gradient((gamma[:, :, i] * lr[:, :, t] * loss).sum(), now)
            total = {name: total[name] + g for name, g in found.items()}
        if (t + 1) % b == 0:
            chunk = slice(t + 1 - b, t + 1)
            theta, alpha = (torch.sigmoid(z[:, :, chunk].mean(-1)) for z in (momentum, keep))
            memory = {name: spread(theta, s) * s - total[name] for name, s in memory.items()}
            steps = {name: polar_factor(s, MUON) if s.ndim == 4 else s for name, s in memory.items()}
            now = {name: spread(alpha, w) * w + steps[name] for name, w in now.items()}
            total = {name: torch.zeros_like(g) for name, g in total.items()}
        rows.append(residual_norm(p, q[:, :, t], mlp_predict(now, q[:, :, t])))
    return output(p, x, rows)
