"""A multi-layer perceptron of any depth, width and activation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register
from metattt.setting import setting

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}

MAX_DEPTH = 1000  # a larger depth is a mistake that would otherwise be noticed late


@register(group="learner", name="mlp")
class MLP(Learner):
    """`depth` linear maps with an activation between them; depth 2 with norm and residual is TTT-MLP (arXiv 2407.04620,
    Sec. 2.7).

    Args:
        depth: number of linear maps.
        expansion: hidden width as a multiple of the head width.
        activation: one of `ACTIVATIONS`.
        bias: a bias in every map.
        init: of the matrices: `normal` N(0, 0.02²), or `xavier` uniform per head.
        learn_init: train W0. False keeps the random W0 it starts with: all zeros would be a saddle point where no
            gradient flows.
    """

    residual = True
    norm = True
    depth: int = setting(default=2, most=MAX_DEPTH, fixed=True)
    expansion: float = setting(default=4.0, above=0, fixed=True)
    activation: str = setting(default="gelu_tanh", among=ACTIVATIONS)
    with_bias: bool = setting(default=True, alias="bias", fixed=True)
    drawn: Literal["normal", "xavier"] = setting(default="normal", alias="init", fixed=True)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        widths = [d_in, *[max(1, round(self.expansion * d_in))] * (self.depth - 1), d_out]
        weights = {}
        for i, shape in enumerate(itertools.pairwise(widths), start=1):
            weights[f"w{i}"] = Weight(shape, bound=math.sqrt(6 / sum(shape)) if self.drawn == "xavier" else None)
            if self.with_bias:
                weights[f"b{i}"] = Weight(shape[1:], std=0.0)
        return weights

    def equations(self) -> list[str]:
        value = "x"
        for i in range(1, self.depth + 1):
            value = f"{value} W{i}" + (f" + b{i}" if self.with_bias else "")
            if i < self.depth:
                value = f"({value})" if self.activation == "identity" else f"{self.activation}({value})"
        return [f"f(x; W) = {self.wrapped(value)}"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        for i in range(1, self.depth + 1):
            x = w.linear(x, f"w{i}", f"b{i}" if self.with_bias else None)
            if i < self.depth:
                x = ACTIVATIONS[self.activation](x)
        return x
