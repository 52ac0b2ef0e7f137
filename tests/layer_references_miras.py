"""MIRAS's layers and TTT3R's step as plain loops over tokens, from their published equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layer_references import (
    Parameters,
    gate,
    gradient,
    outer,
    output,
    residual_norm,
    spread,
    times,
    unit,
    views,
    weights_of,
)
from torch import Tensor

ROWS = ["moneta", "yaad", "memora", "ttt3r"]
SMALL = {row: ["optimizer.mini_batch_size=4"] for row in ROWS}
EPS = 1e-6  # of √(x² + ε) for |x|


def memory(p: Parameters, w: Parameters, x: Tensor) -> Tensor:
    """`M(x) = x + LN(gelu(x W1) W2)`."""
    return residual_norm(p, x, times(F.gelu(times(x, w["w1"])), w["w2"]))


def lq(a: Tensor) -> Tensor:
    """`A / ‖A‖_4²`."""
    return a / (a.square() + EPS).square().sum((-2, -1), keepdim=True).sqrt()


def simplex(a: Tensor) -> Tensor:
    """All n weights of a matrix are positive and sum to √n/2."""
    e = (a - a.amax((-2, -1), keepdim=True)).exp()
    return e / e.sum((-2, -1), keepdim=True) * (a.shape[-2] * a.shape[-1]) ** 0.5 / 2


def mirrored(p: Parameters, x: Tensor, num_heads: int, b: int, base_lr: float, to_weights, loss, restart) -> Tensor:
    """`A_t = α_t A_{t−1} − η_t ∇ℓ(W)`, W from A after every b tokens; token t reads after ⌊(t+1)/b⌋ of them."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
    lr, keep = base_lr * torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1], torch.sigmoid(gate(p, "decay_gate.", x))
    a = weights_of(p, x.shape[0])
    w = {name: to_weights(z) for name, z in a.items()}
    rows = []
    for t in range(x.shape[1]):
        found = gradient(loss(memory(p, w, k[:, :, t]) - v[:, :, t]).sum(), w)
        a = {name: spread(keep[:, :, t], z) * z - spread(lr[:, :, t], z) * found[name] for name, z in a.items()}
        if (t + 1) % b == 0:
            w = {name: to_weights(z) for name, z in a.items()}
            a = {name: restart(a[name], w[name]) for name in a}
        rows.append(memory(p, w, q[:, :, t]))
    return output(p, x, rows)


def moneta(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """Eq. 24 and 25 with p = 3, q = 4."""
    cubed = lambda e: (e.square() + EPS).sqrt() ** 3  # noqa: E731
    return mirrored(p, x, num_heads, b, 0.003, lq, lambda e: cubed(e).sum(-1), lambda a, w: a)


def memora(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """Eq. 27: `W_t = softmax(α_t log W_{t−1} − η_t ∇ℓ₂)`."""
    return mirrored(p, x, num_heads, b, 0.03, simplex, lambda e: 0.5 * e.square().sum(-1), lambda a, w: w.log())


def yaad(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """Eq. 26, with gradients at the weights that the last chunk left (Sec. 5.4)."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
    lr, keep = 0.001 * torch.sigmoid(gate(p, "lr_", x)) / q.shape[-1], torch.sigmoid(gate(p, "decay_gate.", x))
    delta = F.softplus(torch.einsum("btd,hd->bht", x, p["task.delta_weight"]) + p["task.delta_bias"].view(1, -1, 1))
    start = now = weights_of(p, x.shape[0])
    rows = []
    for t in range(x.shape[1]):
        if t % b == 0:
            start = now
        error = memory(p, start, k[:, :, t]) - v[:, :, t]
        quadratic = gradient(0.5 * error.square().sum(), start)
        linear = gradient((torch.log(torch.cosh(10 * error)) / 10).sum(), start)  # whose sign is tanh(10 e)
        near = error.norm(dim=-1) <= delta[:, :, t]
        found = {
            name: torch.where(spread(near, g), g, spread(delta[:, :, t], g) * linear[name])
            for name, g in quadratic.items()
        }
        now = {name: spread(keep[:, :, t], z) * z - spread(lr[:, :, t], z) * found[name] for name, z in now.items()}
        rows.append(memory(p, now, q[:, :, t]))
    return output(p, x, rows)


def ttt3r(p: Parameters, x: Tensor, num_heads: int, b: int) -> Tensor:
    """`S_j = S_{j−1} + Σ β_t k_tᵀ (v_t − k_t S_{j−1})/16`, `β_t = σ(⟨k_t S_{j−1}, v_t⟩/√d)`; frame j reads `S_{j−1}`."""
    q, k, v = views(p, x, num_heads)
    q, k = unit(q), unit(k)
    state = now = weights_of(p, x.shape[0])["w1"]
    rows = []
    for t in range(x.shape[1]):
        if t % b == 0:
            state = now
        said = times(k[:, :, t], state)
        beta = torch.sigmoid((said * v[:, :, t]).sum(-1) / q.shape[-1] ** 0.5)
        now = now + spread(beta / 16, now) * outer(k[:, :, t], v[:, :, t] - said)
        rows.append(times(q[:, :, t], state))
    return output(p, x, rows)
