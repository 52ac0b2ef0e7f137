"""Reconstruct the full token through a decoder: the task of MTTT (images)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from metattt.modules import standardize
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Task, Views


@register(group="task", name="mttt")
class DecodedReconstruction(Task):
    """`ℓ = ½‖LN(f(φ x) g + c) − x‖²`, read with `ψ x` (arXiv 2310.13807, Eq. 1–4): every head reconstructs all D
    features.

    The output map θh is the layer's output projection (`layer.output_bias=true`). The target is not detached.

    Args:
        decoder_norm: LayerNorm, per head, on the reconstruction.
    """

    decoder_norm: bool = setting(default=True, fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.num_heads, self.head_dim, self.label_dim = num_heads, head_dim, dim
        bound = math.sqrt(3 / dim)
        self.phi, self.psi = nn.Linear(dim, num_heads * head_dim), nn.Linear(dim, num_heads * head_dim)
        for view in (self.phi, self.psi):
            nn.init.uniform_(view.weight, -bound, bound)
            nn.init.zeros_(view.bias)
        self.decoder = nn.Parameter(torch.empty(num_heads, head_dim, dim).uniform_(-bound, bound))  # g
        self.decoder_bias = nn.Parameter(torch.zeros(dim))  # shared by the heads
        if self.decoder_norm:
            self.norm_scale = nn.Parameter(torch.ones(num_heads, dim))
            self.norm_bias = nn.Parameter(torch.zeros(num_heads, dim))

    def equations(self) -> list[str]:
        decoded = "LN(f(k_t; W) g + c)" if self.decoder_norm else "f(k_t; W) g + c"
        return [
            "k_t = φ x_t + b_φ",
            "v_t = x_t, all D features, for every head",
            "q_t = ψ x_t + b_ψ",
            f"ℓ_t(W) = ½‖{decoded} − v_t‖², g of each head, c of all",
        ]

    def views(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Views, Tensors]:
        k, q = (view(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for view in (self.phi, self.psi))
        return Views(k, x.to(k.dtype).unsqueeze(1).expand(-1, self.num_heads, -1, -1), q), state

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        accum_dtype = prediction.dtype
        decoded = prediction @ self.decoder.to(accum_dtype) + self.decoder_bias.to(accum_dtype)
        if self.decoder_norm:
            scale, bias = (x.to(accum_dtype).unsqueeze(1) for x in (self.norm_scale, self.norm_bias))
            decoded = standardize(decoded) * scale + bias
        return 0.5 * (decoded - v).square().sum(-1)
