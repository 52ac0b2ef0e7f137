"""Longhorn: a state space that solves an online regression at every token (arXiv 2407.14207)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.memory_limit import check_memory_limit
from metattt.mixers.base import Mixer
from metattt.mixers.scan import scan
from metattt.modules import convolution, exact
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors


@register(group="layer", name="longhorn")
class Longhorn(Mixer):
    """Longhorn's recurrence with its diagonal approximation, in Mamba's block; parameters named as in the published
    code.

    `S_t = argmin ‖S − S_{t−1}‖² + ‖S k_t − v_t‖²_{diag β_t}` has for every channel i the row
    `S_i = (I − Δ_i k kᵀ) S_i + Δ_i v_i k`. The published layer keeps the diagonal of k kᵀ:

    ```
    v, z = W_in x;  v = silu(conv(v))                    # E = expand D channels each
    β = σ(W_β (W_x v)_β + b_β), k, q = (W_x v)_kq         # [E], [N], [N]
    Δ_t = β_t / (1 + β_t k_tᵀ k_t)
    S_t = (1 − Δ_t (k_t ∘ k_t)ᵀ) ∘ S_{t−1} + (Δ_t ∘ v_t) k_tᵀ
    y_t = W_out ((S_t q_t + D ∘ v_t) ∘ silu(z_t))
    ```

    Decays are in [0, 1] whatever k is. Initial values: D = 1, b_β = 0, the others as in `nn.Linear`.

    Args:
        dim: model width D.
        expand: channels of the recurrence over D.
        d_state: N, width of keys.
        conv_width: taps of the convolution (tokens).
        dt_rank: rank of the projection to β; None is ⌈D/16⌉.
        chunk_size, group_size: see `Mixer`.

    Raises:
        MetaTTTError: sizes that are not positive.
    """

    expand: int = setting(default=2)
    d_state: int = setting(default=16)
    conv_width: int = setting(default=4)
    dt_rank: int | None = setting(default=None)

    def create_modules(self) -> None:
        dim, d_state = self.dim, self.d_state
        width, rank = self.expand * dim, self.dt_rank or math.ceil(dim / 16)
        numbers = width * (3 * dim + 2 * rank + 2 * d_state)
        check_memory_limit(
            numbers, f"a Longhorn layer of dim={dim}", "lower dim, layer.expand, layer.d_state or layer.dt_rank"
        )
        self.width, self.rank = width, rank
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.conv1d = convolution(width, self.conv_width)
        self.x_proj = nn.Linear(width, rank + 2 * d_state, bias=False)
        self.dt_head = nn.Linear(rank, width)
        nn.init.zeros_(self.dt_head.bias)
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, dim, bias=False)

    def equations(self) -> list[str]:
        return [
            "v_t, z_t = W_in x_t, then v = silu(conv(v))",
            "β_t = σ(W_β (W_x v_t)_β + b_β), k_t and q_t = (W_x v_t)_k,q",
            "Δ_t = β_t / (1 + β_t k_tᵀ k_t)",
            "S_t = (1 − Δ_t (k_t ∘ k_t)ᵀ) ∘ S_{t−1} + (Δ_t ∘ v_t) k_tᵀ",
            "y_t = W_out ((S_t q_t + D ∘ v_t) ∘ silu(z_t))",
        ]

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """The convolution's tail `[conv_width − 1, E]`, and S `[E, N]`."""
        return {"conv": (self.conv1d.weight.shape[-1] - 1, self.width), "memory": (self.width, self.d_state)}

    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """See `Mixer.mix`; the recurrence is computed in fp32 or wider."""
        v, z = self.in_proj(x).chunk(2, dim=-1)
        v, tail = self.conv1d(v, memory.get("conv"), ctx)
        v = F.silu(v)
        low, k, q = self.x_proj(v).split([self.rank, self.d_state, self.d_state], dim=-1)
        beta = F.linear(low, self.dt_head.weight)
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        with exact(x.device.type):
            v, z, k, q, beta = (one.to(accum_dtype) for one in (v, z, k, q, beta))
            beta = torch.sigmoid(beta + self.dt_head.bias.to(accum_dtype))
            if ctx.valid is not None:
                beta = beta * ctx.valid.unsqueeze(-1)  # Δ = 0: nothing is forgotten or written
            s = memory["memory"] if memory else v.new_zeros(len(x), self.width, self.d_state)
            y, s = scan(implicit, s, q, ctx.first, (beta, v, k), (), self.chunk_size, self.group_size)
            y = (y + self.D.to(accum_dtype) * v) * F.silu(z)
        return self.out_proj(y.to(x.dtype)), {"conv": tail, "memory": s}


def implicit(beta: Tensor, v: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Decays 1 − Δ (k ∘ k)ᵀ and writes (Δ ∘ v) kᵀ, `[..., E, N]`, from β and v `[..., E]` and k `[..., N]`."""
    squares = k.square()
    step = beta / (1 + beta * squares.sum(-1, keepdim=True))
    return 1 - step.unsqueeze(-1) * squares.unsqueeze(-2), (step * v).unsqueeze(-1) * k.unsqueeze(-2)
