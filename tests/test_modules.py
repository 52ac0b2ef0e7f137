"""Small shared modules."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from metattt.modules import CausalConv
from metattt.state import Context
from metattt.tasks.reconstruction import Reconstruction, rotary_table, rotate


def context(positions: torch.Tensor) -> Context:
    return Context(positions, None, None, 16)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_one_token_is_convolved_as_many_are(width: int) -> None:
    """Outputs, tails and gradients: one token takes another way through the arithmetic."""
    torch.manual_seed(0)
    conv = CausalConv(6, width)
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 9, 6, requires_grad=True)
    expected, last = conv(x, None, context(torch.arange(9).expand(2, -1)))
    tail, ys = None, []
    for t in range(9):
        y, tail = conv(x[:, t : t + 1], tail, context(torch.full((2, 1), t)))
        ys.append(y)
    found = torch.cat(ys, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tail, last)
    weights = torch.randn_like(expected)
    pairs = zip(
        *(torch.autograd.grad((y * weights).sum(), [x, *conv.parameters()]) for y in (found, expected)), strict=True
    )
    for gradient, other in pairs:
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cast", [False, True])
def test_one_token_keeps_the_type(cast: bool) -> None:
    """As a convolution does, under autocast and without, so that a state can be handed on."""
    conv = CausalConv(4)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        many, one = (conv(torch.randn(1, n, 4), None, context(torch.zeros(1, n).long()))[0] for n in (2, 1))
    assert many.dtype == one.dtype == (torch.bfloat16 if cast else torch.float32)
    conv = conv.bfloat16()
    assert conv(torch.randn(1, 1, 4).bfloat16(), None, context(torch.zeros(1, 1).long()))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("rope", ["none", "mini_batch", "full"])
@pytest.mark.parametrize("views", ["separate", "shared_qk"])
def test_views_of_one_token(views: str, rope: str) -> None:
    torch.manual_seed(0)
    task = Reconstruction(views=views, rope=rope).setup(12, 2, 6)  # type: ignore[arg-type]
    x = torch.randn(2, 20, 12)
    expected, _ = task.views(x, {}, context(torch.arange(20).expand(2, -1)))
    state: dict[str, torch.Tensor] = {}
    for t in range(20):
        found, state = task.views(x[:, t : t + 1], state, context(torch.full((2, 1), t)))
        for one, all_ in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(one, all_[:, :, t : t + 1], rtol=1e-5, atol=1e-6)


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
