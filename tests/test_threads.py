"""Several threads, one layer whose learner is a module: each gets what it would get alone, outputs and gradients. (Of other
layers: the law `threads`.)"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metattt
from metattt.functional import with_values
from metattt.layer import TTTLayer
from metattt.learners import ModuleLearner
from metattt.optimizers import GradientDescent
from metattt.tasks import Reconstruction

THREADS, CALLS = 4, 4


def of_a_module() -> TTTLayer:
    learner = ModuleLearner(nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)), residual=True)
    return TTTLayer(16, 2, Reconstruction(), learner, GradientDescent(4))


LAYERS: dict[str, Callable[[], TTTLayer]] = {
    "module": of_a_module,
    "nested_ttt": lambda: metattt.build("layer=nested_ttt", "dim=16", "num_heads=2"),
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
    faults: list[str] = []

    def work(i: int) -> None:
        try:
            for _ in range(CALLS):
                for found, wanted in zip(call(inputs[i]), expected[i], strict=True):
                    if (found is None) != (wanted is None):
                        faults.append("a gradient is lost")
                    elif found is not None and not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                        faults.append(f"off by {(found - wanted).abs().max()}")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]


# -- what it rests on --------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Refers to its parts in every way a module can: tied, in a list, in a dictionary, through a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.listed, self.named, self.method, self.itself = [self.first], {"second": (self.second,)}, self.twice, [self]

    def twice(self, x: Tensor) -> Tensor:
        return 2 * self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.listed[0](x) + self.named["second"][0](x).sin() + self.method(x) + self.itself[0].second(x)


def test_a_call_with_other_values() -> None:
    module, x = Odd(), torch.randn(2, 3)
    values = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    before = {name: p.clone() for name, p in module.named_parameters()}
    assert set(values) == {"first.weight", "first.bias", "second.bias"}
    found = with_values(module, values)(x)
    assert torch.equal(found, functional_call(module, values, (x,)))
    assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
