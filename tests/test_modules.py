"""Small shared modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from metattt.modules import CausalConv, normalize, rotary_table, rotate
from metattt.state import Context


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


def test_zeros_have_a_direction_in_16_bits() -> None:
    x = torch.randn(2, 4, dtype=torch.float16)
    x[0] = 0  # where torch's ε is 0, too
    torch.testing.assert_close(normalize(x), F.normalize(x.float(), dim=-1).half())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pairs_are_rotated_wherever_they_lie(dtype: torch.dtype) -> None:
    """Heads of a projection, a slice at an odd place, rows across memory, one for all."""
    cos, sin = rotary_table(torch.arange(5)[None], 6, 100.0, dtype)
    base = torch.randn(1, 5, 2, 7, dtype=dtype)
    across = torch.randn(1, 2, 6, 5, dtype=dtype).permute(0, 3, 1, 2)
    for given in (base[..., :6], base[..., 1:], across, base[..., 1:].expand(3, -1, -1, -1)):
        x = given.transpose(1, 2)
        even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        expected = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(dtype)
        torch.testing.assert_close(rotate(x, cos, sin), expected)
    if dtype == torch.float64:
        x = x[:1].clone()
        assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x.requires_grad_(), fast_mode=True)
        assert torch.equal(torch.func.vmap(lambda x: rotate(x[None], cos, sin)[0])(x), rotate(x, cos, sin))
