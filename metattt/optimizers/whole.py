"""Trains on all tokens of a call, then reads all queries with the final weights: the rule of MTTT for images."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.optimizers.gradient_descent import RATE_ADVICE
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, Tensors


@register(group="optimizer", name="whole")
class WholeSequence(InnerOptimizer, takes=("steps",)):
    """`steps` steps of gradient descent on the tokens of a call; every query reads the final weights (arXiv 2310.13807,
    Sec. 2).

    Args:
        steps: T, inner steps.
        sampling: `full` takes every step on all tokens; `sgd` takes each on one of T parts of a random permutation,
            drawn per head.
        base_lr: η of the loss averaged over the step's tokens and the head width. (Eq. 1 averages over tokens only:
            there it is η/d.)
        seed: of the permutations; None draws new ones from torch's generator at every call.
        compute_chunk: tokens per compute step; memory only.

    Raises:
        MetaTTTError: at a call with `sgd`: tokens that do not divide by T, or padding.
    """

    whole = True

    mini_batch_size = 1
    read = "final"
    sampling: Literal["full", "sgd"] = setting(default="full", fixed=True)
    base_lr: float = setting(default=1.0, advice=RATE_ADVICE)
    seed: int | None = setting(default=None, least=0)
    compute_chunk: int | None = setting(default=2048, most=2**31 - 1, kw_only=True)

    def configure(self) -> None:
        super().configure()
        self.anchor = "batch" if self.sampling == "full" else "minibatch"

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.num_heads, self.head_dim = num_heads, head_dim

    @property
    def chunk(self) -> int:
        return self.compute_chunk or 2048

    def equations(self) -> list[str]:
        over = "all N tokens" if self.sampling == "full" else "those of part i, drawn per head"
        count = "N" if self.sampling == "full" or self.steps == 1 else f"N/{self.steps}"
        eta = f"η = {self.base_lr:g}/(d {count}), N tokens of the call"
        if self.steps == 1:
            return [eta, "W_1 = W_0 − η Σ_s ∇ℓ_s(W_0), s over all N tokens"]
        return [eta, f"W_i = W_{{i−1}} − η Σ_s ∇ℓ_s(W_{{i−1}}), i = 1…{self.steps}, s over {over}"]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        accum_dtype = torch.promote_types(x.dtype, torch.float32)
        count = ctx.lengths.to(accum_dtype) / (self.steps if self.sampling == "sgd" else 1)
        eta = self.base_lr / (self.head_dim * count.clamp(min=1))
        return Gates(eta.view(-1, 1, 1).expand(-1, self.num_heads, x.shape[1])), state

    def permutation(self, count: int, device: torch.device) -> Tensor | None:
        """`[1, H, N]` order in which `sgd` takes the tokens; None for `full`."""
        if self.sampling == "full":
            return None
        if count % self.steps:
            raise MetaTTTError(
                f"{count} tokens do not divide into optimizer.steps={self.steps} parts of equal size: choose a divisor"
            )
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return torch.rand(1, self.num_heads, count, device=device, generator=generator).argsort(-1)
