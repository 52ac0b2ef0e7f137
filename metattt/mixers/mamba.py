"""Mamba: a state space whose steps, writes and reads are chosen by the token (arXiv 2312.00752)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metattt.errors import check_number
from metattt.mixers.scan import ScanBlock
from metattt.modules import step_bias
from metattt.registry import register
from metattt.setting import setting


@register(group="layer", name="mamba")
class Mamba(ScanBlock):
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
        dt_min, dt_max: range of the initial Δ.
    """

    steps = "dt_proj"
    dt_min: float = setting(default=0.001, above=0)
    dt_max: float = setting(default=0.1, above=0)

    def create_recurrence(self) -> None:
        check_number("layer.dt_max", self.dt_max, least=self.dt_min, advice=", which is layer.dt_min")
        self.dt_proj = nn.Linear(self.rank, self.width)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        with torch.no_grad():
            self.dt_proj.bias.copy_(step_bias(self.width, self.dt_min, self.dt_max))
        self.A_log = nn.Parameter(torch.arange(1.0, self.d_state + 1).log().repeat(self.width, 1))

    def equations(self) -> list[str]:
        return [
            "u_t, z_t = W_in x_t, then u = silu(conv(u))",
            "Δ_t = softplus(W_Δ (W_x u_t)_Δ + b_Δ), B_t and C_t = (W_x u_t)_B,C, A = −exp(A_log)",
            "h_t = exp(Δ_t A) ∘ h_{t−1} + (Δ_t u_t) B_tᵀ",
            "y_t = W_out ((h_t C_t + D ∘ u_t) ∘ silu(z_t))",
        ]

    def rates(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A `[E, N]`."""
        return (-self.A_log.to(dtype).exp(),)

    @staticmethod
    def gates(step: Tensor, v: Tensor, k: Tensor, *rates: Tensor) -> tuple[Tensor, Tensor]:
        """Decays exp(Δ A) and writes (Δ u) Bᵀ; the inputs are u, the keys B."""
        return (step.unsqueeze(-1) * rates[0]).exp(), (step * v).unsqueeze(-1) * k.unsqueeze(-2)
