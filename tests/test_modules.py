"""Small shared modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from metattt.modules import CausalConv, RMSNorm, normalize, rotary_table, rotate
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


@pytest.mark.parametrize("bias", [True, False])
def test_derivatives_of_a_convolution(bias: bool) -> None:
    """First and second ones, of inputs and weights; where only one of them is wanted, of that."""
    conv, ctx = CausalConv(3, 4, bias).double(), Context(torch.zeros(1, 1, dtype=torch.long), None, None, 1)
    padded = torch.randn(2, 70, 3, dtype=torch.float64, requires_grad=True)  # more than are summed at once
    given = [padded, *conv.parameters()]

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        for name, value in zip([name for name, _ in conv.named_parameters()], parameters, strict=True):
            conv._parameters[name] = value
        return conv.convolve(x, ctx)

    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)
    (whole, *_) = torch.autograd.grad(function(*given).square().sum(), given)
    function(padded, *(p.detach() for p in given[1:])).square().sum().backward()
    torch.testing.assert_close(padded.grad, whole)


@pytest.mark.parametrize("of", ["normalize", "RMSNorm"])
def test_derivatives_of_normalized_vectors(of: str) -> None:
    """As torch's own, also of a vector of zeros and of one below ε, and once more; in the forms of `torch.func`, too."""
    pair = normalize, partial(F.normalize, dim=-1)
    if of == "RMSNorm":
        pair = RMSNorm(4, eps=1e-6).double(), nn.RMSNorm(4, eps=1e-6).double()
        for norm in pair:
            norm.weight.data = torch.tensor([0.5, 1, -2, 3], dtype=torch.float64)
    ours, torchs = pair
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).transpose(1, 2)
    x[0, 0], x[0, 1] = 0, x[0, 1] * 1e-14
    x.requires_grad_()
    dy = torch.randn_like(x)

    def derivatives(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = function(x)
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        (plain,) = torch.autograd.grad(function(x), x, dy)
        return y, first, plain, second

    expected = [d.nan_to_num(0) for d in derivatives(torchs)]  # torch's second one of zeros is NaN
    torch.testing.assert_close([*derivatives(ours)], expected, rtol=1e-12, atol=1e-12)
    assert torch.func.vmap(torch.func.hessian(lambda x: ours(x).sum()))(x.detach().flatten(0, 2)).isfinite().all()
    jacobians = [torch.func.vmap(torch.func.jacrev(function))(x.detach()[1, 2]) for function in pair]
    torch.testing.assert_close(*jacobians)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x.float()).dtype == torchs(x.float()).dtype
    x = x.half()  # in which torch's ε is 0, and zeros would be NaN
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
        turned = torch.func.hessian(lambda x: rotate(x, *rotary_table(torch.arange(5)[None], 6, 99.0, dtype)).pow(3).sum())
        assert torch.equal(turned(x), turned(x))  # nothing of the first is kept for the second
