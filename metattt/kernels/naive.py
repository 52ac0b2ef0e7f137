"""The oracle of `ttt_linear` and `ttt_mlp`: their equations in plain torch, one mini-batch after the other, any type,
autograd through everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  #: added to the variance by every layer normalization of the inner model
Weights = Sequence[Any]  # a matrix and its bias for every layer: tensors; the biases may be None


def naive(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, norm_scale: Tensor, norm_bias: Tensor, *, tau: Tensor | None = None,
    mini_batch_size: int = 16, initial_state: Weights | None = None, cu_seqlens: Tensor | None = None,
    **weights: Tensor | None,
) -> tuple[Tensor, list[Any]]:  # fmt: skip
    """As `ttt_linear` and `ttt_mlp` of their `op.py`, which document the arguments; every tensor of one type, in which
    all is computed.

    Returns:
        o; and the weights after the last whole mini-batch, followed by −Σ_s η_s ∇ℓ_s of the tokens since, `[N, H, ...]`
        each, None for a bias that is not there.
    """
    packed = cu_seqlens is not None
    bounds = cu_seqlens.tolist() if cu_seqlens is not None else [0, q.shape[1]]
    count = len(bounds) - 1 if packed else q.shape[0]
    start: Weights = initial_state or [None if w is None else w.expand(count, *w.shape) for w in weights.values()]
    tau = q.new_ones(1, mini_batch_size) if tau is None else tau
    norm, found = (norm_scale.unsqueeze(1), norm_bias.unsqueeze(1)), []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        tokens = [x[:, begin:end].transpose(1, 2) for x in (q, k, v, eta)]
        own = [None if w is None else w[n, None] if packed else w for w in start]
        found.append(_sequence(tokens, own, *norm, tau, mini_batch_size))
    states = zip(*(state for _, state in found), strict=True)
    o = torch.cat([y for y, _ in found], 2).transpose(1, 2)
    return o, [None if parts[0] is None else torch.cat(parts) for parts in states]


def _sequence(
    tokens: Sequence[Tensor], weights: Weights, scale: Tensor, shift: Tensor, tau: Tensor, size: int
) -> tuple[Tensor, list[Any]]:
    """q, k, v `[N, H, T, d]` and η `[N, H, T]`, weights `[N, H, ...]`, scale and shift `[H, 1, d]`, τ `[1 or H, b]`."""
    zeros = [None if w is None else torch.zeros_like(w) for w in weights]
    outputs, updates = [tokens[0][:, :, :0]], zeros
    for first in range(0, tokens[0].shape[2], size):
        q, k, v, eta = (x[:, :, first : first + size] for x in tokens)
        count = q.shape[2]
        y, updates = _mini_batch(q, k, v, eta, weights, scale, shift, tau[:, :count])
        outputs.append(y)
        if count == size:
            last = [None if x is None else tau[:, -1].view(-1, *(1,) * (x.ndim - 2)) * x for x in updates]
            weights = [None if w is None else w + x for w, x in zip(weights, last, strict=True)]
            updates = zeros
    return torch.cat(outputs, 2), [*weights, *updates]


def _mini_batch(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Weights, scale: Tensor, shift: Tensor, tau: Tensor
) -> tuple[Tensor, list[Any]]:
    """Predictions, and −Σ_s η_s ∇ℓ_s of ℓ = ½‖k + γ norm(z) + β − v‖² at the weights."""
    layers, inputs, made = list(zip(weights[::2], weights[1::2], strict=True)), [k], list[Tensor]()
    for w, b in layers:
        made.append(inputs[-1] @ w if b is None else inputs[-1] @ w + b.unsqueeze(2))
        inputs.append(F.gelu(made[-1], approximate="tanh"))
    x, rstd = _normalize(made[-1])
    g = scale * (k + scale * x + shift - v)
    gradients = [rstd * (g - g.mean(-1, keepdim=True) - x * (g * x).mean(-1, keepdim=True))]  # by the z of every layer
    for (w, _), z in zip(reversed(layers[1:]), reversed(made[:-1]), strict=True):
        gradients.insert(0, (gradients[0] @ w.mT) * _gelu_slope(z))
    mix, asked, z, updates = (tau.unsqueeze(-1) * eta.unsqueeze(-2)).tril(), q, q, list[Any]()
    for (w, b), a, g in zip(layers, inputs, gradients, strict=False):
        z = asked @ w - (mix * (asked @ a.mT + (b is not None))) @ g
        z = z if b is None else z + b.unsqueeze(2)
        asked, moved = F.gelu(z, approximate="tanh"), eta.unsqueeze(-1) * g
        updates += -(a.mT @ moved), None if b is None else -moved.sum(-2)
    return q + scale * _normalize(z)[0] + shift, updates


def _normalize(z: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of z `[..., d]` with mean 0 and (biased) variance 1, and the reciprocal of their standard deviation
    `[..., 1]`."""
    centred = z - z.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return centred * rstd, rstd


def _gelu_slope(z: Tensor) -> Tensor:
    """Derivative of the tanh-GELU."""
    inner = (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
    slope = (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * z**2)
    tanh = inner.tanh()
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * slope
