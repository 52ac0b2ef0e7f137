"""What the outer loop differentiates: everything, or with constants in the place of inner gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Call, outputs
from refusals_for_tests import refusal
from saved import SavedBytes
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import metattt
from metattt.inner.plan import Plan
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, Learner, Linear, Transformer
from metattt.optimizers import BlockMomentum, GradientDescent, InnerOptimizer, StateGated
from metattt.tasks import Reconstruction
from metattt.testing import Specimen
from metattt.testing.specimen import cotangent, distance

BOUND = 1e-9  # relative, float64
DIM = 8


def make(learner: Learner, rule: InnerOptimizer, **options: Any) -> TTTLayer:
    return Specimen(lambda: learner, Reconstruction, lambda: rule, DIM, options=options).make()


def descent(**settings: Any) -> GradientDescent:
    return GradientDescent(**{"mini_batch_size": 4, "lr_scale": "none", "base_lr": 0.3, **settings})


def tokens(length: int = 11, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_norms_of_gradients_are_constants_too() -> None:
    """Those that gates look at, also of a learner that mixes tokens; and no factor of a step is in them."""
    rule = StateGated(3, base_lr=0.3, lr_scale="none", read="previous")
    layer = make(Transformer(step_scale={"w1": 0.5}), rule, outer="first_order")  # type: ignore[call-arg]
    x, leaves = tokens(7), [one for one in layer.parameters() if one.requires_grad]
    found = []
    for y in (layer(x)[0], outputs(layer, [Call(x)])[0]):
        found.append(torch.autograd.grad((y * cotangent(y)).sum(), leaves, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_first_order_keeps_no_graph_of_second_order() -> None:
    def kept(outer: str) -> int:
        layer = make(MLP(), descent(), outer=outer, form="dual", group_size=0)
        with SavedBytes() as saved:
            y = layer(tokens(32))
        return saved.now if y else 0

    assert kept("first_order") < 0.6 * kept("exact")


def test_no_kernel_takes_another_derivative() -> None:
    assert make(Linear(), descent()).form == "fused"
    assert make(Linear(), descent(), outer="first_order").form == "dual"
    told = "no kernel for this combination (kernels: layer.outer=first_order"
    refusal(lambda: make(Linear(), descent(), outer="first_order", form="fused"), told)


# -- derivatives of other kinds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("form", ["auto", "dual", "summed", "primal"])
def test_forward_mode_without_a_transform(form: str, gradients: bool) -> None:
    """`torch.autograd.forward_ad` alone, inside `no_grad` too, also where a kernel or recomputation would run."""
    read = "previous" if form == "summed" else "inclusive"
    layer = TTTLayer(32, 2, Reconstruction(), Linear(), GradientDescent(16, read=read), form=form, group_size=1)
    x, tangent = torch.randn(2, 1, 33, 32).unbind(0)
    expected = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))[1]
    with forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))[0]).tangent
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["mesa_net", "gka"])
def test_forward_mode_of_a_solver(name: str) -> None:
    """Its derivative in reverse is a function of its own."""
    layer = metattt.build(f"layer={name}", dim=8, num_heads=2, seed=0).double()
    x, tangent, back = torch.randn(3, 1, 9, 8, dtype=torch.float64)
    found = torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))[1]
    (expected,) = torch.func.vjp(lambda x: layer(x)[0], x)[1](back)
    torch.testing.assert_close((found * back).sum(), (expected * tangent).sum())


# -- what recomputation would miss -------------------------------------------------------------------------------------


class ByClosure(Reconstruction):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.w = nn.Parameter(torch.ones(head_dim))
        self.weigh = lambda error: error * self.w

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return self.weigh((prediction - v).square()).sum(-1)


class ByViews(Reconstruction):
    """What `views` makes of all tokens is used in `loss`."""

    def views(self, x: Tensor, state: Any, ctx: Any) -> Any:
        self.mean = x.mean((1, 2)).sigmoid().view(-1, 1, 1)
        return super().views(x, state, ctx)

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        mean = getattr(self, "mean", torch.ones(1, 1, 1, dtype=v.dtype))  # a layer looks at its loss when it is built
        return super().loss(prediction, v) * (mean if len(mean) == len(v) else 1)


class ByGates(GradientDescent):
    """Token steps that `gates` makes."""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.w = nn.Parameter(torch.zeros(self.mini_batch_size))
        self.made = self.w.detach().sigmoid().unsqueeze(0)

    def gates(self, x: Tensor, state: Any, ctx: Any) -> Any:
        self.made = self.w.sigmoid().unsqueeze(0)
        return super().gates(x, state, ctx)

    def token_steps(self) -> Tensor:
        return self.made


BESIDE: dict[str, tuple[Any, Any]] = {
    "closure": (ByClosure, descent),
    "views": (ByViews, descent),
    "gates": (Reconstruction, lambda: ByGates(4)),
}


def beside(case: str, group_size: int, outer: str = "exact") -> TTTLayer:
    return Specimen(MLP, *BESIDE[case], DIM, options={"group_size": group_size, "outer": outer}).make()


@pytest.mark.parametrize("outer", ["exact", "first_order"])
@pytest.mark.parametrize("case", BESIDE)
def test_derivatives_reach_what_recomputation_would_miss(
    case: str, outer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter behind a closure, tensors made outside of the inner loop: in first and in second derivatives."""
    found, all_of = [], {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    for size in (0, 1, 2):
        layer, leaf = beside(case, size, outer), tokens().requires_grad_()
        leaves = [leaf, *layer.parameters()]
        first = torch.autograd.grad(layer(leaf)[0].square().sum(), leaves, **all_of)
        total = torch.stack([g.square().sum() for g in first]).sum()
        found.append([*first, *torch.autograd.grad(total, leaves, **all_of)])
    for *grouped, stored in zip(*found[1:], found[0], strict=True):
        assert all(distance(gradient, stored, 1e-3) < BOUND for gradient in grouped)
    expected = outer == "exact" or case == "gates"  # first_order takes no derivative of a loss
    assert ("every mini-batch is stored" in caplog.text) == expected


def test_a_closure_over_what_is_trained_later() -> None:
    x, layers = tokens(), [beside("closure", size) for size in (0, 2)]
    for needed in (False, True):
        for layer in layers:
            layer.task.w.requires_grad_(needed)
            layer(x)[0].square().sum().backward()
    stored, grouped = (layer.task.w.grad for layer in layers)
    assert distance(grouped, stored, 1e-3) < BOUND


@pytest.mark.parametrize("count", [11, 160])
def test_derivatives_of_what_is_reached_beside_a_frozen_layer(count: int) -> None:
    """Nothing that the layer holds is trained; a buffer that a caller puts into it, and a closure's tensor, are."""
    layer = beside("closure", 0).requires_grad_(False)
    layer.task.register_buffer("c", torch.ones(DIM // 2, dtype=torch.float64))
    x, given = torch.randn(1, count, DIM, dtype=torch.float64), layer.task.w.detach().clone().requires_grad_()
    expected = torch.autograd.grad(functional_call(layer, {"task.w": given}, (x,))[0].square().sum(), given)
    layer.task.weigh = lambda error: error * given
    torch.testing.assert_close(torch.autograd.grad(layer(x)[0].square().sum(), given), expected)
    layer.task.loss = lambda prediction, v: ((prediction - v).square() * layer.task.c).sum(-1)
    given = given.detach().requires_grad_()
    found = torch.autograd.grad(functional_call(layer, {"task.c": given}, (x,))[0].square().sum(), given)
    torch.testing.assert_close(found, expected)
    assert not layer(x)[0].requires_grad
    layer.group_size = 2  # also after a call in which no buffer required a derivative
    found = torch.autograd.grad(functional_call(layer, {"task.c": given}, (x,))[0].square().sum(), given)
    torch.testing.assert_close(found, expected)


def test_shapes_of_a_long_sequence_without_numbers() -> None:
    for needed in (True, False):
        layer = make(MLP(), descent()).to("meta").requires_grad_(needed)
        assert layer(torch.empty(1, 160, DIM, dtype=torch.float64, device="meta"))[0].requires_grad == needed


class InTraining(Linear):
    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        y = super().forward(w, x)
        return y * SCALE if self.training else y


SCALE = torch.ones(DIM // 2, dtype=torch.float64, requires_grad=True)


def test_what_is_reached_in_training_alone() -> None:
    layer, found = make(InTraining(), descent(), group_size=2), []
    layer.eval()(tokens())[0].sum().backward()
    layer.train()
    for size in (2, 0):
        layer.group_size = size
        found += torch.autograd.grad(layer(tokens())[0].square().sum(), SCALE)
    torch.testing.assert_close(*found)


def test_nothing_of_ours_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules and learners whose gradients are made in other ways, frozen weights and a checkpoint around the layer."""
    monkeypatch.setattr(Plan, "say_stored", lambda self, beside: pytest.fail(str(beside)))
    for learner, rule, options in (
        (Linear(learn_init=False), descent(), {}),
        (Linear(), descent(read="previous", steps=2), {"form": "summed"}),
        (MLP(learn_init=False), descent(max_norm=0.1), {"form": "primal"}),
        (MLP(), descent(read="final", steps=2), {}),
        (Transformer(), descent(read="previous"), {}),
        (MLP(), BlockMomentum(4, orthogonalize=True), {"outer": "first_order"}),
    ):
        layer = make(learner, rule, group_size=1, **options)
        layer.learner.requires_grad_(rule.steps > 1)
        x = tokens().requires_grad_()
        checkpoint(lambda x, layer=layer: layer(x)[0], x, use_reentrant=False).square().sum().backward()
        assert x.grad is not None


def test_a_call_of_any_mode_goes_on_from_a_state_of_inference_mode() -> None:
    layer, x = make(MLP(), descent()), tokens()
    with torch.inference_mode():
        (_, state), expected = layer(x[:, :7]), layer(x)[0][:, 7:]
    for needed, mode in ((True, torch.no_grad), (True, torch.enable_grad), (False, torch.enable_grad)):
        y = mode()(layer.requires_grad_(needed).forward)(x[:, 7:], state)[0]
        torch.testing.assert_close(y, expected)
        assert y.requires_grad == (needed and mode is torch.enable_grad)
