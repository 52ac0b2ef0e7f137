"""Published initial values that the state space models share."""

from __future__ import annotations

import math

import torch
from torch import nn

from metattt.errors import MetaTTTError
from metattt.modules import CausalConv
from metattt.modules import step_bias as step_bias


def check_steps(dt_min: float, dt_max: float) -> None:
    """Refuses ends of a range of step sizes that are in the wrong order.

    Raises:
        MetaTTTError: naming the override.
    """
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
