"""Delta gradient descent: a step that also erases along the token's own key."""

from __future__ import annotations

from torch import Tensor

from metattt.optimizers.base import Gates
from metattt.optimizers.momentum import Momentum
from metattt.registry import register
from metattt.state import Context, Tensors
from metattt.tasks.base import Views


@register(group="optimizer", name="delta_gradient")
class DeltaGradientDescent(Momentum):
    """`W_t = W_{t−1} (I − η'_t k_t k_tᵀ) − η'_t ∇ℓ_t` with `η' = η / (1 + η)`, for keys of unit length (delta gradient
    descent of Nested Learning, arXiv 2512.24695, as public reproductions give it): with the squared loss of a linear
    learner, what is erased is 2k.

    Args: see `Momentum`; the learner is linear, and `anchor` is `online` here.
    """

    anchor = "online"

    def equations(self) -> list[str]:
        lines = super().equations()
        if self.lr == "constant" and self.decay != "mamba2":
            eta = [f"η_t = {self.scale / (1 + self.scale):g}"]
            lines = [line for line in lines if not line.startswith("η_t")]
        else:
            eta = ["η_t ← η_t/(1 + η_t)"]
        return [*lines, *eta, "p_t ← p_t + k_t, where the task has no p_t it is k_t"]

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        erased = views.k if views.erase_key is None else views.erase_key
        return views._replace(erase_key=erased + views.k), gates._replace(eta=gates.eta / (1 + gates.eta)), state
