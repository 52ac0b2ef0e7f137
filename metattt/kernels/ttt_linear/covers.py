"""Which combinations the kernels of TTT-Linear on the CPU compute."""

from __future__ import annotations

from metattt.kernels.base import linear_rule
from metattt.learners.base import Learner
from metattt.learners.linear import Linear
from metattt.optimizers.base import InnerOptimizer
from metattt.tasks.base import Task


def uncovered(task: Task, learner: Learner, optimizer: InnerOptimizer) -> str | None:
    """Why this is not `x + LN(xW + b)` with squared error under a linear rule, or None if it is."""
    same = all(getattr(type(learner), name) is getattr(Linear, name) for name in ("forward", "predict", "wrap", "mixes_tokens"))
    if not (isinstance(learner, Linear) and same and learner.residual and learner.norm):
        return "the learner is not x + LN(xW + b)"
    if not task.squared_error:
        return "the loss is not ½‖f(k) − v‖²"
    return linear_rule(optimizer)
