"""Several pairs a token: DeltaProduct, which learns them one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.modules import normalize, projection
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction


@register(group="task", name="pairs")
class Pairs(Reconstruction, takes=("count", "feature_map", "normalize_qk", "short_conv")):
    """n pairs `(k, v)` a token, each from projections of its own, with a step size `scale · σ(θ x)` of its own; they
    are learned one after the other, and the token is read once (DeltaProduct, arXiv 2502.10297):
    `W_j = W_{j−1} − β_j k_jᵀ(k_j W_{j−1} − v_j)` for j = 1 … n.

    Args:
        count: n.
        scale: largest step size; 2 allows negative eigenvalues (arXiv 2411.12537).
    """

    feature_map = "silu"
    normalize_qk = True
    count: int = setting(default=2, most=1024, fixed=True)
    scale: float = setting(default=2.0, above=0)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        width = self.count * num_heads * head_dim
        self.k, self.v = projection(dim, width, False), projection(dim, width, False)
        if self.short_conv is not None:
            self.make_convolutions(num_heads * head_dim, width)
        self.strength = projection(dim, self.count * num_heads, False)

    def equations(self) -> list[str]:
        own = f"{self.count} pairs a token, with θK, θV and a weight ω_t = {self.scale:g} σ(θ_ω x_t) of their own"
        return [*super().equations(), own]

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        q, k, v = self.project(x) if projected is None else projected
        (q, k, v), kept = self.convolved((q, k, v), state, ctx)
        q, k, v = self._heads(self.mapped(q)), self._several(self.mapped(k)), self._several(v)
        if self.normalize_qk:
            q, k = normalize(q), normalize(k)
        weight = self.scale * torch.sigmoid(self.strength(x)).unflatten(-1, (self.count, -1)).permute(0, 3, 1, 2)
        return Views(k, v, q, weight=weight), kept

    def _several(self, x: Tensor) -> Tensor:
        """`[B, T, n H d]` to `[B, H, T, n, d]`."""
        return x.unflatten(-1, (self.count, self.num_heads, -1)).permute(0, 3, 1, 2, 4)
