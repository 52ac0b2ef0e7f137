"""f(x) = xW + b."""

from __future__ import annotations

from torch import Tensor

from metattt.errors import check_flag
from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register


@register(group="learner", name="linear")
class Linear(Learner):
    """The linear learner; with norm and residual the hidden state of TTT-Linear (arXiv 2407.04620, Sec. 2.7).

    Args:
        bias: add b.
        residual, norm: use `x + LN(f(x))`.
        learn_init: train W0. False fixes W0 = 0, as in Theorem 1 and in linear attention.
    """

    def __init__(self, bias: bool = True, residual: bool = True, norm: bool = True, learn_init: bool = True):
        super().__init__(residual=residual, norm=norm, learn_init=learn_init)
        check_flag("learner.bias", bias)
        self.with_bias = bias

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        weights = {"w1": Weight((d_in, d_out), std=0.02 if self.learn_init else 0.0)}
        return weights | {"b1": Weight((d_out,), std=0.0)} if self.with_bias else weights

    @property
    def linear_map(self) -> tuple[str, str | None] | None:
        return None if self.residual or self.norm else ("w1", "b1" if self.with_bias else None)

    def equations(self) -> list[str]:
        return [f"f(x; W) = {self.wrapped('x W + b' if self.with_bias else 'x W')}"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.linear(x, "w1", "b1" if self.with_bias else None)
