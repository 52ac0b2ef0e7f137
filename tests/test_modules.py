"""Small shared modules."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from metattt.modules import CausalConv
from metattt.state import Context
from metattt.tasks.reconstruction import rotary_table, rotate


def context(positions: torch.Tensor) -> Context:
    return Context(positions, None, None, 16)


@pytest.mark.parametrize("cast", [False, True])
def test_one_token_keeps_the_type(cast: bool) -> None:
    """As a convolution does, under autocast and without, so that a state can be handed on."""
    conv = CausalConv(4)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        many, one = (conv(torch.randn(1, n, 4), None, context(torch.zeros(1, n).long()))[0] for n in (2, 1))
    assert many.dtype == one.dtype == (torch.bfloat16 if cast else torch.float32)
    conv = conv.bfloat16()
    assert conv(torch.randn(1, 1, 4).bfloat16(), None, context(torch.zeros(1, 1).long()))[0].dtype == torch.bfloat16


def test_frequencies_are_known_to_whoever_asks_next() -> None:
    """In inference mode first, then where gradients go through."""
    positions, x = torch.tensor([[3]]), torch.randn(1, 1, 1, 6, requires_grad=True)
    with torch.inference_mode():
        expected = rotate(x, *rotary_table(positions, 6, 123.0, torch.float32))
    found = rotate(x, *rotary_table(positions, 6, 123.0, torch.float32))
    assert torch.equal(found, expected)
    found.sum().backward()
    assert x.grad is not None
    with FakeTensorMode():
        assert rotary_table(torch.zeros(1, 5, dtype=torch.long), 6, 321.0, torch.float32)[0].shape == (1, 1, 5, 3)
    assert type(rotary_table(positions, 6, 321.0, torch.float32)[0]) is torch.Tensor
