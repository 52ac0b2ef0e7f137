"""Norms and gates in C++: what torch computes in float64, with their first and second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from metattt.models.block import BlockNorm, SwiGLU
from metattt.native import passes

pytestmark = pytest.mark.skipif(passes.library() is None, reason="no compiler")


def derivatives(function: Callable[..., Tensor], given: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and first derivatives, and those of a sum of their squares."""
    given = [x.detach().requires_grad_() for x in given]
    y = function(*given)
    first = torch.autograd.grad(y, given, dy)
    again = torch.autograd.grad(function(*given), given, dy, create_graph=True)
    total = sum((g.square().sum() for g in again), torch.zeros(()))
    second = torch.autograd.grad(total, given, materialize_grads=True)
    return [y, *first, *second]


def same(function: Callable[..., Tensor], plain: Callable[..., Tensor], given: list[Tensor]) -> None:
    """Our function, by C++ and no other way, and torch's in float64."""
    called = []
    before = passes._run
    passes._run = lambda *call: (called.append(1), before(*call))[1]
    try:
        dy = torch.randn_like(plain(*given))
        found = derivatives(function, given, dy)
    finally:
        passes._run = before
    assert len(called) == 3, "forward, backward, and forward to differentiate twice"
    expected = derivatives(plain, [x.double() for x in given], dy.double())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        assert (one - other).norm() <= 2e-6 * other.norm()


def rows(kind: str, width: int) -> Tensor:
    """`[..., width]` in memory of several kinds."""
    x = torch.randn(2, 131, 3, 2 * width) * 3
    if kind == "heads":
        return x[..., :width].transpose(1, 2)
    if kind == "one for all":
        return x[:1, :1, :, :width].expand(2, 131, 3, width)
    return {"columns": x[..., ::2], "tokens": x[0, :, 0, width:], "vector": x[0, 0, 0, :width], "none": x[:0, ..., :width]}[kind]


@pytest.mark.parametrize("kind", ["heads", "one for all", "columns", "tokens", "vector", "none"])
@pytest.mark.parametrize("width", [16, 80])
def test_norms(kind: str, width: int) -> None:
    x, weight, norm = rows(kind, width), torch.randn(width), BlockNorm(width, eps=1e-5)

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        norm._parameters["weight"] = weight  # type: ignore[assignment]
        return norm(x)

    same(scaled, lambda x, weight: nn.functional.rms_norm(x, (width,), weight, 1e-5), [x, weight])


def test_outputs_may_be_changed_where_they_are() -> None:
    x = torch.randn(2, 7, 16, requires_grad=True)
    for function in (BlockNorm(16, eps=1e-6), lambda x: passes.Gated.apply(x, x, True)):
        found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (function(x).mul_(3), function(x) * 3))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(3, 5, 48), (1, 2, 16), (2, 33, 128)])
def test_gates(shape: tuple[int, ...]) -> None:
    a, b = torch.randn(2, *shape) * 4
    for given in ([a, b], [a.mT.contiguous().mT, b[:1].expand_as(b)]):
        same(lambda a, b: passes.Gated.apply(a, b, True), lambda a, b: nn.functional.silu(a) * b, given)


def test_nan_and_infinity_are_not_lost() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(2, 32)
        x[1, 3] = bad
        x.requires_grad_()
        for function in (BlockNorm(32, eps=1e-6), lambda x: passes.Gated.apply(x, torch.ones_like(x), True)):
            y = function(x)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert not y[1].isfinite().all() and y[0].isfinite().all() and dx[0].isfinite().all()


def test_threads_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it() -> list[Tensor]:
        torch.manual_seed(0)
        x, weight = rows("heads", 160), torch.randn(160)
        found = derivatives(lambda *x: passes.Scaled.apply(*x, 1e-6), [x, weight], torch.randn(2, 3, 131, 160))
        return found + derivatives(lambda *x: passes.Gated.apply(*x, True), [x, 2 * x], x)

    expected = all_of_it()
    monkeypatch.setattr(passes, "SMALLEST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for one, other in zip(all_of_it(), expected, strict=True):
        assert torch.equal(one, other)


class Other(Tensor):
    """A tensor of somebody else's class."""


@pytest.mark.parametrize("why", ["type", "class", "width", "mode", "autocast", "compiler", "transform", "one token"])
def test_torch_computes_it_otherwise(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the C++ cannot see through, or nobody could trace."""
    monkeypatch.setattr(passes, "_run", lambda *call: pytest.fail("the library was called"))
    width = 24 if why == "width" else 32
    norm, ffn = BlockNorm(width, eps=1e-6), SwiGLU(width, width)
    x = torch.randn(2, 1 if why == "one token" else 7, width, dtype=torch.float64 if why == "type" else torch.float32)
    x = (x.as_subclass(Other) if why == "class" else x).requires_grad_()
    norm.to(x.dtype), ffn.to(x.dtype)
    if why == "compiler":
        monkeypatch.setattr(passes, "library", lambda: None)
    contexts = {"mode": FlopCounterMode(display=False), "autocast": torch.autocast("cpu", torch.bfloat16), "one token": torch.no_grad()}
    with contexts.get(why, nullcontext()):
        for module in (norm, *(() if why == "width" else (ffn,))):
            y = torch.func.vmap(module, 1, 1)(x.unsqueeze(1)) if why == "transform" else module(x)
            if why != "one token":
                y.sum().backward()
                assert x.grad is not None


def test_many_backward_passes_at_once() -> None:
    x, a = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    for function in (BlockNorm(16, eps=1e-6), lambda x: passes.Gated.apply(x, a, True)):
        many, one = (torch.autograd.functional.jacobian(function, x, vectorize=kind) for kind in (True, False))
        torch.testing.assert_close(many, one)


def test_numbers_that_are_meant_with_another_sign() -> None:
    """`imag` of a conjugate is the memory of the number itself, to be read with a minus."""
    x = torch.randn(2, 5, 16, dtype=torch.complex64).conj().imag.requires_grad_()
    norm = BlockNorm(16, eps=1e-6)
    assert x.is_neg()
    torch.testing.assert_close(norm(x), norm(x.resolve_neg()))
    x, dy = x.detach().resolve_neg().requires_grad_(), torch.randn(2, 5, 16, dtype=torch.complex64).conj().imag
    (found,), (expected,) = (torch.autograd.grad(norm(x), x, given) for given in (dy, dy.resolve_neg()))
    assert torch.equal(found, expected)


def test_other_sizes_than_those_of_the_parameters() -> None:
    with pytest.raises(RuntimeError):
        BlockNorm(32, eps=1e-6)(torch.randn(1, 5, 16))
