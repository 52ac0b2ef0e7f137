"""Views with an erase gate and a write gate: those of Gated DeltaNet-2 and of Comba."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from metattt.modules import projection
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views
from metattt.tasks.reconstruction import Projected, Reconstruction


@register(group="task", name="gated")
class GatedViews(Reconstruction, takes=("feature_map", "normalize_qk", "kv_heads", "qk_norm", "short_conv")):
    """`p = e ∘ k` is erased and `v = w ∘ θV x` is written, with separate gates: `G = kᵀ(p W − v)`.

    Args:
        erase: the gate e: `none` (1), `constant`, σ(c) learned per head (Comba, arXiv 2506.02475), or `per_channel`,
            σ(θ x) (Gated DeltaNet-2, arXiv 2605.22791).
        erase_scale: times e; 2 allows negative eigenvalues (arXiv 2411.12537).
        write: the gate w: `none` (1) or `per_channel`, σ(θ x).
        correction: `q − g p` instead of q, with a learned g per head that starts at this value (Comba: 1, or 0.02 for
            small models); null: q.
    """

    feature_map = "silu"
    normalize_qk = True
    erase: Literal["none", "constant", "per_channel"] = setting(default="per_channel", fixed=True)
    erase_scale: float = setting(default=1.0, above=0)
    write: Literal["none", "per_channel"] = setting(default="none", fixed=True)
    correction: float | None = setting(default=None, advice=", or null for none", fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        width = self.groups * head_dim
        if self.erase == "constant":
            self.erase_logit = nn.Parameter(torch.ones(self.groups))
        elif self.erase == "per_channel":
            self.erase_gate = projection(dim, width, False)
        if self.write == "per_channel":
            self.write_gate = projection(dim, width, False)
        if self.correction is not None:
            self.correction_factor = nn.Parameter(torch.full((num_heads,), float(self.correction)))

    def equations(self) -> list[str]:
        lines = super().equations()
        if self.write == "per_channel":
            lines = [
                line.replace("v_t = ", "v_t = σ(θ_w x_t) ∘ ") if line.startswith("v_t") else line for line in lines
            ]
        scale = "" if self.erase_scale == 1 else f"{self.erase_scale:g} "
        gated = {
            "none": "k_t",
            "constant": "e k_t, e = σ(c_e) of each head, c_e = 1 at the start",
            "per_channel": "e ∘ k_t, e = σ(θ_e x_t)",
        }[self.erase]
        erased = "k_t" if scale + gated == "k_t" else "p_t"
        lines += [] if erased == "k_t" else [f"p_t = {scale}{gated}"]
        if self.correction is not None:
            lines.append(f"q_t ← q_t − g {erased}, g learned for each head, {self.correction:g} at the start")
        return lines

    def views(
        self, x: Tensor, state: Tensors, ctx: Context, projected: Projected | None = None
    ) -> tuple[Views, Tensors]:
        views, state = super().views(x, state, ctx, projected)
        p, v, q = views.k, views.v, views.q
        if self.erase == "constant":
            p = p * (self.erase_scale * torch.sigmoid(self.erase_logit).to(p.dtype)).view(-1, 1, 1)
        elif self.erase == "per_channel":
            p = p * (self.erase_scale * torch.sigmoid(self._heads(self.erase_gate(x)))).to(p.dtype)
        elif self.erase_scale != 1:
            p = p * self.erase_scale
        if self.write == "per_channel":
            v = v * torch.sigmoid(self._heads(self.write_gate(x))).to(v.dtype)
        if self.correction is not None:
            shared = p if self.groups == self.num_heads else p.repeat_interleave(self.num_heads // self.groups, 1)
            q = q - self.correction_factor.to(q.dtype).view(-1, 1, 1) * shared
        return Views(views.k, v, q, None if p is views.k else p), state
