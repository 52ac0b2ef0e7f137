"""Several threads, one layer: each gets what it would get alone, outputs and gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import metattt
from metattt.functional import with_values
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction

THREADS, CALLS = 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]


def with_module(module: nn.Module, mixes_tokens: bool = False) -> TTTLayer:
    learner = ModuleLearner(module, residual=True, mixes_tokens=mixes_tokens)
    rule = GradientDescent(4, read="previous" if mixes_tokens else "inclusive")
    return TTTLayer(16, 2, Reconstruction(), learner, rule)


LAYERS: dict[str, Callable[[], TTTLayer]] = {
    "module": lambda: with_module(nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))),
    "module that mixes tokens": lambda: with_module(Attention(), mixes_tokens=True),
    "nested_ttt": lambda: metattt.build("layer=nested_ttt", "dim=16", "num_heads=2"),
    "ttt_mlp": lambda: metattt.build("layer=ttt_mlp", "dim=16", "num_heads=2"),
}


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("name", LAYERS)
def test_threads_do_not_disturb_each_other(name: str) -> None:
    layer = LAYERS[name]()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    inputs = [torch.randn(1, 21, 16, generator=torch.Generator().manual_seed(i)) for i in range(THREADS)]

    def call(x: Tensor) -> list[Tensor | None]:
        x = x.clone().requires_grad_()
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)]

    expected = [call(x) for x in inputs]
    with ThreadPoolExecutor(THREADS) as pool:
        for found, wanted in zip(pool.map(call, inputs * CALLS), expected * CALLS, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


# -- what it rests on --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Refers to its parts in every way a module can: tied, in a list, in a dictionary, through a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(3))
        self.listed = [self.first]
        self.named = {"second": (self.second,)}
        self.method = self.twice
        self.itself = [self]
        self.calls: list[int] = []

    shift: Tensor

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.listed[0](x) + self.named["second"][0](x).sin() + self.method(x) + self.shift + self.itself[0].second(x)


def test_a_call_with_other_values() -> None:
    module, x = Odd(), torch.randn(2, 3)
    values = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    before = {name: p.clone() for name, p in module.named_parameters()}
    assert set(values) == {"first.weight", "first.bias", "second.bias"}
    found = with_values(module, values)(x)
    assert torch.equal(found, functional_call(module, values, (x,)))
    hooked = nn.Linear(3, 3)  # as accelerate's hooks: the module calls what it is given
    hooked.forward = partial(lambda module, x: F.linear(x, module.weight), hooked)  # type: ignore[method-assign]
    weight = torch.randn(3, 3)
    assert torch.equal(with_values(hooked, {"weight": weight})(x), F.linear(x, weight))
    assert module.calls == [2, 2]
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
