"""The linear map of the published models."""

from __future__ import annotations

from torch import nn


def projection(dim: int, width: int, bias: bool) -> nn.Linear:
    """A linear map with weights N(0, 0.02²) and zero bias, as in the published models."""
    linear = nn.Linear(dim, width, bias=bias)
    nn.init.normal_(linear.weight, std=0.02)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear
