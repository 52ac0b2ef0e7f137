"""No fast path believes a name or a flag: what it assumes of the parts is evaluated, and asked again when they
change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt.layer import TTTLayer
from metattt.learners import MLP, Learner, Linear
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction, Task
from metattt.testing.specimen import compare, run

BOUND = 1e-9  # relative, float64


class Mine(Reconstruction):
    """A loss of one's own, which may use a parameter."""

    function: Callable[[Any, Tensor, Tensor], Tensor]

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.importance = nn.Parameter(torch.ones(head_dim))

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return type(self).function(self, prediction, v)


def squared(error: Tensor) -> Tensor:
    return 0.5 * error.square()


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "l1": lambda self, p, v: (p - v).abs().sum(-1),
    "ten times": lambda self, p, v: 10 * squared(p - v).sum(-1),
    "near zero": lambda self, p, v: torch.where((p - v).abs() < 8, squared(p - v), 8 * (p - v).abs() - 32).sum(-1),
    "weighted": lambda self, p, v: (squared(p - v) * self.importance.to(v.dtype)).sum(-1),  # its first value is 1
    "while training": lambda self, p, v: squared(p - v).sum(-1) * (1 if self.training else 2),
}


def plain() -> Learner:
    return Linear(residual=False, norm=False)


LEARNERS: dict[str, Callable[[], Learner]] = {"linear": Linear, "mlp": MLP, "online linear": plain}


def rule(learner: str) -> InnerOptimizer:
    return GradientDescent(4, "online" if learner == "online linear" else "minibatch")


def made(task: Task, learner: Learner, optimizer: InnerOptimizer, form: str = "auto") -> TTTLayer:
    torch.manual_seed(0)
    return TTTLayer(16, 2, task, learner, optimizer, form=form).double()


def x(length: int = 13) -> Tensor:
    return 3 * torch.randn(2, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_ones_own(loss: str, learner: str) -> None:
    task = type("Mine", (Mine,), {"function": staticmethod(LOSSES[loss])})
    layer, oracle = (made(task(), LEARNERS[learner](), rule(learner), form) for form in ("auto", "primal"))
    assert layer.form == layer.plan.form == "dual"
    assert any("Mine" in why for why in layer.plan.reasons.values())
    for mode in (True, False):
        assert compare(run(layer.train(mode), x(), grads=True), run(oracle.train(mode), x(), grads=True)) < BOUND


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_setting_changed_later_is_noticed(learner: str) -> None:
    layer = made(Reconstruction(), LEARNERS[learner](), rule(learner))
    oracle = made(Reconstruction(loss="huber", huber_delta=0.5), LEARNERS[learner](), rule(learner), "primal")
    oracle.load_state_dict(layer.state_dict())
    run(layer, x())
    layer.task.loss_name, layer.task.huber_delta = "huber", 0.5
    assert compare(run(layer, x(), grads=True), run(oracle, x(), grads=True)) < BOUND
    assert layer.form == layer.plan.form == "dual"


def test_methods_and_hooks_added_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(Reconstruction(), Linear(), GradientDescent(4))
    before = run(layer, x()).y
    assert layer.form == "fused"
    handle = layer.learner.register_forward_hook(lambda module, given, y: 2 * y)
    assert layer.form == "dual"
    handle.remove()
    assert layer.form == "fused"
    monkeypatch.setattr(Reconstruction, "loss", LOSSES["l1"])
    assert layer.form == "dual"
    assert not torch.allclose(run(layer, x()).y, before)
    monkeypatch.undo()
    layer.learner.forward = lambda w, x: torch.tanh(Linear.forward(layer.learner, w, x))  # type: ignore
    assert layer.form == "dual"


def test_a_parameter_that_is_no_attribute_keeps_its_derivative() -> None:
    """Squared error as long as a tensor from outside is 1: no kernel may take it, and lose what trains the tensor."""
    outside = nn.Parameter(torch.ones(8))

    class Outside(Reconstruction):
        def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
            return 0.5 * ((prediction - v).square() * outside.to(v.dtype)).sum(-1)

    layer = TTTLayer(16, 2, Outside(), Linear(), GradientDescent(4))
    assert not layer.plan.kernels
    layer(torch.randn(2, 8, 16))[0].square().sum().backward()
    assert outside.grad is not None and outside.grad.any()
