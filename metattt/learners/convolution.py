"""Convolutional learners: over the features of one token, or causal over the tokens of the mini-batch."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.learners.mlp import ACTIVATIONS
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="convolution")
class Convolution(Learner):
    """Two layers, the first (over tokens) or both (over features) a convolution, with an activation between them.

    Over `features` a token of d features is a signal of length d: `f(x) = conv(act(conv(x)))`, from 1 channel to
    `channels` and back. Over `tokens`, `f(x)_t = act(b1 + Σ_j x_{t−width+1+j} W1_j) W2 + b2` with d · `channels` hidden
    units, zeros before the mini-batch.

    Args:
        over: `features`, or `tokens`: the learner then mixes the tokens of a mini-batch, and a read of earlier commits
            is cheapest (`optimizer.read=previous`).
        width: taps (features or tokens).
        channels: channels per feature between the two layers.
        activation: as in `MLP`.
        learn_init: train W0. False keeps the random W0 it starts with.
    """

    residual = True
    norm = True
    over: Literal["features", "tokens"] = setting(default="features", fixed=True)
    width: int = setting(default=3, fixed=True)
    channels: int = setting(default=4, fixed=True)
    activation: str = setting(default="gelu_tanh", among=ACTIVATIONS)

    def configure(self) -> None:
        super().configure()
        self.mixes_tokens = self.over == "tokens" and self.width != 1

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        second: tuple[int, ...]
        if self.over == "tokens":
            hidden = self.channels * d_in
            first, second = (self.width, d_in, hidden), (hidden, d_out)
        elif d_in != d_out:
            raise MetaTTTError(
                f"learner.over=features keeps the width, which is {d_in} for inputs and {d_out} for labels: use "
                "learner=mlp"
            )
        else:
            first, second = (self.width, 1, self.channels), (self.width, self.channels, 1)
        return {
            "w1": Weight(first, std=(first[0] * first[1]) ** -0.5),
            "b1": Weight(first[-1:], std=0.0),
            "w2": Weight(second, std=0.02),
            "b2": Weight(second[-1:], std=0.0),
        }

    def equations(self) -> list[str]:
        if self.over == "features":
            value = f"conv2({self.activation}(conv1(x)))"
            what = (
                f"conv1, conv2: {self.width} taps over the features of a token, 1 to {self.channels} channels and back"
            )
            return [f"f(x; W) = {self.wrapped(value)}", what]
        value = f"{self.activation}(Σ_j x_{{t−{self.width}+j}} W1_j + b1) W2 + b2"
        what = f"j = 1…{self.width}, zeros before the mini-batch"
        return [f"f(x; W)_t = {self.wrapped(value, 'x_t')}, {what}"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.activation]
        if self.over == "features":
            signal = x.unsqueeze(-1)  # [..., d, 1]
            return w.conv1d(activation(w.conv1d(signal, "w1", "b1")), "w2", "b2").squeeze(-1)
        padded = F.pad(x, (0, 0, self.width - 1, 0))
        windows = padded.unfold(2, self.width, 1).mT.flatten(-2)  # [B, H, T, width · d]
        return w.linear(activation(w.linear(windows, "w1", "b1")), "w2", "b2")
