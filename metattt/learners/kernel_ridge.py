"""Kernel ridge regression: the hidden state is the data, and a prediction is the exact fit to it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from metattt.learners.kernel_estimator import documents
from metattt.learners.non_parametric import NonParametric, cholesky
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


@register(group="learner", name="kernel_ridge")
class KernelRidge(NonParametric, takes=("residual", "norm")):
    """`f(q) = κ(q, K_t) (κ(K_t, K_t) + λI)⁻¹ V_t` over the tokens read so far: the minimum of
    `Σ_s ½‖f(k_s) − v_s‖² + ½λ‖f‖²`.

    A new token adds a row to the Cholesky factor L of `κ + λI`, and the factor of the first t tokens is the leading
    block of L. So one factorisation gives the predictions for all queries: with `Z = L⁻¹V` and column t of
    `C = L⁻¹κ(K, q)`, `f(q_t) = Σ_{s≤t} C_st Z_s`. With S tokens read, a token costs O(S²) and the state holds L, S²
    numbers a head.

    Args:
        kernel: `linear` κ = q·k, `gaussian` exp(−‖q − k‖² / 2h), or `exponential` exp(q·k / h).
        ridge: λ.
        bandwidth: h; None uses √d.
    """

    learn_init = False
    kernel: Literal["linear", "gaussian", "exponential"] = setting(default="gaussian")
    ridge: float = setting(default=1.0, above=0, advice=", or equal tokens have no solution")
    bandwidth: float | None = setting(default=None, above=0, advice=", or null for the root of the head width")

    def equations(self) -> list[str]:
        value = self._in_symbols("κ(q_t, K)(κ(K, K) + λI)⁻¹ V")
        h = "√d" if self.bandwidth is None else f"{self.bandwidth:g}"
        kernels = {"linear": "q·k", "gaussian": f"exp(−‖q − k‖²/2h), h = {h}", "exponential": f"exp(q·k/{h})"}
        return [
            f"f(q_t) = {value}, λ = {self.ridge:g}, K and V the k_s and v_s of all s ≤ t",
            f"κ(q, k) = {kernels[self.kernel]}",
            "which is the minimum of Σ_{s≤t} ½‖f(k_s) − v_s‖² + ½λ‖f‖²",
        ]

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and the data with its factor: `k`, `solved` = Z `[B, H, S, d]`, `factor` = L
        `[B, H, S, S]`.

        Where sequences differ, `document` `[B, S]` numbers the documents (−1 for padding); κ between different ones is
        0.
        """
        accum_dtype = torch.promote_types(views.k.dtype, torch.float32)
        with torch.autocast("cpu" if views.k.is_meta else views.k.device.type, enabled=False):
            k, v, q = (view.to(accum_dtype) for view in (views.k, views.v, views.q))
            past = state["k"].shape[2] if state else 0
            document = documents(state, ctx, past)
            old = state["k"] if state else k[:, :, :0]
            data = torch.cat([old, k], dim=2)
            new = self._kernel(k, data, document, past)  # [B, H, T, S]
            identity = torch.eye(k.shape[2], dtype=accum_dtype, device=k.device)
            factor, solved = self._grow(new, v, identity, state)
            asked = self._kernel(q, data, document, past).mT
            whitened = torch.linalg.solve_triangular(factor, asked, upper=False)  # C
            seen = torch.ones(whitened.shape[-2:], dtype=torch.bool, device=k.device).triu(-past)
            y = (whitened * seen).mT @ solved
        after = {"k": data, "solved": solved, "factor": factor} | ({} if document is None else {"document": document})
        return self._wrapped(q, y), after

    def read(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> Tensor:
        """See `NonParametric.read`; without data, 0."""
        accum_dtype = torch.promote_types(views.k.dtype, torch.float32)
        with torch.autocast("cpu" if views.k.is_meta else views.k.device.type, enabled=False):
            q = views.q.to(accum_dtype)
            if not state:
                return self._wrapped(views.q, torch.zeros_like(views.v, dtype=accum_dtype))
            document, count = state.get("document"), q.shape[2]
            if document is not None:
                document = torch.cat([document, document.max(1, keepdim=True).values.expand(-1, count)], dim=1)
            data = torch.cat([state["k"], q], dim=2)
            asked = self._kernel(q, data, document, data.shape[2] - count)[..., :-count].mT
            y = torch.linalg.solve_triangular(state["factor"], asked, upper=False).mT @ state["solved"]
        return self._wrapped(views.q, y)

    def _grow(self, new: Tensor, v: Tensor, identity: Tensor, state: Tensors) -> tuple[Tensor, Tensor]:
        """L and Z with the rows of the new tokens: `L = [[L₁, 0], [M, N]]`, `M = κ₂₁L₁⁻ᵀ`, `NNᵀ = κ₂₂ + λI − MMᵀ`."""
        past = new.shape[3] - new.shape[2]
        block = new[..., past:] + self.ridge * identity
        old, solved = (state["factor"], state["solved"]) if state else (new[:, :, :0, :0], v[:, :, :0])
        left = torch.linalg.solve_triangular(old, new[..., :past].mT, upper=False).mT
        right = cholesky(block - left @ left.mT, "learner.ridge", self.ridge)
        rows = torch.linalg.solve_triangular(right, v - left @ solved, upper=False)
        top = torch.cat([old, old.new_zeros(*old.shape[:3], right.shape[-1])], dim=3)
        return torch.cat([top, torch.cat([left, right], dim=3)], dim=2), torch.cat([solved, rows], dim=2)

    def _kernel(self, a: Tensor, data: Tensor, document: Tensor | None, past: int) -> Tensor:
        """κ of the new tokens' views `a` `[B, H, T, d]` with all data, `[B, H, T, S]`."""
        width = math.sqrt(a.shape[-1]) if self.bandwidth is None else self.bandwidth
        value = a @ data.mT
        if self.kernel == "exponential":
            value = (value / width).exp()
        elif self.kernel == "gaussian":
            distance = a.square().sum(-1, keepdim=True) + data.square().sum(-1).unsqueeze(-2) - 2 * value
            value = (distance / (-2 * width)).exp()
        if document is None:
            return value
        same = document[:, past:].unsqueeze(-1) == document.unsqueeze(1)
        real = (document >= 0).unsqueeze(1)
        return torch.where((same & real).unsqueeze(1), value, 0)
