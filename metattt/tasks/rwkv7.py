"""The views of RWKV-7."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from metattt.modules import normalize
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction


@register(group="task", name="rwkv7")
class RWKV7Views(Reconstruction, takes=()):
    """The removal key `p = κ̂ = κ/‖κ‖`, `κ = ξ ∘ θK x`, which is erased along `b = a ∘ κ̂`, and the replacement key
    `k = θK x ∘ (1 + (a − 1) ∘ s)`, with the in-context learning rate `a = σ(low-rank(x) + c)` of every channel; ξ and s
    are learned per channel (RWKV-7, arXiv 2503.14456, Sec. 3: `S_t = S_{t−1}(diag(w_t) − κ̂ᵀ(a ∘ κ̂)) + vᵀ k`).

    Args:
        rank: of the projection that a comes from; `head_dim`: the width of a head.
    """

    rank: int | Literal["head_dim"] = setting(default="head_dim", advice=", or head_dim", fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        rank, width = head_dim if self.rank == "head_dim" else int(self.rank), num_heads * head_dim
        self.rate_down = nn.Parameter(torch.randn(rank, dim) * 0.02)
        self.rate_up = nn.Parameter(torch.randn(width, rank) * 0.02)
        self.rate_bias = nn.Parameter(torch.zeros(width))
        self.removal_scale = nn.Parameter(torch.full((width,), 0.85))  # ξ
        self.replacement_rate = nn.Parameter(torch.ones(width))  # s

    def equations(self) -> list[str]:
        rank = "d" if self.rank == "head_dim" else self.rank
        return [
            "k_t = θK x_t ∘ (1 + (r_t − 1) ∘ s)",
            "v_t = θV x_t",
            "q_t = θQ x_t",
            "p_t = u/‖u‖, u = ξ ∘ θK x_t",
            "b_t = r_t ∘ p_t",
            f"r_t = σ(U V x_t + c), V to {rank} features and U to all channels; ξ and s of every channel",
            "ℓ_t(W) = ½‖f(k_t; W) − v_t‖²",
        ]

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        q, k, v = self.project(x) if projected is None else projected
        low = x @ self.rate_down.to(x.dtype).mT
        rate = torch.sigmoid(low @ self.rate_up.to(x.dtype).mT + self.rate_bias.to(x.dtype))
        removal = normalize(self._heads(k * self.removal_scale.to(k.dtype)))
        replacement = self._heads(k * (1 + (rate - 1) * self.replacement_rate.to(k.dtype)))
        erased = self._heads(rate).to(removal.dtype) * removal
        return Views(replacement, self._heads(v), self._heads(q), removal, erased), {}
