"""Longhorn: a state space that solves an online regression at every token (arXiv 2407.14207)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metattt.mixers.scan import ScanBlock
from metattt.registry import register


@register(group="layer", name="longhorn")
class Longhorn(ScanBlock):
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
    """

    steps = "dt_head"

    def create_recurrence(self) -> None:
        self.dt_head = nn.Linear(self.rank, self.width)
        nn.init.zeros_(self.dt_head.bias)

    def equations(self) -> list[str]:
        return [
            "v_t, z_t = W_in x_t, then v = silu(conv(v))",
            "β_t = σ(W_β (W_x v_t)_β + b_β), k_t and q_t = (W_x v_t)_k,q",
            "Δ_t = β_t / (1 + β_t k_tᵀ k_t)",
            "S_t = (1 − Δ_t (k_t ∘ k_t)ᵀ) ∘ S_{t−1} + (Δ_t ∘ v_t) k_tᵀ",
            "y_t = W_out ((S_t q_t + D ∘ v_t) ∘ silu(z_t))",
        ]

    @staticmethod
    def positive(step: Tensor) -> Tensor:
        return torch.sigmoid(step)

    @staticmethod
    def gates(step: Tensor, v: Tensor, k: Tensor, *rates: Tensor) -> tuple[Tensor, Tensor]:
        """Decays 1 − Δ (k ∘ k)ᵀ and writes (Δ ∘ v) kᵀ; the step is β."""
        squares = k.square()
        delta = step / (1 + step * squares.sum(-1, keepdim=True))
        return 1 - delta.unsqueeze(-1) * squares.unsqueeze(-2), (delta * v).unsqueeze(-1) * k.unsqueeze(-2)
