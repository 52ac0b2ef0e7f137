"""The learner that all kernels of TTT-MLP compute: `f(x) = x + LN(gelu(xW₁ + b₁)W₂ + b₂)` (arXiv 2407.04620, Sec.
2.7)."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from metattt.kernels.residual import ResidualKernel, affine, residual
from metattt.learners.base import Learner
from metattt.learners.mlp import MLP
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


class TTTMLPKernel(ResidualKernel):
    """Of any device."""

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
