"""No fast path believes a name or a flag: what it assumes of the parts is evaluated, and asked again when they
change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, Learner, Linear
from metattt.optimizers import GradientDescent, InnerOptimizer
from metattt.tasks import Reconstruction, Task
from metattt.testing.specimen import compare, run

BOUND = 1e-9  # relative, float64


class L1(Reconstruction):
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return (prediction - v).abs().sum(-1)


class TenTimes(Reconstruction):
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return 10 * super().loss(prediction, v)


class NearZero(Reconstruction):
    """Squared, but for large errors."""

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        error = (prediction - v).abs()
        return torch.where(error < 8, 0.5 * error.square(), 8 * error - 32).sum(-1)


class Weighted(Reconstruction):
    """Squared, as long as its parameter has its first value."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.importance = nn.Parameter(torch.ones(head_dim))

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return 0.5 * ((prediction - v).square() * self.importance.to(v.dtype)).sum(-1)


class WhileTraining(Reconstruction):
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return super().loss(prediction, v) * (1 if self.training else 2)


class Bent(Linear):
    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(w, x))


class BentMLP(MLP):
    def wrap(self, w: FastWeights, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().wrap(w, x, y)


def plain() -> Learner:
    return Linear(residual=False, norm=False)


LOSSES = {"l1": L1, "ten times": TenTimes, "near zero": NearZero, "weighted": Weighted, "while training": WhileTraining}
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
    layers = []
    for form in ("auto", "primal"):
        torch.manual_seed(0)
        layers.append(made(LOSSES[loss](), LEARNERS[learner](), rule(learner), form))
    layer, oracle = layers
    assert layer.form == "dual"
    assert layer.plan.form == "dual"
    assert any(LOSSES[loss].__name__ in why for why in layer.plan.reasons.values())
    for mode in (True, False):
        assert compare(run(layer.train(mode), x(), grads=True), run(oracle.train(mode), x(), grads=True)) < BOUND


@pytest.mark.parametrize("kind", ["linear", "mlp", "online"])
def test_a_learner_with_a_forward_of_its_own(kind: str) -> None:
    def learner() -> Learner:
        return {"linear": Bent(), "mlp": BentMLP(), "online": Bent(residual=False, norm=False)}[kind]

    optimizer = rule("online linear" if kind == "online" else kind)
    layer, oracle = (
        made(Reconstruction(), learner(), optimizer),
        made(Reconstruction(), learner(), copy.deepcopy(rule(kind)), "primal"),
    )
    if kind == "online":
        oracle = made(Reconstruction(), learner(), rule("online linear"), "primal")
    assert layer.form == layer.plan.form == "dual"
    assert compare(run(layer, x(), grads=True), run(oracle, x(), grads=True)) < BOUND


def test_what_is_squared_error_by_itself_is_taken() -> None:
    class Mine(Task):
        squared_error = True

        def build(self, dim: int, num_heads: int, head_dim: int) -> None:
            self.shape = num_heads, head_dim

        def views(self, x: Tensor, state: Any, ctx: Any) -> Any:
            from metattt.tasks.base import Views

            heads = x.unflatten(-1, self.shape).transpose(1, 2)
            return Views(heads, heads, heads), state

        def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
            return (prediction - v).pow(2).sum(-1) / 2

    assert made(Mine(), Linear(), GradientDescent(4)).form == "fused"
    assert made(Mine(), plain(), GradientDescent(4, "online")).plan.form == "solved"


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
    monkeypatch.setattr(Reconstruction, "loss", L1.loss)
    assert layer.form == "dual"
    assert not torch.allclose(run(layer, x()).y, before)
    monkeypatch.undo()
    layer.learner.forward = lambda w, x: torch.tanh(Linear.forward(layer.learner, w, x))  # type: ignore[method-assign, arg-type]
    assert layer.form == "dual"


def test_parts_cannot_be_replaced() -> None:
    layer = made(Reconstruction(), Linear(), GradientDescent(4))
    for name, other in (("learner", MLP()), ("task", Reconstruction()), ("optimizer", GradientDescent(4))):
        with pytest.raises(MetaTTTError, match=f"layer.{name} was made together"):
            setattr(layer, name, other)


def test_a_refused_constructor_leaves_its_parts_free() -> None:
    task, learner, optimizer = Reconstruction(rope="mini_batch"), Linear(), GradientDescent(4)
    with pytest.raises(MetaTTTError, match="head width 3 is odd"):
        TTTLayer(6, 2, task, learner, optimizer)
    with pytest.raises(MetaTTTError, match="summed"):
        TTTLayer(8, 2, task, learner, optimizer, form="summed")
    layer = TTTLayer(8, 2, task, learner, optimizer)
    with pytest.raises(MetaTTTError, match="already belongs to a layer"):
        TTTLayer(8, 2, task, Linear(), GradientDescent(4))
    assert layer(torch.randn(1, 5, 8))[0].shape == (1, 5, 8)


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


@pytest.mark.parametrize("form", ["auto", "dual", "primal"])
def test_many_threads_share_a_layer(form: str) -> None:
    """Recomputation puts parameters into copies of the parts, where no other thread finds them."""
    layer = made(Reconstruction("shared_qk"), MLP(), GradientDescent(4, token_steps="shared"), form)
    layer.group_size = 1
    given = [torch.randn(1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    parameters = list(layer.parameters())

    def once(tokens: Tensor) -> list[Tensor]:
        y, _ = layer(tokens)
        return [y, *torch.autograd.grad(y.square().sum(), parameters, allow_unused=True, materialize_grads=True)]

    expected = [once(tokens) for tokens in given]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(4):
                for found, wanted in zip(once(given[i]), expected[i], strict=True):
                    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-13)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# -- a state that a user holds is the user's ---------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["inclusive", "previous"])
@pytest.mark.parametrize("anchor", ["minibatch", "batch", "online"])
def test_a_state_shares_no_memory_with_parameters(anchor: str, read: str) -> None:
    layer = made(Reconstruction(), Linear(), GradientDescent(8, anchor, read))  # type: ignore[arg-type]
    kept = {name: value.clone() for name, value in layer.named_parameters()}
    with torch.no_grad():
        _, state = layer(x(3))
        layer(x(5), state)
        for weights in state.weights.values():
            for value in weights.values():
                value.add_(1)
    assert all(torch.equal(value, kept[name]) for name, value in layer.named_parameters())
    with torch.no_grad():
        _, state = layer(x(3))
        state = state.detach()
        held = [value.clone() for weights in state.weights.values() for value in weights.values()]
        for parameter in layer.parameters():  # an optimizer's step between two pieces of a sequence
            parameter.add_(1)
        assert all(map(torch.equal, held, (value for weights in state.weights.values() for value in weights.values())))


def test_a_loss_of_ones_own_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """`metattt check` says which form is taken, and why not the kernel."""
    from metattt.testing.report import why_this_form

    layer = made(L1(), Linear(), GradientDescent(4))
    assert "L1.loss is another loss than the closed form's" in why_this_form(layer, "auto")


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
