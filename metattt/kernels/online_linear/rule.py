"""The rules that the kernels of this folder compute, on every device, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from metattt.inner.tokens import Tokens
from metattt.kernels.base import Kernel
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.optimizers.checks import linear_rule
from metattt.tasks.base import Task, dot_product


class OnlineLinear(Kernel):
    """Which combinations all kernels of this folder compute: the squared loss, by which what was written for a key is
    erased."""

    anchor = "online"
    erases = True

    def reason_not_covered(self, task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
        if task.together:
            return "several pairs meet the same weights"
        anywhere = not self.erases and optimizer.anchor == "batch"  # then gradients are the same at all weights
        if optimizer.slots != (("anchor", "weights") if anywhere else ("weights",)):
            return f"the rule carries {', '.join(optimizer.slots)}"
        return linear_rule(optimizer, "batch" if anywhere else "online", ("inclusive", "exclusive"))

    @staticmethod
    def function(weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor) -> Tensor:
        (w,) = weights.values()
        return x @ w


class OnlineDot(OnlineLinear):
    """The dot product's loss, by which nothing is erased."""

    erases = False
    loss = staticmethod(dot_product)


class Pairs(NamedTuple):
    """The tensors of tokens, every pair by itself, as `naive.online_linear` takes them."""

    k: Tensor
    v: Tensor
    q: Tensor
    p: Tensor | None
    b: Tensor | None
    eta: Tensor
    a: Tensor | None


def pairs_of(tokens: Tokens) -> Pairs:
    """η includes κ, since there is no momentum, and a decay is a number from 0 to 1."""
    views, gates = tokens.apart()
    eta = gates.eta if gates.kappa is None else gates.eta * gates.kappa
    decay = gates.alpha if gates.decay is None else gates.decay.exp()
    return Pairs(views.k, views.v, views.q, views.erase_key, views.erase_direction, eta, decay)
