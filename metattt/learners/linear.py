"""f(x) = xW + b."""

from __future__ import annotations

from torch import Tensor

from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="linear")
class Linear(Learner):
    """The linear learner; with norm and residual the hidden state of TTT-Linear (arXiv 2407.04620, Sec. 2.7).

    Args:
        bias: add b.
        learn_init: train W0. False fixes W0 = 0, as in Theorem 1 and in linear attention.
    """

    residual = True
    norm = True
    with_bias: bool = setting(default=True, alias="bias", fixed=True)

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
