"""The gated network of ViT³: a product of two linear maps, one of them through silu."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register


@register(group="learner", name="glu")
class GLU(Learner):
    """`f(x) = (x W1) ∘ silu(x W2)` (ViT³, arXiv 2512.01643), without biases.

    Args:
        residual, norm: use `x + LN(f(x))`; ViT³ uses neither.
        learn_init: train W0. False keeps the random weights it starts with.
    """

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {name: Weight((d_in, d_out), layer="1") for name in ("w1", "w2")}

    def equations(self) -> list[str]:
        return [f"f(x; W) = {self.wrapped('(x W1) ∘ silu(x W2)')}"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x, "w1") * F.silu(w.linear(x, "w2"))
