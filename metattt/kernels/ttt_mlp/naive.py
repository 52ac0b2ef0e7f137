"""TTT-MLP as the equations say it, mini-batch after mini-batch, in plain torch: the oracle of the kernels, gradients
included."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


class FinalState(NamedTuple):
    """The state after a sequence, fp32, for each of N sequences and H heads; the entries of biases are None without
    bias.

    `w1 [N, H, d, f]`, `b1 [N, H, f]`, `w2 [N, H, f, d]`, `b2 [N, H, d]`: weights committed after the last whole
    mini-batch. `update_*`, of the same shapes: −Σ_s η_s ∇ℓ_s over the tokens of the mini-batch that is still open;
    zeros if there are none.
    """

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    update_w1: Tensor
    update_b1: Tensor | None
    update_w2: Tensor
    update_b2: Tensor | None


Weights = tuple[Any, ...]  # (w1, b1, w2, b2): tensors; both biases may be None


def naive_ttt_mlp(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    norm_scale: Tensor, norm_bias: Tensor, *, tau: Tensor | None = None, mini_batch_size: int = 16,
    initial_state: Weights | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, FinalState | None]:  # fmt: skip
    """The operation of `ttt_mlp`, same arguments, in the type of its arguments."""
    batch, length, heads, _ = q.shape
    if cu_seqlens is None:
        spans = [(n, 0, length) for n in range(batch)]
    else:
        spans = [(0, start, end) for start, end in pairwise(cu_seqlens.tolist())]
    if tau is None:
        tau = torch.ones(1, mini_batch_size, dtype=q.dtype, device=q.device)
    tau = tau.expand(heads, mini_batch_size)
    rows, states = [], []
    for n, (at, start, end) in enumerate(spans):
        weights = (
            (w1, b1, w2, b2) if initial_state is None else tuple(None if w is None else w[n] for w in initial_state)
        )
        zeros = tuple(None if w is None else torch.zeros_like(w) for w in weights)
        updates = zeros
        outputs = [q[at, :0]]
        for first in range(start, end, mini_batch_size):
            last = min(first + mini_batch_size, end)
            tokens = [x[at, first:last].transpose(0, 1) for x in (q, k, v)]  # [H, tokens, d]
            out, updates, steps = _mini_batch(
                tokens, eta[at, first:last].T, tau[:, : last - first], weights, norm_scale, norm_bias
            )
            outputs.append(out.transpose(0, 1))
            if last - first == mini_batch_size:
                weights = tuple(None if w is None else w + step for w, step in zip(weights, steps, strict=True))
                updates = zeros
        rows.append(torch.cat(outputs))
        states.append((*weights, *updates))
    o = torch.stack(rows) if cu_seqlens is None else torch.cat(rows).unsqueeze(0)
    if not output_final_state:
        return o, None
    stacked: list[Any] = [None if parts[0] is None else torch.stack(parts) for parts in zip(*states, strict=True)]
    return o, FinalState(*stacked)


def _mini_batch(
    tokens: list[Tensor], eta: Tensor, tau: Tensor, weights: Weights, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Weights, Weights]:
    """Predictions `[H, tokens, d]` of one mini-batch, −Σ_s η_s ∇ℓ_s, and the same with the last token's step."""
    q, k, v = tokens
    w1, b1, w2, b2 = weights
    biased = b1 is not None
    scale, bias = scale.unsqueeze(1), bias.unsqueeze(1)

    def read(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return x @ w + b.unsqueeze(1) if b is not None else x @ w

    # Gradients of ½‖k + LN(z₂) − v‖² at the committed weights.
    z1 = read(k, w1, b1)
    x2 = F.gelu(z1, approximate="tanh")
    z2 = read(x2, w2, b2)
    std = (z2.var(-1, correction=0, keepdim=True) + EPS).sqrt()
    hat = (z2 - z2.mean(-1, keepdim=True)) / std
    pull = scale * (k + scale * hat + bias - v)
    g2 = (pull - pull.mean(-1, keepdim=True) - hat * (pull * hat).mean(-1, keepdim=True)) / std
    g1 = (g2 @ w2.mT) * _gelu_slope(z1)

    # Every token reads with the steps of the tokens up to itself.
    mix = (tau.unsqueeze(-1) * eta.unsqueeze(-2)).tril()
    zbar1 = read(q, w1, b1) - (mix * (q @ k.mT + biased)) @ g1
    xbar2 = F.gelu(zbar1, approximate="tanh")
    zbar2 = read(xbar2, w2, b2) - (mix * (xbar2 @ x2.mT + biased)) @ g2
    out = q + scale * F.layer_norm(zbar2, zbar2.shape[-1:], eps=EPS) + bias

    def steps(weight: Tensor) -> Weights:
        step1, step2 = weight.unsqueeze(-1) * g1, weight.unsqueeze(-1) * g2
        return -(k.mT @ step1), -step1.sum(1) if biased else None, -(x2.mT @ step2), -step2.sum(1) if biased else None

    return out, steps(eta), steps(eta * tau[:, -1:])


def _gelu_slope(z: Tensor) -> Tensor:
    """Derivative of the tanh-GELU."""
    inner = (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * z**2)
    tanh = inner.tanh()
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope
