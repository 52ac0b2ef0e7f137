"""The rule of learners whose state is the data itself: keep every token, or weight it and forget the past."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.modules import affine
from metattt.optimizers.base import InnerOptimizer
from metattt.optimizers.momentum import Gate, check_gate
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors

MOST_LEVELS = 63  # bits of a position


@register(group="optimizer", name="append")
class Append(InnerOptimizer, takes=()):
    """No gradient and no weights: the learner adds each token to its data, with weight `write_t`, after it has
    multiplied what it holds by `keep_t`. Without gates both are 1.

    Args:
        write: the source of the weight of a token: `none` (1), σ(θ x + c) `per_head` or `shared` by the heads, or
            `step`: Δ_t of decay=mamba2.
        write_init: its initial value.
        decay: the source of `keep`: `none` (1), `constant`, σ(θ x + c) `per_head` or `shared`; `softplus` as in
            `Momentum`; `retnet` fixes 1 − 2^(−5−h) for head h (arXiv 2307.08621, Sec. 2.3); `mamba2` is exp(−Δ_t a_h),
            with Δ_t = softplus(θ x + c) (arXiv 2405.21060).
        decay_init: its initial value.
        levels: n, the weights `λ_t = softplus(l ∘ θ x)` of the n levels of a hierarchical state in what token t reads
            (arXiv 2506.04761); 0: none.
        channels, temperature: n and τ of decays σ(θ x)^(1/τ) of the n channels of a memory; `head_dim`: as many as a
            head is wide; 0: none.
        blend, blend_init: as `write`, of α: the share of the learner's solution in the query that a token reads with.

    Raises:
        MetaTTTError: an unknown source, an initial value that is not between 0 and 1, write=step without decay=mamba2,
            or a number of levels that is not 0 or from 2 to 63.
    """

    updates = False
    mini_batch_size = 1
    write: Literal["none", "shared", "per_head", "step"] = setting(default="none", fixed=True)
    write_init: float = setting(default=0.5, above=0, below=1, fixed=True)
    decay: Literal["none", "constant", "shared", "per_head", "softplus", "retnet", "mamba2"] = setting(
        default="none", fixed=True
    )
    decay_init: float = setting(default=0.99, fixed=True)
    levels: int = setting(default=0, least=0, most=MOST_LEVELS, fixed=True)
    channels: int | Literal["head_dim"] = setting(default=0, least=0, fixed=True, advice=", or head_dim")
    temperature: float = setting(default=8.0, above=0)
    blend: Literal["none", "shared", "per_head"] = setting(default="none", fixed=True)
    blend_init: float = setting(default=0.5, above=0, below=1, fixed=True)

    def check_settings(self) -> None:
        check_gate("decay_init", self.decay, self.decay_init)
        super().check_settings()
        if self.write == "step" and self.decay != "mamba2":
            raise MetaTTTError(
                f"optimizer.write=step is the step size of optimizer.decay=mamba2, not of {self.decay}: set one of them"
            )
        if self.levels == 1:
            raise MetaTTTError("optimizer.levels=1 has no level for the tokens before the last: set 0, or 2 and more")

    def equations(self) -> list[str]:
        """The gates of the data; the learner uses them."""
        lines = ["write_t = Δ_t"] if self.write == "step" else self.write_gate.equations("write")
        lines += self.decay_gate.equations("keep") + self.blend_gate.equations("blend")
        if self.levels:
            lines.append(f"λ_t^ℓ = softplus(s^ℓ θ^ℓ x_t) of each head, ℓ = 0 … {self.levels - 1}")
        if self.channels:
            lines.append(f"a_t = σ(θ_a x_t)^(1/{self.temperature:g}) of each head and channel")
        return lines

    @property
    def data_gates(self) -> Mapping[str, str]:
        """Its gates (`write`, `keep`, `levels`, `decay`, `blend`), each with the override that turns it off."""
        off = {"write": ("write", "none"), "keep": ("decay", "none"), "levels": ("levels", 0), "decay": ("channels", 0)}
        off["blend"] = ("blend", "none")
        return {name: f"optimizer.{key}={value}" for name, (key, value) in off.items() if getattr(self, key) != value}

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.write_gate = Gate("none" if self.write == "step" else self.write, self.write_init, dim, num_heads)
        self.decay_gate = Gate(self.decay, self.decay_init, dim, num_heads)
        self.blend_gate = Gate(self.blend, self.blend_init, dim, num_heads)
        if self.levels:
            self.level_weight = nn.Parameter(torch.randn(num_heads, self.levels, dim) * 0.02)
            self.level_scale = nn.Parameter(torch.ones(num_heads, self.levels))
        if self.channels:
            count = head_dim if self.channels == "head_dim" else int(self.channels)
            self.channel_weight = nn.Parameter(torch.randn(num_heads, count, dim) * 0.02)

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[DataGates, Tensors]:
        write, keep = self.write_gate(x), self.decay_gate(x)
        if self.decay == "mamba2":
            step, keep = self.decay_gate.step(x)
            write = step if self.write == "step" else write
        if write is None:
            write = x.new_ones(x.shape[0], 1, x.shape[1])
        levels = decay = None
        if self.levels:
            logit = affine(x.unsqueeze(1), self.level_weight)  # [B, H, T, n], as is that of decays
            levels = F.softplus(self.level_scale.to(logit.dtype).unsqueeze(1) * logit)
        if self.channels:
            decay = F.logsigmoid(affine(x.unsqueeze(1), self.channel_weight)) / self.temperature
        return DataGates(write, keep, levels, decay, self.blend_gate(x)), state
