"""Gradient descent with a diagonal preconditioner: steps are longer along channels that the keys have used little."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice, check_number
from metattt.ops.chunk import running_sum
from metattt.optimizers.base import Gates, Read
from metattt.optimizers.momentum import Gate, Momentum
from metattt.registry import register
from metattt.state import Context, Tensors
from metattt.tasks.base import Views

CHUNK = 64  # tokens whose curvature is summed up by one matrix product
EPS = 1e-6  # added to the curvature before its logarithm, as in the released code


@register(group="optimizer", name="preconditioned")
class Preconditioned(Momentum):
    """`W_t = α_t W_{t−1} − η_t (M_t ∘ k_t)ᵀ E_t` with the curvature `A_t = γ_t A_{t−1} + β_t k_t²` of every input
    channel and `M_t = squash^(−r/(1 + |r|))`, `r = log(A_t + ε) − c_h` (preconditioned Gated DeltaNet, arXiv
    2604.21100): steps between 1/squash and squash times as long as without.

    Args:
        read, base_lr, lr, lr_scale, decay, decay_init, gradient_at, compute_chunk: see `Momentum`.
        squash: the largest factor of a step; above 2 the rule may be unstable.
        centre_init: initial value of c, learned per head: the logarithm of the curvature at which a step is as it was.
        curvature_decay: where γ comes from, a gate per head: `per_head` or `softplus`, as `decay`.
        curvature_decay_init: initial value of γ, where it is a sigmoid's.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    fixed: tuple[str, ...] = (*Momentum.fixed, "centre_init", "curvature_decay", "curvature_decay_init")

    def __init__(
        self,
        read: Read = "inclusive",
        base_lr: float = 1.0,
        lr: Literal["per_head", "shared", "constant"] = "per_head",
        lr_scale: Literal["head_dim", "none"] = "none",
        decay: Literal["none", "constant", "shared", "per_head", "softplus", "retnet", "mamba2"] = "softplus",
        decay_init: float = 0.99,
        gradient_at: Literal["previous", "decayed"] = "decayed",
        squash: float = 1.5,
        centre_init: float = -0.2,
        curvature_decay: Literal["per_head", "softplus"] = "softplus",
        curvature_decay_init: float = 0.99,
        compute_chunk: int | None = None,
    ):
        super().__init__(
            mini_batch_size=1,
            anchor="online",
            read=read,
            base_lr=base_lr,
            lr=lr,
            lr_scale=lr_scale,
            momentum="none",
            decay=decay,
            decay_init=decay_init,
            gradient_at=gradient_at,
            compute_chunk=compute_chunk,
        )
        check_choice("optimizer.curvature_decay", curvature_decay, ("per_head", "softplus"))
        check_number("optimizer.squash", squash, above=1)
        check_number("optimizer.centre_init", centre_init)
        check_number("optimizer.curvature_decay_init", curvature_decay_init, above=0, below=1)
        self.squash, self.centre_init, self.curvature_decay_init = squash, centre_init, curvature_decay_init
        self.curvature_decay_from = curvature_decay

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.centre = nn.Parameter(torch.full((num_heads,), self.centre_init))
        self.curvature_decay = Gate(self.curvature_decay_from, self.curvature_decay_init, dim, num_heads)
        self.curvature_step = Gate("per_head", 0.5, dim, num_heads)

    def equations(self) -> list[str]:
        return [
            *super().equations(),
            *self.curvature_decay.equations("γ"),
            "A_t = γ_t A_{t−1} + ω_t k_t², ω_t = σ(θ_ω x_t + c_ω), of each head",
            f"M_t = {self.squash:g}^(−r/(1 + |r|)), r = log(A_t + ε) − c, c of each head",
            "p_t = k_t, and then k_t ← M_t ∘ k_t",
        ]

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        if views.k.ndim != 4:
            raise MetaTTTError(
                "optimizer=preconditioned sums the curvature of one key a token, and this task gives several pairs a token: "
                "set another task, or another optimizer"
            )
        gamma, omega = self.curvature_decay(x), self.curvature_step(x)
        if ctx.valid is not None:
            real = ctx.valid.unsqueeze(1)
            gamma, omega = torch.where(real, gamma, 1.0), torch.where(real, omega, 0.0)
        if ctx.first is not None:
            gamma = torch.where(ctx.first.unsqueeze(1), 0.0, gamma)
        k = views.k.to(gamma.dtype)
        curvature = running_sum(gamma, omega.unsqueeze(-1) * k.square(), state.get("curvature"), CHUNK)
        distance = torch.log(curvature + EPS) - self.centre.to(k.dtype).view(-1, 1, 1)
        factor = self.squash ** (-distance / (1 + distance.abs()))
        erased = views.k if views.p is None else views.p
        views = views._replace(k=(k * factor).to(views.k.dtype), p=erased)
        last = curvature[:, :, -1].clone()  # a state must not hold on to a whole call
        return views, gates, {**state, "curvature": last}
