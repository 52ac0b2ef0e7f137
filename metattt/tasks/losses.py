"""Losses of a reconstruction: the error of a prediction, one number per token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

IN_SYMBOLS: dict[str, tuple[str, str | None]] = {
    "squared": ("½‖{p} − v_t‖²", "{p} − v_t"),
    "mean_squared": ("‖{p} − v_t‖²/d", "({p} − v_t)·2/d"),
    "dot": ("−⟨v_t, {p}⟩", "−v_t"),
    "huber": ("Σ huber_{delta}({p} − v_t)", "clip({p} − v_t, ±{delta})"),
    "cosine": ("1 − cos({p}, v_t)", None),
    "lp": ("Σ |e|^{power:g}, e = {p} − v_t, |e| = √(e² + 1e-6)", None),
    "norm_huber": ("huber_{delta}(‖{p} − v_t‖)", None),
    "mixed_huber": ("½‖e‖² where ‖e‖ ≤ {delta}, else {delta} Σ log cosh(10 e)/10, e = {p} − v_t", None),
    "kl": ("KL(softmax(v_t) ‖ softmax({p}))", "softmax({p}) − softmax(v_t)"),
}
"""Each loss of a prediction p, and its derivative by p."""
WITH_THRESHOLD = ("huber", "norm_huber", "mixed_huber")  # those that have a δ

# MIRAS is cited by the equation numbers of a public reproduction of the paper.
SMOOTHING = 1e-6  # ε of |x| ≈ √(x² + ε), as in MIRAS (arXiv 2504.13173, Remark 5)
STEEPNESS = 10.0  # a of sign(x) ≈ tanh(a x), likewise


def loss_per_token(name: str, prediction: Tensor, v: Tensor, p: float, delta: float | Tensor) -> Tensor:
    """ℓ by its name in `IN_SYMBOLS`, but for `squared`: predictions and labels `[B, H, T, d]` to `[B, H, T]`.

    Args:
        p: exponent of `lp`, `Σ_j |e_j|^p` with |e| smoothed to √(e² + ε), so that its gradient is
            `p sign(e) |e|^(p−1)` with the sign smoothed to e/√(e² + ε), and all derivatives are finite.
        delta: threshold δ of the Huber losses, a number or one per token `[B, H, T]`. `huber` compares it with every
            |e_j|, `norm_huber` with ‖e‖ (½‖e‖², beyond it δ‖e‖ − ½δ²); `mixed_huber` is ½‖e‖² where ‖e‖ ≤ δ and δ‖e‖₁
            elsewhere, with |e| smoothed to log cosh(ae)/a, so that its gradient is Eq. 26 of MIRAS with tanh(ae) for
            the sign. (The loss jumps at δ.)

    `kl` is `Σ_j p_j log(p_j / q_j)`, p the softmax of the label and q that of the prediction. (In MIRAS KL is a
    retention; as a loss it was added by others: the cross-entropy with soft labels, up to a term that depends on the
    label only.)
    """
    if name == "dot":
        return -(prediction * v).sum(-1)
    if name == "cosine":
        lengths = [(x.square().sum(-1) + 1e-6).sqrt() for x in (prediction, v)]  # differentiable for a zero vector, too
        return 1 - (prediction * v).sum(-1) / (lengths[0] * lengths[1])
    if name == "kl":
        label = v.log_softmax(-1)
        return (label.exp() * (label - prediction.log_softmax(-1))).sum(-1)
    error = prediction - v
    if name == "mean_squared":
        return error.square().mean(-1)
    if name == "lp":
        return (error.square() + SMOOTHING).pow(0.5 * p).sum(-1)
    if name == "huber":
        size, delta = error.abs(), delta.unsqueeze(-1) if isinstance(delta, Tensor) else delta
        return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta)).sum(-1)
    squared = error.square().sum(-1)
    far = squared > delta**2
    if name == "mixed_huber":
        z = STEEPNESS * error
        sizes = (z + F.softplus(-2 * z, threshold=50) - math.log(2)) / STEEPNESS  # log cosh
        return torch.where(far, delta * sizes.sum(-1), 0.5 * squared)
    norm = torch.where(far, squared, 1).sqrt()  # for a small error it would have no derivative at 0
    return torch.where(far, delta * (norm - 0.5 * delta), 0.5 * squared)
