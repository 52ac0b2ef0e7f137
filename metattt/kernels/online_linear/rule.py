"""The rules that the kernels of this folder compute, on every device, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metattt.inner.tokens import Tokens
from metattt.kernels.base import Kernel, linear_rule
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


class OnlineLinear(Kernel):
    """Which combinations all kernels of this folder compute: the squared loss, by which what was written for a key is
    erased."""

    anchor = "online"
    erases = True

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        if task.together:
            return "several pairs meet the same weights"
        return linear_rule(optimizer, "online", ("inclusive", "exclusive"))

    @staticmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        (w,) = weights.values()
        return x @ w


class OnlineDot(OnlineLinear):
    """The dot product's loss, by which nothing is erased."""

    erases = False

    @staticmethod
    def loss(prediction: Tensor, v: Tensor) -> Tensor:
        return -(prediction * v).sum(-1)


def prepared(tokens: Tokens) -> tuple[Tensor | None, ...]:
    """k, v, q, p, b, η and the decays of tokens, as `naive.online_linear` takes them."""
    views, gates = tokens.apart()
    eta = gates.eta if gates.kappa is None else gates.eta * gates.kappa
    return *views[:5], eta, gates.alpha if gates.decay is None else gates.decay.exp()
