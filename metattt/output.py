"""Output norm and output gate, applied between the predictions of the heads and the output projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.modules import RMSNorm, projection

EPS = 1e-5  # of the norms other than LayerNorm over D, where `norm_eps` says nothing
LAYER_NORM_EPS = 1e-6  # of the published TTT models

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each head's predictions, with one learned scale `[d]` for all heads: `[..., H d]` to the same."""

    def forward(self, y: Tensor) -> Tensor:
        heads = y.to(self.weight.dtype).unflatten(-1, (-1, self.weight.shape[0]))
        return super().forward(heads).flatten(-2).to(y.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of each head's predictions, with a scale and an offset for each feature (a group norm with H groups).

    Args:
        dim: H d.
        head_dim: d.
        eps: added to the variance.
    """

    def __init__(self, dim: int, head_dim: int, eps: float):
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, y: Tensor) -> Tensor:
        """`[..., H d]` to the same."""
        heads = y.to(self.weight.dtype).unflatten(-1, (-1, self.head_dim))
        return (F.layer_norm(heads, (self.head_dim,), eps=self.eps).flatten(-2) * self.weight + self.bias).to(y.dtype)


def make_norm(kind: bool | str, dim: int, head_dim: int, eps: float | None, eps_scale: str) -> nn.Module | None:
    """The norm of the predictions `[B, T, D]` of all heads, of a width of `head_dim` each."""
    if eps is None:
        eps = LAYER_NORM_EPS if kind is True else EPS
    if eps_scale == "head_dim":
        eps = eps * head_dim
    if kind == "head_rms":
        return HeadRMSNorm(head_dim, eps=eps)
    if kind == "head_layer":
        return HeadLayerNorm(dim, head_dim, eps)
    if kind == "rms":
        return RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps) if kind else None


def make_gate(kind: bool | str, rank: int | str | None, dim: int, width: int, head_dim: int) -> nn.Module | None:
    """The projection of the token that a gate is a function of: `[B, T, dim]` to `[B, T, width]`.

    Raises:
        MetaTTTError: a rank without a gate.
    """
    if not kind and rank is not None:
        wrong = f"layer.gate_rank={rank} is of a gate, and layer.gate=false"
        raise MetaTTTError(f"{wrong}: set layer.gate, or leave it out")
    if not kind:
        return None
    if rank is None:
        return projection(dim, width, False)
    inner = head_dim if rank == "head_dim" else int(rank)
    return nn.Sequential(projection(dim, inner, False), projection(inner, width, True))


NORMS = {
    HeadRMSNorm: ("RMSNorm_h", "of each head, one learned scale of d numbers for all heads"),
    HeadLayerNorm: ("LN_h", "of each head, learned scales and offsets of D numbers"),
    RMSNorm: ("RMSNorm", "over D"),
    nn.LayerNorm: ("LN", "over D"),
}
"""Norms of the predictions: symbol, and what it is of."""


def norm_in_words(norm: nn.Module) -> str:
    """What the symbol of a norm of the predictions stands for."""
    symbol, words = NORMS.get(type(norm), (type(norm).__name__, "of the user's own"))
    return f"{symbol}: {words}" + (f", ε = {norm.eps:g}" if hasattr(norm, "eps") else "")


def in_symbols(layer_norm: nn.Module | None, gate: nn.Module | None, function: str, y: str) -> str:
    """The norm and the gate of `y`, as equations have them."""
    if layer_norm is not None:
        y = f"{NORMS.get(type(layer_norm), (type(layer_norm).__name__,))[0]}({y})"
    if gate is None:
        return y
    shown = {"gelu": "gelu_tanh", "silu": "silu", "sigmoid": "σ"}[function]
    return f"{y} ∘ {shown}({'U V x_t + c_G' if isinstance(gate, nn.Sequential) else 'θG x_t'})"
