"""A convolution over the map of an image's tokens, each feature by itself: the second network of ViT³."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.base import Learner, Weight
from metattt.learners.fast_weights import FastWeights
from metattt.registry import register
from metattt.setting import setting


@register(group="learner", name="depthwise")
class Depthwise(Learner):
    """`f(x)_p = Σ_j x_{p+j} ∘ W_j`, p a place in the map of the tokens and j the places around it, zeros outside of the
    map (ViT³, arXiv 2512.01643).

    The tokens of a call are the map, row by row, and each sees its neighbours on all sides: the layer is not causal,
    and needs a rule that reads the weights at the end of the call.

    Args:
        size: places of the window in a row and in a column; an odd number.
        columns: width of the map (tokens), whose last row may be incomplete; None: it is a square.
        residual, norm: use `x + LN(f(x))`; ViT³ uses neither.
        learn_init: train W0. False keeps the random weights it starts with.

    Raises:
        MetaTTTError: an even size; from a call, tokens that are no square.
    """

    mixes_tokens = True
    causal = False
    size: int = setting(default=3, fixed=True)
    columns: int | None = setting(default=None, advice=", or null for a square")

    def check_settings(self) -> None:
        super().check_settings()
        if self.size % 2 == 0:
            raise MetaTTTError(f"learner.size={self.size} has no place in the middle: set an odd number")

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        if d_in != d_out:
            raise MetaTTTError(
                f"learner=depthwise keeps the width, which is {d_in} for inputs and {d_out} for labels: use learner=glu"
            )
        return {"w": Weight((self.size**2, d_in))}

    def equations(self) -> list[str]:
        value = self.wrapped("Σ_j x_{p+j} ∘ W_j", "x_p")
        return [f"f(x; W)_p = {value}, j the {self.size} × {self.size} places around p in the map of the tokens"]

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        count = x.shape[2]
        columns = math.isqrt(count) if self.columns is None else self.columns
        if self.columns is None and columns**2 != count:
            raise MetaTTTError(
                f"{count} tokens are no square map: set learner.columns (of layer=vittt layer.second.learner.columns) "
                "to its width; class tokens have no place in it"
            )
        rows, side = -(-count // columns), self.size // 2
        whole = F.pad(x, (0, 0, 0, rows * columns - count)).unflatten(2, (rows, columns))
        around = F.pad(whole, (0, 0, side, side, side, side))
        windows = torch.stack(
            [around[:, :, i : i + rows, j : j + columns] for i in range(self.size) for j in range(self.size)], dim=-2
        )  # [B, H, rows, columns, size², d]
        moved = w.scale(windows.flatten(2, 3).flatten(-2)[:, :, :count], "w")
        return moved.unflatten(-1, (self.size**2, -1)).sum(-2)
