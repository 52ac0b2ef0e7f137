"""The views of LaCT's language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.modules import length, rotary_table, rotate
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction

LENGTH_EPS = 1e-5  # added to the lengths of q and k


@register(group="task", name="lact")
class LaCTViews(Reconstruction, takes=("rope_theta", "qk_norm")):
    """`k = RoPE(u / ‖u‖)`, `u = silu(s_k ∘ θK x + o_k)`, q likewise, and `v = silu(θV x)`, with the loss −⟨v, f(k)⟩
    (LaCT, arXiv 2505.23884, as in its released language models).

    Scales s and offsets o are learned per feature. The released code rotates the pairs (i, i + d/2), this code the
    pairs (2i, 2i + 1), which is the same up to the order of the features of q and k.

    Args:
        rope_theta: base of the rotary encoding.
        rope_heads: the number of heads of the rotary encoding, if it differs from the layer's: LaCT's memory has few
            heads, but rotates q and k like its attention, which has many.
        silu_v: silu on v.
    """

    rope = "full"
    loss_name = "dot"
    rope_heads: int | None = setting(default=None, advice=", or null for those of the layer", fixed=True)
    silu_v: bool = setting(default=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        heads, width = num_heads if self.rope_heads is None else self.rope_heads, num_heads * head_dim
        if width % heads or width // heads % 2:
            raise MetaTTTError(
                f"task.rope_heads={heads} does not divide {width} features into heads of an even width: set it to the "
                "attention's heads"
            )
        self.rope_width = width // heads
        self.qk_scale, self.qk_offset = nn.Parameter(torch.ones(2, width)), nn.Parameter(torch.zeros(2, width))

    def equations(self) -> list[str]:
        norm = "RMSNorm(θ{0} x_t)" if self.qk_norm else "θ{0} x_t"
        k, q = (f"RoPE_t(u/‖u‖), u = silu(s_{i} ∘ {norm.format(i)} + o_{i})" for i in "KQ")
        lines = [f"k_t = {k}", f"v_t = {'silu(θV x_t)' if self.silu_v else 'θV x_t'}", f"q_t = {q}"]
        place = f"the position of t in its document, base {self.rope_theta:g}, in heads {self.rope_width} wide"
        return [
            *lines,
            "ℓ_t(W) = −⟨v_t, f(k_t; W)⟩",
            f"RoPE_t: turns features 2i and 2i + 1 by {place}",
        ]

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        q, k, v = self.project(x) if projected is None else projected
        cos, sin = rotary_table(ctx.positions, self.rope_width, self.rope_theta, q.dtype)
        turned = []
        for one, scale, offset in zip((q, k), self.qk_scale, self.qk_offset, strict=True):
            heads = self._heads(F.silu(one * scale.to(one.dtype) + offset.to(one.dtype)))
            flat = (heads / (length(heads) + LENGTH_EPS)).transpose(1, 2).flatten(2)
            pairs = flat.unflatten(-1, (-1, self.rope_width)).transpose(1, 2)
            turned.append(self._heads(rotate(pairs, cos, sin).transpose(1, 2).flatten(2)))
        return Views(turned[1], self._heads(F.silu(v) if self.silu_v else v), turned[0]), {}
