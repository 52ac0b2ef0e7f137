"""The inner learning rate η of a token, constant or learned from it: what rules of every kind share."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice
from metattt.modules import exact
from metattt.optimizers.base import Anchor, Gates, InnerOptimizer, Read
from metattt.state import Context, Tensors


class StepSize(InnerOptimizer):
    """A rule whose tokens have a step size, `η = η_base · σ(θ_lr x + c)` (arXiv 2407.04620, Sec. 2.7).

    A negative η_base climbs the loss, and 0 leaves the weights as they are.

    Args:
        mini_batch_size, anchor, read, steps, compute_chunk: see `InnerOptimizer`.
        base_lr: η_base, or η itself if `lr` is constant.
        lr: θ_lr `per_head` (as published), `shared` by the heads, or a `constant` η.
        lr_scale: `head_dim` divides η by the head width, as the published models do.

    Raises:
        MetaTTTError: a value that is not allowed.
    """

    def __init__(
        self,
        mini_batch_size: int,
        anchor: Anchor,
        read: Read,
        steps: int,
        base_lr: float,
        lr: Literal["per_head", "shared", "constant"],
        lr_scale: Literal["head_dim", "none"],
        compute_chunk: int | None,
    ):
        super().__init__(mini_batch_size, anchor, read, steps, compute_chunk)
        check_base_lr(base_lr)
        check_choice("optimizer.lr", lr, ("per_head", "shared", "constant"))
        check_choice("optimizer.lr_scale", lr_scale, ("head_dim", "none"))
        self.base_lr, self.lr, self.lr_scale = base_lr, lr, lr_scale

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.num_heads = num_heads
        self.scale = self.base_lr / head_dim if self.lr_scale == "head_dim" else self.base_lr
        if self.lr != "constant":
            heads = num_heads if self.lr == "per_head" else 1
            self.lr_weight = nn.Parameter(torch.randn(heads, dim) * 0.02)
            self.lr_bias = nn.Parameter(torch.zeros(heads))

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.lr == "constant":
            eta = x.new_full((1, 1, 1), self.scale, dtype=wide)
            return Gates(eta.expand(x.shape[0], self.num_heads, x.shape[1])), state
        with exact(x.device.type):
            logit = x.to(wide) @ self.lr_weight.to(wide).mT + self.lr_bias.to(wide)
            eta = self.scale * torch.sigmoid(logit).mT
        return Gates(eta.expand(-1, self.num_heads, -1)), state


def check_base_lr(base_lr: float) -> None:
    """Refuses an η_base that is no number.

    Raises:
        MetaTTTError: NaN, or infinite.
    """
    if not math.isfinite(base_lr):
        raise MetaTTTError(
            f"optimizer.base_lr={base_lr} is not allowed: it must be finite (0 freezes the weights, below 0 climbs the loss)"
        )
