"""What the outer loop differentiates: everything, or with constants in the place of inner gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Call, outputs
from saved import SavedBytes
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from metattt.composition.compose import build
from metattt.errors import MetaTTTError
from metattt.inner import execution
from metattt.inner.plan import Plan
from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelEstimator, Learner, Linear, Transformer
from metattt.optimizers import Append, GradientDescent, InnerOptimizer, Momentum, StateGated, WholeSequence
from metattt.optimizers.block import BlockMomentum
from metattt.state import State
from metattt.tasks import Reconstruction
from metattt.testing import LAWS, Specimen
from metattt.testing.specimen import Run, compare, cotangent, distance, gradient_distance, gradients, randomize, run

BOUND = 1e-9  # relative, float64
DIM, HEADS = 8, 2


def make(learner: Learner, rule: InnerOptimizer, **options: Any) -> TTTLayer:
    torch.manual_seed(0)
    layer = TTTLayer(DIM, HEADS, Reconstruction(), learner, rule, **options).double()
    randomize(layer)
    return layer


def descent(**settings: Any) -> GradientDescent:
    return GradientDescent(**{"mini_batch_size": 4, "lr_scale": "none", "base_lr": 0.3, **settings})


def tokens(length: int = 11, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(2, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def observed(layer: TTTLayer, x: Tensor) -> tuple[Any, Any]:
    start = State(torch.zeros(len(x), dtype=torch.long), 0, {}, {}, {}, {})
    return layer.tokens(x, start, layer.call(x, start).ctx)[:2]


def plain(layer: TTTLayer, x: Tensor, *, online: bool, first_order: bool = True) -> Run:
    """`W_t = W_{t−1} − η_t sg[∇ℓ_t]` of a linear map with norm, gradients at the last commit or at W_{t−1}."""
    x = x.detach().requires_grad_()
    (k, v, q, *_), gates = observed(layer, x)
    learner, slow = layer.learner, dict(layer.learner.slow)

    def f(w: Tensor, b: Tensor, z: Tensor) -> Tensor:
        h = (z.unsqueeze(-2) @ w).squeeze(-2) + b
        if not slow:
            return h
        return z + F.layer_norm(h, h.shape[-1:], eps=1e-6) * slow["norm_scale"] + slow["norm_bias"]

    weights = [learner.init[name].unsqueeze(0).expand(len(x), *learner.init[name].shape) for name in ("w1", "b1")]
    at, rows = weights, []
    for t in range(x.shape[1]):
        point = [w.view_as(w) if w.requires_grad else w.detach().requires_grad_() for w in (weights if online else at)]
        loss = 0.5 * (f(*point, k[:, :, t]) - v[:, :, t]).square().sum()
        found = torch.autograd.grad(loss, point, create_graph=True)
        eta = gates.eta[:, :, t]
        steps = (g.detach() if first_order else g for g in found)
        weights = [w - eta.view(*eta.shape, *(1,) * (w.ndim - 2)) * g for w, g in zip(weights, steps, strict=True)]
        rows.append(f(*weights, q[:, :, t]))
        if (t + 1) % layer.optimizer.mini_batch_size == 0:
            at = weights
    y = layer.out(layer.norm(torch.stack(rows, 1).flatten(2)))  # type: ignore[misc]
    return Run(y.detach(), None, gradients(layer, x, (y * cotangent(y)).sum()))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("outer", ["exact", "first_order"])
def test_first_order_against_a_loop_with_detach(form: str, outer: str) -> None:
    layer = make(Linear(), descent(), form=form, outer=outer)
    expected = plain(layer, tokens(), online=False, first_order=outer == "first_order")
    for cuts in ((), (1, 3, 6)):
        assert compare(run(layer, tokens(), cuts, grads=True), expected) < BOUND
    grouped = make(Linear(), descent(), form=form, outer=outer, group_size=1)
    assert compare(run(grouped, tokens(), grads=True), expected) < BOUND


@pytest.mark.parametrize("form", ["primal", "auto"])
def test_first_order_of_an_online_rule(form: str) -> None:
    layer = make(
        Linear(residual=False, norm=False), descent(anchor="online", mini_batch_size=16), form=form, outer="first_order"
    )
    assert layer.plan.form == ("primal" if form == "primal" else "solved")
    assert compare(run(layer, tokens(), grads=True), plain(layer, tokens(), online=True)) < BOUND


RULES: dict[str, Any] = {
    "token steps": lambda: descent(token_steps="per_head"),
    "clipped": lambda: descent(max_norm=0.05),
    "momentum": lambda: Momentum(4, base_lr=0.3, lr_scale="none", decay="per_head", decay_to_init=True),
    "exclusive": lambda: descent(read="exclusive"),
    "previous": lambda: descent(read="previous", steps=2),
    "final": lambda: WholeSequence(steps=3, base_lr=4.0),
    "muon": lambda: BlockMomentum(4, orthogonalize=True, base_lr=0.3),
    "state gated": lambda: StateGated(4, base_lr=0.3, lr_scale="none", read="previous"),
}


@pytest.mark.parametrize("rule", RULES)
def test_first_order_is_the_same_function_in_every_form(rule: str) -> None:
    found = {}
    for form in ("primal", "dual", "summed"):
        try:
            layer = make(
                MLP(step_scale=0.5) if rule != "muon" else MLP(), RULES[rule](), form=form, outer="first_order"
            )  # type: ignore[call-arg]
        except MetaTTTError:
            assert form == "summed"
            continue
        found[form] = run(layer, tokens(), grads=True)
    exact = run(
        make(MLP(step_scale=0.5) if rule != "muon" else MLP(), RULES[rule](), form="primal"), tokens(), grads=True
    )  # type: ignore[call-arg]
    assert len(found) == (3 if rule in ("previous", "final", "muon", "state gated") else 2)
    for one in found.values():
        assert compare(one, found["primal"]) < BOUND
    torch.testing.assert_close(found["primal"].y, exact.y)
    assert gradient_distance(found["primal"].grads, exact.grads) > 1e-3  # another gradient, the same outputs


def test_first_order_of_a_learner_that_mixes_tokens() -> None:
    layers = [
        make(Transformer(num_heads=2), descent(read=read), outer="first_order") for read in ("inclusive", "previous")
    ]
    names = [name for name, p in layers[0].named_parameters() if p.requires_grad]
    found = []
    for layer in layers:  # the weights that a mini-batch leaves, by both ways of taking gradients
        left = layer(tokens(4))[1].weights["commit"]
        total = sum((w * cotangent(w)).sum() for w in left.values())
        grads = torch.autograd.grad(total, list(layer.parameters()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        found.append(dict(zip(names, grads, strict=True)))
    for name in names:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-9, atol=1e-12)


def test_norms_of_gradients_are_constants_too() -> None:
    """Those that gates look at, also of a learner that mixes tokens; and no factor of a step is in them."""
    rule = StateGated(3, base_lr=0.3, lr_scale="none", read="previous")
    layer = make(Transformer(step_scale={"w1": 0.5}), rule, outer="first_order")  # type: ignore[call-arg]
    x, leaves = tokens(7), [one for one in layer.parameters() if one.requires_grad]
    found = []
    for y in (layer(x)[0], outputs(layer, [Call(x)])[0]):
        found.append(torch.autograd.grad((y * cotangent(y)).sum(), leaves, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_what_first_order_cuts() -> None:
    layer = make(Linear(), descent(), outer="first_order")
    (layer(tokens())[0] * torch.linspace(-1, 1, DIM)).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    cut = {name for name, g in grads.items() if g is None or not g.any()}
    assert cut == {name for name in grads if name.startswith("task.") and "q" not in name.split(".")[1]}, cut
    assert {"learner.init.w1", "learner.slow.norm_scale", "optimizer.lr_weight"} <= grads.keys() - cut


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
    with pytest.raises(MetaTTTError, match=r"no kernel for this combination \(kernels: layer\.outer=first_order"):
        make(Linear(), descent(), outer="first_order", form="fused")


def test_other_mistakes() -> None:
    with pytest.raises(MetaTTTError, match=r"layer\.outer=second is not allowed"):
        make(Linear(), descent(), outer="second")
    with pytest.raises(MetaTTTError, match="KernelEstimator has none"):
        make(KernelEstimator(), Append(), outer="first_order")
    layer = make(Linear(), descent())
    with pytest.raises(MetaTTTError, match=r"layer\.outer=second is not allowed"):
        layer.outer = "second"  # type: ignore[assignment]


def test_overrides() -> None:
    layer = build("layer=ttt_linear", "layer.outer=first_order", "dim=8", "num_heads=2")
    assert "outer='first_order'" in repr(layer)
    with pytest.raises(MetaTTTError, match=r"layer\.outer"):
        build("layer=ttt_linear", "layer.outer=frist_order")


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


# -- what recomputation would miss -------------------------------------------------------------------------------------


class ByClosure(Reconstruction):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.w = nn.Parameter(torch.ones(head_dim))
        self.weigh = lambda error: error * self.w

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return self.weigh((prediction - v).square()).sum(-1)


class ByPartial(ByClosure):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.weigh = partial(torch.mul, self.w)


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
    "partial": (ByPartial, descent),
    "views": (ByViews, descent),
    "gates": (Reconstruction, lambda: ByGates(4)),
}


def beside(case: str, group_size: int, outer: str = "exact") -> TTTLayer:
    torch.manual_seed(0)
    task, rule = BESIDE[case]
    options: Any = {"group_size": group_size, "outer": outer}
    layer = TTTLayer(DIM, HEADS, task(), MLP(), rule(), **options).double()
    randomize(layer)
    return layer


@pytest.mark.parametrize("outer", ["exact", "first_order"])
@pytest.mark.parametrize("case", BESIDE)
def test_derivatives_reach_what_recomputation_would_miss(
    case: str, outer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A parameter behind a closure, tensors made outside of the inner loop: in first and in second derivatives."""
    x, found = tokens(), []
    for size in (0, 1, 2):
        layer, leaf = beside(case, size, outer), x.clone().requires_grad_()
        leaves = [leaf, *layer.parameters()]
        all_of = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(layer(leaf)[0].square().sum(), leaves, **all_of)
        total = torch.stack([g.square().sum() for g in first]).sum()
        found.append([*first, *torch.autograd.grad(total, leaves, **all_of)])
    for *grouped, stored in zip(*found[1:], found[0], strict=True):
        assert all(distance(gradient, stored, 1e-3) < BOUND for gradient in grouped)
    expected = outer == "exact" or case == "gates"  # first_order takes no derivative of a loss
    assert ("every mini-batch is stored" in caplog.text) == expected


@pytest.mark.parametrize("case", BESIDE)
def test_the_law_sees_what_recomputation_would_miss(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, rule = BESIDE[case]
    spec = Specimen(MLP, task, rule)
    assert LAWS["groups"].judge(spec).holds
    monkeypatch.setattr(execution, "captured", lambda *given: [])
    assert not LAWS["groups"].judge(spec).holds


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


def test_a_state_of_inference_mode_can_be_trained_on_when_it_is_cloned() -> None:
    layer, x = make(MLP(), descent()), tokens()
    with torch.inference_mode():
        _, state = layer(x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        layer(x, state)
    layer(x, state.map(torch.clone))[0].sum().backward()
    assert all(p.grad is not None for p in layer.task.parameters())
