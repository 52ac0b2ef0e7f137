"""The learner that all kernels of TTT-Linear compute: `f(x) = x + LN(xW + b)` (arXiv 2407.04620, Sec. 2.7)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metattt.kernels.residual import ResidualKernel, affine, residual
from metattt.learners.linear import Linear


class TTTLinearKernel(ResidualKernel):
    """Of any device."""

    weights = ("w1", "b1")
    learner = Linear
    formula = "x + LN(xW + b)"

    @staticmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return residual(x, affine(x, weights, 1), slow)
