"""Gradient descent with momentum, Nesterov's look-ahead, decay towards zero or towards W0: every linear rule with gates
per token."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_number
from metattt.modules import affine, step_bias
from metattt.optimizers.base import Gates
from metattt.optimizers.gradient_descent import SHARING, GradientDescent
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors

TAKEN = ("mini_batch_size", "anchor", "read", "steps", "base_lr", "lr", "lr_scale", "compute_chunk")
"""The settings of `GradientDescent` except token steps and clipping, which exclude gates."""


@register(group="optimizer", name="momentum")
class Momentum(GradientDescent, takes=TAKEN):
    """`S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`, with gates that are constant or learned from the
    token.

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`.
        momentum: the source of β: `none` (β = 0), `constant`, or σ(θ_β x + c) `per_head` or `shared` by the heads.
        momentum_init: β, or its initial value.
        nesterov: write `β_t S_t − η_t G_t`, the step after the next one, instead of `S_t`.
        decay: the source of α: `none` (α = 1), `constant`, `per_head`, `shared`; `softplus` is exp(−A_h softplus(θ x
            + c)) with A learned per head (Gated DeltaNet, arXiv 2412.06464, as its released code begins: A uniform in 0
            to 16, softplus(c) log-uniform in 0.001 to 0.1); `retnet` fixes 1 − 2^(−5−h) for
            head h (arXiv 2307.08621, Sec. 2.3); `mamba2` ties both gates, η = Δ_t and α = exp(−Δ_t a_h) with Δ_t =
            softplus(θ x + c) (arXiv 2405.21060, Sec. 7.1, a from 1 to 16), independent of `base_lr`, `lr` and
            `lr_scale`.
        decay_init: α, or its initial value, where it is constant or a sigmoid's.
        decay_to_init: decay towards W0 instead of zero.
        write, write_init: κ, likewise; `none` is 1.
        gradient_at: with anchor `online`: take the gradient at `W_{t−1}` (`previous`) or at `α_t W_{t−1}` (`decayed`,
            Gated DeltaNet).

    Raises:
        MetaTTTError: a value that is not allowed or has no meaning, Nesterov without momentum, or `decay_to_init`
            without decay.
    """

    momentum: Literal["none", "constant", "shared", "per_head"] = setting(default="per_head", fixed=True)
    momentum_init: float = setting(default=0.9, fixed=True)
    nesterov: bool = setting(default=False)
    decay: Literal["none", "constant", "shared", "per_head", "softplus", "retnet", "mamba2"] = setting(
        default="none", fixed=True
    )
    decay_init: float = setting(default=0.99, fixed=True)
    decay_to_init: bool = setting(default=False)
    gradient_at: Literal["previous", "decayed"] = setting(default="previous")
    write: Literal["none", "constant", "shared", "per_head"] = setting(default="none", fixed=True)
    write_init: float = setting(default=0.5, fixed=True)

    def configure(self) -> None:
        super().configure()
        if self.decay == "mamba2":
            self.lr, self.follows_base_lr = "constant", False  # Δ is the step size
        self.has_momentum = self.momentum != "none"

    def check_settings(self) -> None:
        check_gate("momentum_init", self.momentum, self.momentum_init)
        check_gate("decay_init", self.decay, self.decay_init)
        check_gate("write_init", self.write, self.write_init)
        super().check_settings()
        if self.nesterov and self.momentum == "none":
            raise MetaTTTError("optimizer.nesterov=true needs momentum, and optimizer.momentum=none has none")
        if self.decay == "mamba2" and not self.base_lr > 0:
            raise MetaTTTError(
                f"optimizer.base_lr={self.base_lr} has no meaning with optimizer.decay=mamba2, whose step size is Δ: "
                "leave it out"
            )
        if self.decay_to_init and self.decay == "none":
            raise MetaTTTError(
                "optimizer.decay_to_init=true says where weights decay to, and optimizer.decay=none does not decay them"
            )

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.momentum_gate = Gate(self.momentum, self.momentum_init, dim, num_heads)
        self.decay_gate = Gate(self.decay, self.decay_init, dim, num_heads)
        self.write_gate = Gate(self.write, self.write_init, dim, num_heads)

    def equations(self) -> list[str]:
        if self.decay == "mamba2":
            lines = ["η_t = softplus(θ_η x_t + c_η), θ and c of each head", "α_t = exp(−η_t a), a of each head"]
        else:
            lines = [*super().equations(), *self.decay_gate.equations("α")]
        return [*lines, *self.momentum_gate.equations("β"), *self.write_gate.equations("κ")]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        eta, alpha = self.decay_gate.step(x) if self.decay == "mamba2" else (gates.eta, self.decay_gate(x))
        beta = None if self.momentum == "none" else self.momentum_gate(x)
        return Gates(eta, alpha, beta, None if self.write == "none" else self.write_gate(x)), state


def check_gate(key: str, source: str, value: float) -> None:
    """Raises an error for an initial value of β or α that a gate from this source cannot have.

    Raises:
        MetaTTTError: a value outside of 0 and 1; or one of the two, where it is a sigmoid's.
    """
    if source == "constant":  # may be 0 or 1 exactly
        check_number(f"optimizer.{key}", value, least=0, most=1)
    else:
        check_number(f"optimizer.{key}", value, above=0, below=1)


STEPS = (0.001, 0.1)  # of the initial Δ of Mamba-2 and of Gated DeltaNet
RATES = {"softplus": (0.0, 16.0), "mamba2": (1.0, 16.0)}  # of the initial A of both
LEAST_RATE = 1e-6  # of what is drawn from 0 on: its logarithm is learned


class Gate(nn.Module):
    """A number between 0 and 1 per token and head; None if there is no such gate."""

    def __init__(self, source: str, initial: float, dim: int, num_heads: int):
        super().__init__()
        self.source, self.initial, self.num_heads = source, initial, num_heads
        if source in ("shared", "per_head", *RATES):
            heads = 1 if source == "shared" else num_heads
            self.weight = nn.Parameter(torch.randn(heads, dim) * 0.02)
            start = (
                step_bias(heads, *STEPS) if source in RATES else torch.full((heads,), math.log(initial / (1 - initial)))
            )
            self.bias = nn.Parameter(start)
        if source in RATES:
            least, most = RATES[source]
            self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(least, most).clamp(min=LEAST_RATE).log())

    def extra_repr(self) -> str:
        return f"{self.source!r}"

    def equations(self, symbol: str) -> list[str]:
        """The equation of the gate, if there is one."""
        learned = f"{symbol}_t = σ(θ_{symbol} x_t + c_{symbol})"
        start = f"{self.initial:g} at the start"
        known = {
            "none": [],
            "constant": [f"{symbol}_t = {self.initial:g}"],
            "softplus": [f"{symbol}_t = exp(−A softplus(θ_{symbol} x_t + c_{symbol})), θ, c and A of each head"],
            "mamba2": [f"{symbol}_t = exp(−Δ_t a), Δ_t = softplus(θ_Δ x_t + c_Δ), θ, c and a of each head"],
            "retnet": [f"{symbol}_t = 1 − 2^(−5−h) in head h = 0…{self.num_heads - 1}"],
            **{sharing: [f"{learned}, {words}; {start}"] for sharing, words in SHARING.items()},
        }
        return known.get(self.source, [f"{symbol}_t: {self.source}, of the token"])

    def logit(self, x: Tensor) -> Tensor:
        """`θ x + c` in fp32 or wider: `[B, T, D]` to `[B, H or 1, T]`."""
        return affine(x, self.weight, self.bias).mT

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Δ = softplus(θ x + c) and exp(−Δ a) of each token, `[B, H, T]`."""
        step = F.softplus(self.logit(x))
        return step, torch.exp(-step * self.log_rate.to(step.dtype).exp().view(-1, 1))

    def forward(self, x: Tensor) -> Tensor | None:
        """The gate of each token, `[B, H, T]`."""
        shape = (x.shape[0], self.num_heads, x.shape[1])
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        if self.source == "constant":
            return x.new_full((1, 1, 1), self.initial, dtype=accum_dtype).expand(shape)
        if self.source == "softplus":
            return self.step(x)[1].expand(shape)
        if self.source == "retnet":
            # Not a buffer: a narrower type would round it to 1, and `to_empty` would drop its values.
            kept = (1 - x.new_full((self.num_heads,), 0.5, dtype=accum_dtype).cumprod(0) / 16).view(1, -1, 1)
            return kept.expand(shape)
        if self.source in ("shared", "per_head"):
            return torch.sigmoid(self.logit(x)).expand(shape)
        return None
