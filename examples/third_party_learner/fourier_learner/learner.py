"""f(x) = [cos(x W1 + b1), sin(x W1 + b1)] W2: Fourier features whose frequencies are fast weights too."""

import torch

from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="fourier")
class Fourier(Learner):
    """A linear map of learned Fourier features.

    Args:
        frequencies: number of features per head.
        bandwidth: standard deviation of the initial frequencies.
        residual, norm: use `x + LN(f(x))`.
        learn_init: train the initial weights in the outer loop.
    """

    residual = True
    norm = True
    frequencies: int = setting(default=16)
    bandwidth: float = setting(default=1.0, above=0)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        m = self.frequencies
        return {"w1": Weight((d_in, m), std=self.bandwidth), "b1": Weight((m,), std=1.0), "w2": Weight((2 * m, d_out))}

    def forward(self, w: FastWeights, x: torch.Tensor) -> torch.Tensor:
        angle = w.linear(x, "w1", "b1")  # [..., T, m]
        return w.linear(torch.cat((angle.cos(), angle.sin()), dim=-1), "w2")  # [..., T, d_out]
