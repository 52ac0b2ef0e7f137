"""Online gradient descent on weights that decay channel by channel: the gates of GLA, HGRN2, Kimi Delta Attention,
Gated DeltaNet-2 and RWKV-7."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.modules import affine, step_bias
from metattt.optimizers.base import Gates
from metattt.optimizers.gradient_descent import StepSize
from metattt.optimizers.momentum import STEPS
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors
from metattt.tasks.base import Views


@register(group="optimizer", name="channel_decay")
class ChannelDecay(StepSize, takes=("read", "base_lr", "lr", "lr_scale", "compute_chunk")):
    """`W_t = Diag(a_t) W_{t−1} − η_t G_t` with a decay `a_t` from 0 to 1 for every input channel of a linear learner,
    learned from the token: `z = f(x) + c` is a projection, of low rank if `rank` is set.

    Args:
        read, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`; the gradient is taken token by token.
        decay: `softplus` a = exp(−A_h softplus(z)), A_h learned per head (Kimi Delta Attention, arXiv 2510.26692, as in
            Mamba-2); `sigmoid` a = σ(z)^(1/temperature) (GLA, arXiv 2312.06635); `bounded` a = exp(−strongest · σ(z))
            (RWKV-7, arXiv 2503.14456).
        rank: of the projection; `head_dim`: the width of a head; null: full.
        tanh: between the two maps of a low-rank projection.
        temperature: of `sigmoid`; 16 in GLA.
        lower_bound: of `sigmoid`: a = l + (1 − l) σ(z)^(1/temperature) (HGRN2, arXiv 2404.07904).
        strongest: of `bounded`: the logarithm of the smallest decay; e^(−1/2) in RWKV-7.
        gradient_at: the gradient is taken at the decayed weights (`decayed`), or at those before (`previous`).
        tied: the key is multiplied by 1 − a, `k ∘ (1 − a)` (HGRN2).

    Raises:
        MetaTTTError: a value that is not allowed, or has no meaning with the others.
    """

    mini_batch_size = 1
    anchor = "online"
    lr_scale = "none"
    decay: Literal["softplus", "sigmoid", "bounded"] = setting(default="softplus", fixed=True)
    rank: int | Literal["head_dim"] | None = setting(
        default=None, fixed=True, advice=", head_dim, or null for a full projection"
    )
    tanh: bool = setting(default=False)
    temperature: float = setting(default=1.0, above=0)
    lower_bound: float = setting(default=0.0, least=0, below=1)
    strongest: float = setting(default=0.6065306597126334, above=0)
    gradient_at: Literal["previous", "decayed"] = setting(default="decayed")
    tied: bool = setting(default=False)

    def check_settings(self) -> None:
        super().check_settings()
        if self.tanh and self.rank is None:
            raise MetaTTTError(
                "optimizer.tanh=true lies between the two maps of a low-rank projection: set optimizer.rank"
            )
        if self.decay != "sigmoid" and (self.temperature != 1 or self.lower_bound):
            raise MetaTTTError(
                f"optimizer.temperature and optimizer.lower_bound are of decay=sigmoid, not {self.decay}: leave them "
                "out"
            )

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        inner = dim if self.rank is None else head_dim if self.rank == "head_dim" else int(self.rank)
        width = num_heads * head_dim  # of all heads
        self.down = None if self.rank is None else nn.Parameter(torch.randn(inner, dim) * 0.02)
        self.up = nn.Parameter(torch.randn(width, inner) * 0.02)
        if self.decay == "softplus":
            self.bias = nn.Parameter(step_bias(width, *STEPS))  # as in Mamba-2
            self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        elif self.decay == "bounded":
            # From slow channels to fast ones, as RWKV-7's first block begins: decays from 0.999 to 0.9 a token.
            self.bias = nn.Parameter(-6.5 + 5 * torch.linspace(0, 1, width) ** 0.85)
        else:
            self.bias = nn.Parameter(torch.zeros(width))

    def equations(self) -> list[str]:
        hidden = f"U {'tanh(V x_t)' if self.tanh else 'V x_t'}"
        rank = "d" if self.rank == "head_dim" else self.rank
        where = (
            "s_t = θ_a x_t + c_a"
            if self.rank is None
            else f"s_t = {hidden} + c_a, V to {rank} features and U to all channels"
        )
        power = "" if self.temperature == 1 else f"^(1/{self.temperature:g})"
        low = f"{self.lower_bound:g} + {1 - self.lower_bound:g} " if self.lower_bound else ""
        decay = {
            "softplus": "exp(−A softplus(s_t)), A of each head",
            "bounded": f"exp(−{self.strongest:.10g} σ(s_t))",
            "sigmoid": f"{low}σ(s_t){power}",
        }[self.decay]
        tied = ["k_t ← k_t ∘ (1 − a_t)"] if self.tied else []
        return [*super().equations(), f"a_t = {decay}", where, *tied]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        hidden = x if self.down is None else affine(x, self.down)
        logit = affine(torch.tanh(hidden) if self.tanh else hidden, self.up, self.bias)
        logit = logit.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, d]
        if self.decay == "softplus":
            decay = -self.log_rate.to(logit.dtype).exp().view(-1, 1, 1) * F.softplus(logit)
        elif self.decay == "bounded":
            decay = -self.strongest * torch.sigmoid(logit)
        else:
            decay = F.logsigmoid(logit) / self.temperature
            if self.lower_bound:
                low = logit.new_tensor(self.lower_bound)
                decay = torch.logaddexp(low.log(), torch.log1p(-low) + decay)
        return gates._replace(decay=decay), state

    def prepare(
        self, views: Views, gates: Gates, x: Tensor, state: Tensors, ctx: Context
    ) -> tuple[Views, Gates, Tensors]:
        assert gates.decay is not None
        if gates.decay.shape[-1] != views.k.shape[-1]:
            raise MetaTTTError(
                f"optimizer=channel_decay decays the {gates.decay.shape[-1]} channels of a head, and the task's keys "
                f"have {views.k.shape[-1]}: set task.degree=1"
            )
        if self.tied:
            write = -torch.expm1(gates.decay).to(views.k.dtype)
            views = views._replace(k=views.k * (write if views.k.ndim == 4 else write.unsqueeze(3)))
        return views, gates, state
