"""The inner loop in the style of the published PyTorch models: a baseline to time against.

The dual form of each mini-batch is written out in closed form, inputs are sliced in a Python loop, outputs are written
into one tensor, and autograd goes through all of it (the equations of arXiv 2407.04620, Sec. 2.5, with the published
models' token steps folded into η).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def published_style(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor, weights: Mapping[str, Tensor], scale: Tensor,
    shift: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """TTT-Linear or TTT-MLP, as `weights` are named.

    Args:
        q, k, v: `[B, H, T, d]`, T a multiple of b.
        eta: `[B, H, T]`, step sizes.
        tau: `[1, b]`, token steps.
        weights: `w1` `[B, H, d, f]`, `b1` `[B, H, f]`, and for the MLP `w2`, `b2`.
        scale, shift: `[H, d]`, the norm's affine.

    Returns:
        Predictions `[B, H, T, d]` and the weights at the end.
    """
    size = tau.shape[-1]
    blocks = {name: x.unflatten(2, (-1, size)).permute(2, 0, 1, 3, 4) for name, x in (("q", q), ("k", k), ("v", v))}
    steps = tau[:, None, None, :, None] * eta.unflatten(2, (-1, size)).unsqueeze(-2)
    steps = steps.permute(2, 0, 1, 3, 4)  # [n, B, H, b, b]
    state = {name: x if x.ndim == 4 else x.unsqueeze(2) for name, x in weights.items()}
    affine = scale[None, :, None], shift[None, :, None]
    step = _mlp if "w2" in weights else _linear
    out = torch.empty_like(blocks["q"])
    for i in range(steps.shape[0]):
        out[i], state = step(blocks["q"][i], blocks["k"][i], blocks["v"][i], steps[i], state, *affine)
    after = {name: x if x.shape[2] > 1 else x.squeeze(2) for name, x in state.items()}
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3), after


def _linear(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, state: dict[str, Tensor], scale: Tensor, shift: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    w, b, lower, last = state["w1"], state["b1"], eta.tril(), eta[:, :, -1, :, None]
    g = inner_gradient(k @ w + b, v - k, scale, shift)
    attention = (q @ k.mT).tril()
    z = q @ w - (eta * attention) @ g + b - lower @ g
    after = {"w1": w - (last * k).mT @ g, "b1": b - (last * g).sum(2, keepdim=True)}
    return q + norm(z, scale, shift), after


def _mlp(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, state: dict[str, Tensor], scale: Tensor, shift: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    w1, b1, w2, b2 = (state[name] for name in ("w1", "b1", "w2", "b2"))
    lower, last = eta.tril(), eta[:, :, -1, :, None]
    z1 = k @ w1 + b1
    x2 = F.gelu(z1, approximate="tanh")
    g2 = inner_gradient(x2 @ w2 + b2, v - k, scale, shift)
    g1 = g2 @ w2.mT * gelu_slope(z1)
    read1 = q @ w1 - (eta * (q @ k.mT).tril()) @ g1 + b1 - lower @ g1
    read2 = F.gelu(read1, approximate="tanh")
    z = read2 @ w2 - (eta * (read2 @ x2.mT).tril()) @ g2 + b2 - lower @ g2
    after = {
        "w1": w1 - (last * k).mT @ g1,
        "b1": b1 - (last * g1).sum(2, keepdim=True),
        "w2": w2 - (last * x2).mT @ g2,
        "b2": b2 - (last * g2).sum(2, keepdim=True),
    }
    return q + norm(z, scale, shift), after


def norm(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return scale * (centred / (z.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()) + shift


def inner_gradient(z: Tensor, target: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    width = z.shape[-1]
    deviation = (z.var(-1, unbiased=False, keepdim=True) + EPS).sqrt()
    hat = (z - z.mean(-1, keepdim=True)) / deviation
    error = (scale * hat + shift - target) * scale
    total, along = error.sum(-1, keepdim=True), (error * hat).sum(-1, keepdim=True)
    return (width * error - total - hat * along) / (width * deviation)


def gelu_slope(x: Tensor) -> Tensor:
    tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh)
