"""Which combinations the kernels of TTT-MLP on the CPU compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from metattt.kernels.base import linear_rule
from metattt.learners.base import Learner
from metattt.learners.mlp import MLP
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


def uncovered(task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
    """Why this is not `x + LN(gelu(xW₁ + b₁)W₂ + b₂)` with squared error under a linear rule, or None if it is."""
    same = all(
        getattr(type(learner), name) is getattr(MLP, name) for name in ("forward", "predict", "wrap", "mixes_tokens")
    )
    if not (isinstance(learner, MLP) and same and learner.depth == 2 and learner.residual and learner.norm):
        return "the learner is not x + LN(MLP of two layers)"
    if learner.activation != "gelu_tanh":
        return f"learner.activation={learner.activation}"
    if set(learner.init) not in ({"w1", "w2"}, {"w1", "b1", "w2", "b2"}) or set(learner.slow) != {
        "norm_scale",
        "norm_bias",
    }:
        return "the learner has other weights"
    if not task.squared_error:
        return "the loss is not ½‖f(k) − v‖²"
    return linear_rule(optimizer)


def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """`x + LN(gelu(xW₁ + b₁)W₂ + b₂)`; see `Kernel.function`."""
    z = x
    for layer in ("1", "2"):
        z = (z if layer == "1" else F.gelu(z, approximate="tanh")) @ weights[f"w{layer}"]
        if f"b{layer}" in weights:
            z = z + weights[f"b{layer}"].unsqueeze(2)
    return (
        x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * slow["norm_scale"].unsqueeze(1) + slow["norm_bias"].unsqueeze(1)
    )
