"""A step per call whose length is bounded: the rule of ViT³."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.memory import Memory
from metattt.modules import expand_like, length
from metattt.optimizers.base import Gates, Read
from metattt.optimizers.block import BlockRule
from metattt.registry import register
from metattt.state import WHOLE_CALL, Context, Tensors


@register(group="optimizer", name="bounded")
class Bounded(BlockRule):
    """`W_j = W_{j−1} + U_j/(‖U_j‖ + 1)`, U_j the mean of `−η_s G_s` over mini-batch j and ‖·‖ the norm over the weights
    into one output (ViT³, arXiv 2512.01643, whose mini-batch is an image).

    Args:
        mini_batch_size, anchor, read, steps, base_lr, lr, lr_scale, compute_chunk: see `GradientDescent`.
    """

    counts = True
    mini_batch_size = WHOLE_CALL
    read: Read = "final"
    lr = "constant"
    lr_scale = "none"

    def equations(self) -> list[str]:
        *eta, step = super().equations()
        mean = "M_j = U_j/n, n the tokens of mini-batch j"
        return [*eta, step, mean, "W_j = W_{j−1} + M_j/(‖M_j‖ + 1), ‖·‖ over the weights into one output"]

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(kappa=torch.ones_like(gates.eta)), state  # 0 at padding, which does not count

    def move(self, memory: Memory, alpha: Tensor | None, beta: Tensor | None) -> Memory:
        count = memory["pool"]["count"].clamp(min=1)
        after = {}
        for name, weight in memory["commit"].items():
            mean = memory["update"][name] / expand_like(count, weight)
            inputs = tuple(range(2, mean.ndim - 1)) or (-1,)  # a vector is taken as a whole
            after[name] = weight + mean / (length(mean, inputs) + 1)
        return {"commit": after}
