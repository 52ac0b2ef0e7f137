"""The functions `f(x) = x + LN(z(x))` (arXiv 2407.04620, Sec. 2.7) that kernels compute with squared error, on every
device, and which combinations they cover."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from metattt.kernels.base import Kernel
from metattt.learners.base import Learner
from metattt.learners.linear import Linear
from metattt.learners.mlp import MLP
from metattt.optimizers.base import InnerOptimizer
from metattt.optimizers.checks import linear_rule
from metattt.tasks.base import Task

OWN = ("forward", "predict", "wrap", "mixes_tokens")  # what makes a learner the function that it is


class ResidualKernel(Kernel):
    """One operation on every device; a subclass says which."""

    learner: type[Learner]  #: whose `forward` and the rest of `OWN` must be unchanged
    formula: str  #: of the learner, as messages show it

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        same = all(getattr(type(learner), name) is getattr(self.learner, name) for name in OWN)
        if not (isinstance(learner, self.learner) and same and learner.residual and learner.norm):
            return f"the learner is not {self.formula}"
        names = set(learner.init)
        if names not in (set(self.weights), set(self.weights[::2])) or set(learner.slow) != {"norm_scale", "norm_bias"}:
            return "the learner has other weights"
        if not task.squared_error:
            return "the task does not say that its loss is ½‖f(k) − v‖² (squared_error = True)"
        return linear_rule(optimizer)


def affine(x: Tensor, weights: Mapping[str, Tensor], layer: int) -> Tensor:
    """`xW + b` of a layer, with or without b."""
    z = x @ weights[f"w{layer}"]
    return z + weights[f"b{layer}"].unsqueeze(2) if f"b{layer}" in weights else z


def residual(x: Tensor, z: Tensor, slow: Mapping[str, Tensor]) -> Tensor:
    """`x + LN(z)`."""
    scale, shift = slow["norm_scale"].unsqueeze(1), slow["norm_bias"].unsqueeze(1)
    return x + F.layer_norm(z, z.shape[-1:], eps=1e-6) * scale + shift


class TTTLinearKernel(ResidualKernel):
    weights = ("w1", "b1")
    learner = Linear
    formula = "x + LN(xW + b)"

    @staticmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return residual(x, affine(x, weights, 1), slow)


class TTTMLPKernel(ResidualKernel):
    weights = ("w1", "b1", "w2", "b2")
    learner = MLP
    formula = "x + LN(MLP of two layers)"

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        if isinstance(learner, MLP) and learner.depth != 2:
            return f"the learner is not {self.formula}"
        if isinstance(learner, MLP) and learner.activation != "gelu_tanh":
            return f"learner.activation={learner.activation}"
        return super().reason_not_covered(task, learner, optimizer)

    @staticmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return residual(x, affine(F.gelu(affine(x, weights, 1), approximate="tanh"), weights, 2), slow)
