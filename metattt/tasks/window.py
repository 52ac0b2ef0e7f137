"""The Omega rule: a token learns the pairs of the last tokens again, in addition to its own."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.modules import document_tail
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction

TAKEN = ("window", "gate", "degree", "feature_map", "normalize_qk", "loss_name", "huber_delta", "short_conv")


@register(group="task", name="window")
class WindowViews(Reconstruction, takes=TAKEN):
    """`ℓ_t(W) = Σ_{i=t−c+1..t} γ_i ½‖f(φ(k_i); W) − v_i‖²`, the last c tokens of the document (the Omega rule of Atlas,
    arXiv 2505.23735, Eq. 9, as public reproductions of the paper give it), with queries φ(q). c − 1 tokens are carried
    from call to call.

    Args:
        window: c (tokens); 1 is the loss of the token alone.
        gate: γ: `none` (1), or `per_head`, σ(θ x + c) of the token that is learned again.
        degree: of the polynomial features φ: all monomials up to it, weighted such that
            `φ(a)·φ(b) = Σ_{i=1..degree} s_i (a·b)^i`, s_i learned from 1/i! on; 1 leaves k and q as they are.
    """

    together = True

    normalize_qk = True
    window: int = setting(default=4, most=2**16)
    gate: Literal["none", "per_head"] = setting(default="per_head", fixed=True)
    degree: int = setting(default=1, most=8, fixed=True)
    loss_name: Literal["squared", "mean_squared", "dot", "huber", "cosine", "kl"] = setting(
        default="squared", alias="loss"
    )

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        if self.gate == "per_head":
            self.gate_weight = nn.Parameter(torch.randn(num_heads, dim) * 0.02)
            self.gate_bias = nn.Parameter(torch.zeros(num_heads))
        if self.degree > 1:
            wide = sum(math.comb(head_dim + i - 1, i) for i in range(1, self.degree + 1))
            self.input_dim = wide
            roots = [math.factorial(i) ** -0.5 for i in range(1, self.degree + 1)]
            self.coefficient_roots = nn.Parameter(torch.tensor(roots))  # √s

    def equations(self) -> list[str]:
        weight = "ω_t = 1" if self.gate == "none" else "ω_t = σ(θ_ω x + c_ω) of that token, θ and c of each head"
        lines = [
            *super().equations(),
            f"the pairs of a token are those of the last {self.window} tokens, each with {weight}",
        ]
        if self.degree > 1:
            features = f"the monomials up to degree {self.degree}, φ(a)·φ(b) = Σ_i s_i (a·b)^i, s learned"
            lines.append(f"k_t ← φ(k_t), q_t ← φ(q_t): {features}")
        return lines

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        views, kept = super().views(x, state, ctx, projected)
        k, v, q = views.k, views.v, views.q
        gamma = torch.ones_like(k[..., :1])
        if self.gate == "per_head":
            logit = x @ self.gate_weight.to(x.dtype).mT + self.gate_bias.to(x.dtype)
            gamma = torch.sigmoid(logit).mT.unsqueeze(-1).to(k.dtype)
        # One row a token: k, v and γ. Rows before the start of a document have γ = 0.
        row = torch.cat([k, v, gamma], -1)
        flat = row.transpose(1, 2).flatten(2)  # [B, T, H ·]
        before = state["window"].to(row.dtype) if state else flat.new_zeros(len(flat), self.window - 1, flat.shape[2])
        flat = torch.cat([before, flat], 1)
        tail = document_tail(flat, self.window - 1, ctx)
        padded = flat.unflatten(2, (row.shape[1], -1)).transpose(1, 2)
        k, v, gamma = padded.split([k.shape[-1], v.shape[-1], 1], -1)
        # Views of the same rows [B, H, T, c, ·]: the inner loop detects this and computes each gradient once.
        k, v, gamma = (one.unfold(2, self.window, 1).mT for one in (self._features(k), v, gamma))
        weight = gamma.squeeze(-1)
        if ctx.first is not None:
            document = F.pad(ctx.first.cumsum(1), (self.window - 1, 0)).unfold(1, self.window, 1)
            weight = weight * (document == document[..., -1:]).unsqueeze(1)
        return Views(k, v, self._features(q), weight=weight), {**kept, "window": tail}

    def _features(self, x: Tensor) -> Tensor:
        """φ: `[..., d]` to `[..., input_dim]`."""
        if self.degree == 1:
            return x
        found = []
        for degree, root in enumerate(self.coefficient_roots.to(x.dtype), start=1):
            places = list(combinations_with_replacement(range(x.shape[-1]), degree))
            counts = [math.factorial(degree) / math.prod(math.factorial(p.count(i)) for i in set(p)) for p in places]
            index = torch.tensor(places, device=x.device)
            monomials = x[..., index].prod(-1)
            found.append(root * x.new_tensor(counts).sqrt() * monomials)
        return torch.cat(found, -1)
