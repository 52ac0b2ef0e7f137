"""Published initial values that the state space models share."""

from __future__ import annotations

import math

import torch
from torch import nn

from metattt.errors import MetaTTTError, check_number
from metattt.modules import CausalConv
from metattt.modules import step_bias as step_bias


def check_steps(dt_min: float, dt_max: float) -> None:
    """Refuses what are no two ends of a range of step sizes.

    Raises:
        MetaTTTError: naming the override.
    """
    check_number("layer.dt_min", dt_min, above=0)
    check_number("layer.dt_max", dt_max, above=0)
    if dt_max < dt_min:
        raise MetaTTTError(f"layer.dt_max={dt_max:g} is below layer.dt_min={dt_min:g}: raise it")


@torch.no_grad()
def convolution(dim: int, width: int) -> CausalConv:
    """A convolution with weights and bias U(−1/√width, 1/√width), as torch's own begin."""
    conv = CausalConv(dim, width)
    bound = 1 / math.sqrt(width)
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -bound, bound)
    return conv
