"""The rule of learners whose state is the data itself: keep every token."""

from __future__ import annotations

from torch import Tensor

from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.registry import register
from metattt.state import Context, Tensors


@register(group="optimizer", name="append")
class Append(InnerOptimizer):
    """No gradient and no weights: the learner appends each token to its data (nearest neighbours, kernel
    estimators)."""

    updates = False

    def __init__(self) -> None:
        super().__init__(mini_batch_size=1)

    def equations(self) -> list[str]:
        return []  # the learner says what it makes of its data

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        return Gates(x.new_ones(x.shape[0], 1, x.shape[1])), state
