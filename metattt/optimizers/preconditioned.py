"""Gradient descent with a diagonal preconditioner: steps are longer along channels that keys have rarely used."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.ops.chunk import running_sum
from metattt.optimizers.base import Gates
from metattt.optimizers.channel_decay import ChannelDecay
from metattt.optimizers.momentum import RATES, Gate, Momentum
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views

CHUNK = 64  # tokens whose curvature is summed up by one matrix product
EPS = 1e-6  # added to the curvature before its logarithm, as in the released code
Decay = Literal["none", "constant", "shared", "per_head", "softplus", "retnet", "mamba2", "channel"]
TAKEN = ("read", "base_lr", "lr", "lr_scale", "decay", "decay_init", "gradient_at", "compute_chunk")


@register(group="optimizer", name="preconditioned")
class Preconditioned(Momentum, takes=TAKEN):
    """`W_t = α_t W_{t−1} − η_t (M_t ∘ k_t)ᵀ E_t` with the curvature `A_t = γ_t A_{t−1} + β_t k_t²` of every input
    channel and `M_t = squash^(−r/(1 + |r|))`, `r = log(A_t + ε) − c_h` (preconditioned Gated DeltaNet, arXiv
    2604.21100): steps between 1/squash and squash times as long as without.

    Args:
        read, base_lr, lr, lr_scale, decay, decay_init, gradient_at, compute_chunk: see `Momentum`. With decay=channel
            α_t is a decay for every input channel instead, that of optimizer=channel_decay with decay=softplus and
            rank=head_dim (the paper's preconditioned Kimi Delta Attention).
        squash: the largest factor of a step; above 2 the rule may be unstable.
        centre_init: initial value of c, learned per head: the logarithm of the curvature at which a step is unchanged.
        curvature_decay: the source of γ, a gate per head: `per_head` or `softplus`, as `decay` (beside decay=channel
            its A is from 1 to 16 at the start, as in the released code).
        curvature_decay_init: initial value of γ, where it is a sigmoid's.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    mini_batch_size = 1
    anchor = "online"
    lr_scale = "none"
    momentum = "none"
    gradient_at = "decayed"
    decay: Decay = setting(default="softplus", fixed=True)  # type: ignore[assignment]
    squash: float = setting(default=1.5, above=1)
    centre_init: float = setting(default=-0.2, fixed=True)
    curvature_decay_from: Literal["per_head", "softplus"] = setting(
        default="softplus", alias="curvature_decay", fixed=True
    )
    curvature_decay_init: float = setting(default=0.99, above=0, below=1, fixed=True)

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        channels = ChannelDecay(lr="constant", rank="head_dim")
        self.channels = channels.setup(dim, num_heads, head_dim) if self.decay == "channel" else None
        self.centre = nn.Parameter(torch.full((num_heads,), self.centre_init))
        self.curvature_decay = Gate(self.curvature_decay_from, self.curvature_decay_init, dim, num_heads)
        self.curvature_step = Gate("per_head", 0.5, dim, num_heads)
        if self.channels is not None and self.curvature_decay_from == "softplus":
            with torch.no_grad():  # as published for decays of channels
                self.curvature_decay.log_rate.uniform_(*RATES["mamba2"]).log_()

    def equations(self) -> list[str]:
        own = super().equations()
        if self.channels is not None:
            own = [line for line in own if not line.startswith("α_t")] + self.channels.equations()
        return [
            *own,
            *self.curvature_decay.equations("γ"),
            "A_t = γ_t A_{t−1} + ω_t k_t², ω_t = σ(θ_ω x_t + c_ω), of each head",
            f"M_t = {self.squash:g}^(−r/(1 + |r|)), r = log(A_t + {EPS:g}) − c, c of each head",
            "where the task has no p_t it is k_t, and then k_t ← M_t ∘ k_t",
        ]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        given = gates if self.channels is None else self.channels.gates(x, {}, ctx)[0]
        return gates._replace(decay=given.decay), state

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        if views.k.ndim != 4:
            raise MetaTTTError(
                "optimizer=preconditioned sums the curvature of one key a token, and this task gives several pairs a "
                "token: set another task, or another optimizer"
            )
        if self.channels is not None:
            views, gates, state = self.channels.prepare(views, gates, x, state, ctx)
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
        erased = views.k if views.erase_key is None else views.erase_key
        views = views._replace(k=(k * factor).to(views.k.dtype), erase_key=erased)
        last = curvature[:, :, -1].clone()  # a state must not hold on to a whole call
        return views, gates, {**state, "curvature": last}
