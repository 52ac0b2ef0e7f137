"""The gated network of LaCT and of modern transformers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="swiglu")
class SwiGLU(Learner):
    """`f(x) = (silu(x W0) ∘ (x W2)) W1` (LaCT, arXiv 2505.23884, with its names), without biases.

    Args:
        expansion: hidden width as a multiple of the head width.
        residual, norm: use `x + LN(f(x))`; LaCT uses neither.
        learn_init: train W0. False keeps the random weights it starts with.
    """

    expansion: float = setting(default=2.0, above=0, fixed=True)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        hidden = max(1, round(self.expansion * d_in))
        shapes = {"w0": (d_in, hidden), "w1": (hidden, d_out), "w2": (d_in, hidden)}
        layers = {"w0": "1", "w1": "2", "w2": "1"}
        return {name: Weight(shape, std=shape[0] ** -0.5, layer=layers[name]) for name, shape in shapes.items()}

    def equations(self) -> list[str]:
        return [f"f(x; W) = {self.wrapped('(silu(x W0) ∘ (x W2)) W1')}"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(F.silu(w.linear(x, "w0")) * w.linear(x, "w2"), "w1")
