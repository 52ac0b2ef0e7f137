"""Delta rules whose step size depends on the length of the key: exact integration of a token, and projection."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from metattt.optimizers.base import Gates
from metattt.optimizers.momentum import TAKEN as OF_MOMENTUM
from metattt.optimizers.momentum import Momentum
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views

TAKEN = (*OF_MOMENTUM, "momentum", "momentum_init", "decay", "decay_init", "gradient_at")


@register(group="optimizer", name="key_step")
class KeyStep(Momentum, takes=TAKEN):
    """A rule of `Momentum` with another step size, λ_t = ‖k_t‖²:

    | step | η_t becomes | what it does |
    |---|---|---|
    | `exact` | (1 − exp(−η_t λ_t))/λ_t | follows `dW/dt = −∇ℓ_t(W)` for the time η_t (EFLA, arXiv 2512.12602) |
    | `projection` | η_t/(λ_t + ε) | with η = 1 the answer to k_t becomes v_t (Kaczmarz, arXiv 2605.08587) |

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk, momentum, momentum_init, decay,
            decay_init, gradient_at: see `Momentum`.
        step: see the table.
        eps: ε of `projection`.
    """

    mini_batch_size = 1
    anchor = "online"
    lr_scale = "none"
    momentum = "none"
    step: Literal["exact", "projection"] = setting(default="exact")
    eps: float = setting(default=1e-6, above=0)

    def equations(self) -> list[str]:
        given = super().equations()
        if not any(line.startswith("η_t") for line in given):
            given = ["η_t = 1", *given]
        value = "(1 − exp(−η λ_t))/λ_t" if self.step == "exact" else f"η/(λ_t + {self.eps:g})"
        return [*given, f"then η_t = {value} of this η, λ_t = ‖k_t‖²"]

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        eta = gates.eta if gates.eta.ndim + 1 == views.k.ndim else gates.eta.unsqueeze(-1)  # of every pair
        size = views.k.to(eta.dtype).square().sum(-1)
        if self.step == "projection":
            return views, gates._replace(eta=eta / (size + self.eps)), state
        turn = eta * size
        # near 0 the derivative of the quotient cancels, and at the least numbers it is NaN
        small = turn.abs() < torch.finfo(turn.dtype).eps ** 0.5
        safe = torch.where(small, 1, turn)
        factor = torch.where(small, 1 - turn / 2, -torch.expm1(-safe) / safe)
        return views, gates._replace(eta=eta * factor), state
