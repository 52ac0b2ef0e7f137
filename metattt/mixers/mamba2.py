"""Mamba-2: heads of a state space with one decay each (arXiv 2405.21060)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_number
from metattt.mixers.base import Mixer
from metattt.mixers.duality import duality
from metattt.modules import convolution, exact, step_bias
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors

NORM_EPS = 1e-5
RATES = (1.0, 16.0)  # of the initial −A


class GatedRMSNorm(nn.Module):
    """`RMSNorm(y ∘ silu(z))` over each of G groups of channels, with one learned scale `[E]`."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups = groups

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """`y` and `z` `[..., E]` to `[..., E]`, in the type of `y`."""
        gated = (y * F.silu(z)).unflatten(-1, (self.groups, -1))
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + NORM_EPS)
        return normed.flatten(-2) * self.weight.to(y.dtype)


@register(group="layer", name="mamba2_mixer")
class Mamba2(Mixer):
    """Mamba-2's layer (Sec. 7.1, Fig. 6), parameters named as in the published code.

    ```
    z, u, B, C, δ = W_in x;  u, B, C = silu(conv(u, B, C))   # E = expand D channels in H heads of P; B, C [G, N]
    Δ = softplus(δ + b_Δ)                                    # [H]
    h_t = exp(Δ_t A) h_{t−1} + (Δ_t u_t) B_tᵀ                 # [P, N] a head, A = −exp(A_log) a number
    y_t = W_out RMSNorm((h_t C_t + D u_t) ∘ silu(z_t))
    ```

    Initial values: −A uniform in 1 to 16, D = 1, softplus(b_Δ) log-uniform in `dt_min` to `dt_max`, the others as in
    `nn.Linear`.

    Args:
        dim: model width D.
        num_heads: a head is D / num_heads wide, as in other layers, and there are expand · num_heads of them.
        head_dim: P, instead of D / num_heads (published: 64).
        expand: channels of the recurrence over D.
        d_state: N, numbers a channel remembers.
        ngroups: G, heads share B and C in so many groups.
        conv_width: taps of the convolution (tokens).
        dt_min, dt_max: range of the initial Δ.
    """

    num_heads: int = setting()
    given_head_dim: int | None = setting(default=None, alias="head_dim")
    expand: int = setting(default=2)
    d_state: int = setting(default=128)
    ngroups: int = setting(default=1)
    conv_width: int = setting(default=4)
    dt_min: float = setting(default=0.001, above=0)
    dt_max: float = setting(default=0.1, above=0)

    def create_modules(self) -> None:
        dim, ngroups, d_state = self.dim, self.ngroups, self.d_state
        if self.given_head_dim is None and dim % self.num_heads:
            raise MetaTTTError(
                f"num_heads={self.num_heads} does not divide dim={dim}: change it, or set layer.head_dim"
            )
        check_number("layer.dt_max", self.dt_max, least=self.dt_min, advice=", which is layer.dt_min")
        width, head = self.expand * dim, self.given_head_dim or dim // self.num_heads
        if width % head:
            raise MetaTTTError(
                f"layer.head_dim={head} does not divide layer.expand x dim = {width}: change one of them"
            )
        heads = width // head
        if heads % ngroups:
            raise MetaTTTError(
                f"layer.ngroups={ngroups} does not divide the {heads} heads: change it, or layer.head_dim"
            )
        convolved = width + 2 * ngroups * d_state
        self.width, self.heads, self.head_dim = width, heads, head
        self.in_proj = nn.Linear(dim, width + convolved + heads, bias=False)
        self.conv1d = convolution(convolved, self.conv_width)
        self.dt_bias = nn.Parameter(step_bias(heads, self.dt_min, self.dt_max))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*RATES).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedRMSNorm(width, ngroups)
        self.out_proj = nn.Linear(width, dim, bias=False)

    def equations(self) -> list[str]:
        return [
            "z_t, (u, B, C)_t, Δ_t = W_in x_t, then (u, B, C) = silu(conv(u, B, C))",
            "Δ_t = softplus(Δ_t + b_Δ), a_t = exp(−exp(A_log) Δ_t), a number a head",
            "h_t = a_t h_{t−1} + Δ_t B_tᵀ u_t",
            "y_t = W_out RMSNorm((C_t h_t + D u_t) ∘ silu(z_t))",
        ]

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """The convolution's tail `[conv_width − 1, E + 2GN]`, and h `[H, P, N]`."""
        channels, _, taps = self.conv1d.weight.shape
        return {"conv": (taps - 1, channels), "memory": (self.heads, self.head_dim, self.d_state)}

    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """See `Mixer.mix`; the recurrence and the norm are computed in fp32 or wider."""
        groups = self.ngroups * self.d_state
        z, convolved, dt = self.in_proj(x).split([self.width, self.width + 2 * groups, self.heads], dim=-1)
        convolved, tail = self.conv1d(convolved, memory.get("conv"), ctx)
        accum_dtype, matmul_dtype = torch.promote_types(x.dtype, torch.float32), convolved.dtype
        with exact(x.device.type):
            z, convolved, dt = (one.to(accum_dtype) for one in (z, F.silu(convolved), dt))
            u, b, c = convolved.split([self.width, groups, groups], dim=-1)
            u = u.unflatten(-1, (self.heads, self.head_dim))
            b, c = (one.unflatten(-1, (self.ngroups, self.d_state)) for one in (b, c))
            dt = F.softplus(dt + self.dt_bias.to(accum_dtype))
            if ctx.valid is not None:
                dt = dt * ctx.valid.unsqueeze(-1)  # a = 1, and nothing is written
            h = u.new_zeros(len(x), self.heads, self.head_dim, self.d_state)
            h = memory["memory"].to(accum_dtype) if memory else h
            log_decay = -dt * self.A_log.to(accum_dtype).exp()
            written = dt.unsqueeze(-1) * u
            y, h = duality(written, log_decay, b, c, h, ctx.first, self.chunk_size, self.group_size, matmul_dtype)
            y = self.norm((y + self.D.to(accum_dtype).unsqueeze(-1) * u).flatten(2), z)
        return self.out_proj(y.to(x.dtype)), {"conv": tail, "memory": h}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, head_dim={self.head_dim}"
