"""The contract of a learner that keeps its data: attention, kernel regression, ridge regression over all tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.base import Learner
from metattt.learners.fast_weights import FastWeights
from metattt.learners.weight import Weight
from metattt.modules import RECORDING, stands_for_others, transformed
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


class NonParametric(Learner):
    """A learner whose state is the data itself: it reads the whole sequence and needs no update rule."""

    has_weights = False
    #: which of `write`, `keep`, `levels`, `decay` and `blend` `scan` uses; a rule with others raises an error
    gates: ClassVar[frozenset[str]] = frozenset()

    def setup(self, num_heads: int, d_in: int, d_out: int) -> Learner:
        for key, what in (("trainable", "has no weights"), ("step_scale", "takes no steps")):
            if getattr(self, key) is not None:
                raise MetaTTTError(f"{type(self).__name__} keeps its data and {what}: set learner.{key}=null")
        return super().setup(num_heads, d_in, d_out)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        """No weights; a subclass may declare slow ones."""
        return {}

    @abstractmethod
    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]` for the queries, each from the data up to its own token, and the data for the next
        call.

        `state` is empty at the start; padding comes last and must not be seen by any query (`ctx.valid`), nor may other
        documents. `gates` are those of the rule, in fp32 or wider, and inert at padding.
        """

    def read(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> Tensor:
        """Predictions `[B, H, T, d]` for the queries from the data of `state` alone; nothing of `views` is stored. This
        default works for learners that ignore padding in the data but still compute predictions for its queries.
        """
        unlearned = ctx._replace(valid=ctx.positions < 0)  # nowhere
        return self.scan(views, state, unlearned, gates.masked(unlearned.valid))[0]

    def _wrapped(self, q: Tensor, y: Tensor) -> Tensor:
        """`wrap` of predictions y for the queries q."""
        if not (self.norm or self.residual) and type(self).wrap is Learner.wrap:
            return y
        return self.wrap(FastWeights({}, dict(self.slow.items()), y.dtype), q, y)

    def _in_symbols(self, value: str) -> str:
        """`wrapped` of a long value."""
        return f"{self.wrapped('y_t', 'q_t')}, y_t = {value}" if self.residual or self.norm else value


def cholesky(matrix: Tensor, ridge: str, value: float) -> Tensor:
    """L of LLᵀ = `matrix` `[..., n, n]`; NaN where there is none, so that NaN in one sequence stays there.

    Raises:
        MetaTTTError: finite numbers that rounding has left without a factor, for this `value` of the override `ridge`.
            (Not where values cannot be looked at: then NaN appears in the result.)
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    failed = info != 0
    elsewhere = torch.compiler.is_compiling() or transformed() or RECORDING.get() or stands_for_others(matrix)
    if not (elsewhere or matrix.is_meta) and bool(failed.any()) and bool(matrix.isfinite().all()):
        raise MetaTTTError(
            f"the inner regression cannot be solved in {matrix.dtype}, keys are too large for its ridge: set {ridge} "
            f"above {value:g}, or normalize keys, e.g. task.normalize_qk=true"
        )
    return torch.where(failed[..., None, None], torch.nan, factor)
