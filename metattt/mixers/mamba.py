"""Mamba: a state space whose steps, writes and reads are chosen by the token (arXiv 2312.00752)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.memory_limit import check_memory_limit
from metattt.mixers.base import Mixer, check_steps
from metattt.mixers.scan import scan
from metattt.modules import convolution, exact, step_bias
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors


@register(group="layer", name="mamba")
class Mamba(Mixer):
    """The selective state space (S6) in its gated block, parameters named as in the published code.

    ```
    u, z = W_in x;  u = silu(conv(u))                    # E = expand D channels each
    Δ = softplus(W_Δ (W_x u)_Δ + b_Δ), B, C = (W_x u)_BC  # [E], [N], [N]
    h_t = exp(Δ_t A) ∘ h_{t−1} + (Δ_t u_t) B_tᵀ           # [E, N], Eq. 2 and Alg. 2, A = −exp(A_log)
    y_t = W_out ((h_t C_t + D ∘ u_t) ∘ silu(z_t))
    ```

    Initial values: A_log = log(1 … N) in every channel (S4D-Real), D = 1, softplus(b_Δ) log-uniform in `dt_min` to
    `dt_max`, W_Δ uniform in ±R^(−1/2), the others as in `nn.Linear`.

    Args:
        dim: model width D.
        expand: channels of the recurrence over D.
        d_state: N, numbers a channel remembers.
        conv_width: taps of the convolution (tokens).
        dt_rank: R, rank of the projection to Δ; None is ⌈D/16⌉.
        dt_min, dt_max: range of the initial Δ.
        chunk_size, group_size: see `Mixer`.

    Raises:
        MetaTTTError: sizes that are not positive.
    """

    expand: int = setting(default=2)
    d_state: int = setting(default=16)
    conv_width: int = setting(default=4)
    dt_rank: int | None = setting(default=None)
    dt_min: float = setting(default=0.001, above=0)
    dt_max: float = setting(default=0.1, above=0)

    def create_modules(self) -> None:
        check_steps(self.dt_min, self.dt_max)
        dim, d_state = self.dim, self.d_state
        width, rank = self.expand * dim, self.dt_rank or math.ceil(dim / 16)
        numbers = width * (3 * dim + 2 * rank + 3 * d_state)
        check_memory_limit(
            numbers, f"a Mamba layer of dim={dim}", "lower dim, layer.expand, layer.d_state or layer.dt_rank"
        )
        self.width, self.rank = width, rank
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.conv1d = convolution(width, self.conv_width)
        self.x_proj = nn.Linear(width, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, width)
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        with torch.no_grad():
            self.dt_proj.bias.copy_(step_bias(width, self.dt_min, self.dt_max))
        self.A_log = nn.Parameter(torch.arange(1.0, d_state + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out_proj = nn.Linear(width, dim, bias=False)

    def equations(self) -> list[str]:
        return [
            "u_t, z_t = W_in x_t, then u = silu(conv(u))",
            "Δ_t = softplus(W_Δ (W_x u_t)_Δ + b_Δ), B_t and C_t = (W_x u_t)_B,C, A = −exp(A_log)",
            "h_t = exp(Δ_t A) ∘ h_{t−1} + (Δ_t u_t) B_tᵀ",
            "y_t = W_out ((h_t C_t + D ∘ u_t) ∘ silu(z_t))",
        ]

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """The convolution's tail `[conv_width − 1, E]`, and h `[E, N]`."""
        return {"conv": (self.conv1d.weight.shape[-1] - 1, self.width), "memory": (self.width, self.d_state)}

    def mix(self, x: Tensor, memory: Tensors, ctx: Context) -> tuple[Tensor, Tensors]:
        """See `Mixer.mix`; the recurrence is computed in fp32 or wider."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u, tail = self.conv1d(u, memory.get("conv"), ctx)
        u = F.silu(u)
        low, b, c = self.x_proj(u).split([self.rank, self.d_state, self.d_state], dim=-1)
        dt = F.linear(low, self.dt_proj.weight)
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        with exact(x.device.type):
            u, z, b, c, dt = (one.to(accum_dtype) for one in (u, z, b, c, dt))
            dt = F.softplus(dt + self.dt_proj.bias.to(accum_dtype))
            if ctx.valid is not None:
                dt = dt * ctx.valid.unsqueeze(-1)  # a = 1, and nothing is written
            h = memory["memory"] if memory else u.new_zeros(len(x), self.width, self.d_state)
            rates = -self.A_log.to(accum_dtype).exp()
            y, h = scan(selective, h, c, ctx.first, (dt, u, b), (rates,), self.chunk_size, self.group_size)
            y = (y + self.D.to(accum_dtype) * u) * F.silu(z)
        return self.out_proj(y.to(x.dtype)), {"conv": tail, "memory": h}


def selective(dt: Tensor, u: Tensor, b: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """Decays exp(Δ A) and writes (Δ u) Bᵀ, `[..., E, N]`, from Δ and u `[..., E]`, B `[..., N]` and A `[E, N]`."""
    return (dt.unsqueeze(-1) * rates).exp(), (dt * u).unsqueeze(-1) * b.unsqueeze(-2)
