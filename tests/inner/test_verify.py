"""No fast path believes a name or a flag: what it assumes of the parts is evaluated, and asked again when they
change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from metattt.layer import TTTLayer
from metattt.learners import MLP, Learner, Linear, Weight
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction, Task
from metattt.testing.specimen import compare, run

BOUND = 1e-9  # relative, float64


class Weighted(Reconstruction):
    """Squared, as long as its parameter has its first value."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.importance = nn.Parameter(torch.ones(head_dim))

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return 0.5 * ((prediction - v).square() * self.importance.to(v.dtype)).sum(-1)


def near_zero(self: Task, prediction: Tensor, v: Tensor) -> Tensor:
    """Squared, but for large errors."""
    error = (prediction - v).abs()
    return torch.where(error < 8, 0.5 * error.square(), 8 * error - 32).sum(-1)


squared, OUTSIDE = Reconstruction.loss, nn.Parameter(torch.ones(8))
OWN: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "l1": lambda self, prediction, v: (prediction - v).abs().sum(-1),
    "ten times": lambda self, prediction, v: 10 * squared(self, prediction, v),
    "near zero": near_zero,
    "a parameter that is no attribute": lambda self, prediction, v: squared(self, prediction * OUTSIDE.to(v.dtype), v),
    "while training": lambda self, prediction, v: squared(self, prediction, v) * (1 if self.training else 2),
}
LOSSES = {"weighted": Weighted} | {name: type("Mine", (Reconstruction,), {"loss": loss}) for name, loss in OWN.items()}


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
    layer, oracle = (made(LOSSES[loss](), LEARNERS[learner](), rule(learner), form) for form in ("auto", "primal"))
    assert layer.form == layer.plan.form == "dual"
    assert any(LOSSES[loss].__name__ in why for why in layer.plan.reasons.values())
    for mode in (True, False):
        assert compare(run(layer.train(mode), x(), grads=True), run(oracle.train(mode), x(), grads=True)) < BOUND


def test_what_is_squared_error_by_itself_is_taken() -> None:
    class Mine(Reconstruction):
        def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
            return (prediction - v).pow(2).sum(-1) / 2

    assert made(Mine(), Linear(), GradientDescent(4)).form == "fused"
    assert made(Mine(), plain(), GradientDescent(4, "online")).plan.form == "solved"


@pytest.mark.parametrize("rule", [GradientDescent(4, "online"), GradientDescent(4, "batch")], ids=repr)
def test_labels_wider_than_predictions(rule: GradientDescent) -> None:
    class Longer(Reconstruction):
        def loss(self, prediction: Tensor, v: Tensor) -> Tensor:  # the label ends with a weight of the token
            return -(1 + v[..., 8:].sum(-1)) * (prediction * v[..., :8]).sum(-1)

    task = partial(Longer, loss="huber", huber_delta_from="per_head")
    layers = (made(task(), plain(), copy.deepcopy(rule), form) for form in ("auto", "primal"))
    assert compare(*(run(layer, x(), grads=True) for layer in layers)) < BOUND


class Beside(Linear):
    """Has a fast weight that its map does not use."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {**super().weights(d_in, d_out), "unused": Weight((3,))}


def test_a_weight_beside_the_map_stays_in_the_state() -> None:
    layer = made(Reconstruction(), Beside(residual=False, norm=False, bias=False), GradientDescent(1, "online"))
    assert layer.plan.reasons["solved"] == "its fast weights (w1, unused) are not exactly those of its linear map"
    state = layer(x())[1]
    assert set(layer(x(), state)[1].weights["weights"]) == {"w1", "unused"}


@pytest.mark.parametrize(("name", "settings", "task", "learner"), [
    *((name, {"task.loss_name": "huber", "task.huber_delta": 0.5}, Reconstruction(loss="huber", huber_delta=0.5), make())
      for name, make in LEARNERS.items()),
    ("mlp", {"learner.activation": "relu"}, Reconstruction(), MLP(activation="relu")),
])  # fmt: skip
def test_a_setting_changed_later_is_noticed(name: str, settings: dict[str, Any], task: Task, learner: Learner) -> None:
    layer = made(Reconstruction(), LEARNERS[name](), rule(name))
    oracle = made(task, learner, rule(name), "primal")
    oracle.load_state_dict(layer.state_dict())
    run(layer, x())
    for setting, value in settings.items():
        part, _, attribute = setting.partition(".")
        setattr(getattr(layer, part), attribute, value)
    assert compare(run(layer, x(), grads=True), run(oracle, x(), grads=True)) < BOUND
    assert layer.form == layer.plan.form == "dual"


class Scaled(nn.Module):
    def __init__(self, error: type[nn.Module] = nn.MSELoss) -> None:
        super().__init__()
        self.scale, self.inner = 0.5, nn.Sequential(error(reduction="none"))

    def forward(self, prediction: Tensor, v: Tensor) -> Tensor:
        return self.scale * self.inner[0](prediction, v).sum(-1)


class Of(Reconstruction):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.criterion = Scaled()

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        loss: Tensor = self.criterion(prediction, v)
        return loss


CHANGES: list[Callable[[Any], None]] = [
    lambda task: setattr(task, "criterion", Scaled(nn.HuberLoss)),
    lambda task: setattr(task.criterion, "scale", 2.0),
    lambda task: task.criterion.inner.__setitem__(0, nn.HuberLoss(reduction="none")),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_assigned_later_inside_of_a_part_is_noticed(change: Callable[[Any], None]) -> None:
    layer, oracle = (made(Of(), Linear(), GradientDescent(4), form) for form in ("auto", "primal"))
    layer.task.criterion, plan = layer.task.criterion, layer.plan
    assert layer.plan is plan  # the same as before, as torch's wrappers of activation checkpoints assign it
    assert layer.eval().train().plan is plan and layer.form == "fused"
    change(layer.task)
    change(oracle.task)
    checkpoint(lambda x: layer(x)[0], x().requires_grad_(), use_reentrant=False).sum().backward()  # plans inside of it
    assert compare(run(layer, x(), grads=True), run(oracle, x(), grads=True)) < BOUND
    assert layer.form == "dual"


def test_methods_and_hooks_added_later_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(Reconstruction(), Linear(), GradientDescent(4))
    before = run(layer, x()).y
    assert layer.form == "fused"
    handle = layer.learner.register_forward_hook(lambda module, given, y: 2 * y)
    assert layer.form == "dual"
    handle.remove()
    assert layer.form == "fused"
    monkeypatch.setattr(Reconstruction, "loss", OWN["l1"])
    assert layer.form == "dual"
    assert not torch.allclose(run(layer, x()).y, before)
    monkeypatch.undo()
    layer.learner.forward = lambda w, x: torch.tanh(Linear.forward(layer.learner, w, x))  # type: ignore[method-assign, arg-type]
    assert layer.form == "dual"


def test_replicas_and_copies_run_their_own_parts() -> None:
    """What `nn.DataParallel` and `copy.copy` make."""
    layer = made(Reconstruction(), MLP(), GradientDescent(4))
    expected = layer(x())[0]
    replica = layer._replicate_for_data_parallel()
    for name in ("task", "learner", "optimizer"):
        part = copy.deepcopy(getattr(layer, name))
        part._is_replica = True
        setattr(replica, name, part)
    with torch.no_grad():
        for parameter in layer.learner.parameters():
            parameter.zero_()
    assert torch.equal(replica(x())[0].detach(), expected.detach())
    shallow, deep = copy.copy(layer), copy.deepcopy(layer)
    assert shallow.inner.learner is shallow.learner
    assert deep.inner.learner is deep.learner is not layer.learner
