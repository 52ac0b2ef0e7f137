"""Which weights of a learner are fast, and steps of their own size for each: against plain loops, in every form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metattt.composition.compose import build
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, KernelEstimator, Learner, Linear, ModuleLearner, Transformer, Weight
from metattt.optimizers import GradientDescent, Momentum
from metattt.optimizers.block import Adam, BlockMomentum, Sign
from metattt.state import State
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Run, compare, cotangent, gradients, randomize, run

BOUND = 1e-9  # relative, float64
DIM, HEADS = 8, 2


def make(learner: Learner, form: str = "auto", **rule: Any) -> TTTLayer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"mini_batch_size": 4, "lr_scale": "none", "base_lr": 0.2} | rule
    layer = TTTLayer(DIM, HEADS, Reconstruction(), learner, GradientDescent(**settings), form=form).double()
    randomize(layer)
    return layer


def tokens(length: int = 11) -> Tensor:
    return torch.randn(2, length, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def plain(layer: TTTLayer, x: Tensor, scales: Mapping[str, float], max_norm: float | None = None) -> Run:
    """`W_t = W_a − c Σ_{s≤t} η_s ∇ℓ_s(W_a)` for a two-layer MLP with norm and residual, one token at a time."""
    x = x.detach().requires_grad_()
    start = State(torch.zeros(len(x), dtype=torch.long), 0, {}, {}, {}, {})
    ctx = layer.call(x, start).ctx
    views, gates, *_ = layer.tokens(x, start, ctx)
    learner, size = layer.learner, layer.optimizer.mini_batch_size
    slow = {name: value.unsqueeze(0) for name, value in learner.slow.items()}

    def f(weights: Mapping[str, Tensor], z: Tensor) -> Tensor:  # z [B, H, d]
        h = z
        for layer_number in ("1", "2"):
            w, b = (weights[n + layer_number] for n in "wb")
            h = (h.unsqueeze(-2) @ w).squeeze(-2) + b
            h = F.gelu(h, approximate="tanh") if layer_number == "1" else h
        mean, var = h.mean(-1, keepdim=True), h.var(-1, keepdim=True, unbiased=False)
        return z + (h - mean) / (var + 1e-6).sqrt() * weights["norm_scale"] + weights["norm_bias"]

    committed = {name: w.unsqueeze(0).expand(len(x), *w.shape) for name, w in learner.init.items()}
    moved = {name: torch.zeros_like(w) for name, w in committed.items()}
    rows = []
    for t in range(x.shape[1]):
        k, v, q = (view[:, :, t] for view in views[:3])
        at = {name: w if w.requires_grad else w.detach().requires_grad_() for name, w in committed.items()}
        loss = layer.task.loss(f(slow | at, k).unsqueeze(2), v.unsqueeze(2)).sum()
        found = torch.autograd.grad(loss, list(at.values()), create_graph=True)
        for name, g in zip(at, found, strict=True):
            eta = gates.eta[:, :, t].view(*g.shape[:2], *(1,) * (g.ndim - 2))
            moved[name] = moved[name] - eta * scales.get(name, 1.0) * g
        factor = torch.ones(()).double()
        if max_norm is not None:
            norm = sum(m.flatten(2).square().sum(-1) for m in moved.values()).sqrt()  # type: ignore[union-attr]
            factor = (max_norm / norm).clamp(max=1.0)
        now = {
            name: w + (factor.view(*factor.shape, *(1,) * (w.ndim - 2)) if factor.ndim else factor) * moved[name]
            for name, w in committed.items()
        }
        rows.append(f(slow | now, q))
        if (t + 1) % size == 0:
            committed, moved = now, {name: torch.zeros_like(w) for name, w in now.items()}
    y = layer.out(layer.norm(torch.stack(rows, 1).flatten(2)))  # type: ignore[misc]
    return Run(y.detach(), None, gradients(layer, x, (y * cotangent(y)).sum()))  # type: ignore[arg-type]


CHOICES: dict[str, dict[str, Any]] = {
    "last layer": {"trainable": ["w2", "b2"]},
    "first matrix": {"trainable": ["w1"]},
    "biases": {"trainable": ["b1", "b2"]},
    "norm": {"trainable": ["w2", "norm_scale", "norm_bias"]},
    "factors": {"step_scale": {"w1": 0.25, "b1": 3.0, "w2": 0.5}},
    "pair": {"step_scale": {"w1": 0.5, "b1": 0.5}},
    "both": {"trainable": ["w1", "b1", "b2"], "step_scale": {"b1": 2.0}},
    "by depth": {"step_scale": 0.5},
}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("choice", CHOICES)
def test_forms_and_a_plain_loop_agree(choice: str, max_norm: float | None) -> None:
    x = tokens()
    layers = {form: make(MLP(**CHOICES[choice]), form, max_norm=max_norm) for form in ("primal", "dual")}
    scales = {"w1": 0.5, "b1": 0.5} if choice == "by depth" else CHOICES[choice].get("step_scale", {})
    expected = plain(layers["primal"], x, scales, max_norm)
    for layer in layers.values():
        assert compare(run(layer, x, grads=True), expected) < BOUND
        assert compare(run(layer, x, [1, 3, 6], grads=True), expected) < BOUND


@pytest.mark.parametrize("choice", CHOICES)
def test_the_summed_form(choice: str) -> None:
    x = tokens()
    found = [
        run(make(MLP(**CHOICES[choice]), form, read="previous", steps=2), x, grads=True)
        for form in ("primal", "dual", "summed")
    ]
    assert max(compare(one, found[0]) for one in found[1:]) < BOUND


@pytest.mark.parametrize("scale", [{"w1": 0.5}, {"b1": 3.0}, {"w1": 2.0, "b1": 0.3}])
@pytest.mark.parametrize("gradient_at", ["previous", "decayed"])
def test_the_solved_form(scale: dict[str, float], gradient_at: Any) -> None:
    def one(form: str) -> TTTLayer:
        torch.manual_seed(0)
        rule = Momentum(16, "online", base_lr=0.3, lr_scale="none", decay="per_head", gradient_at=gradient_at)
        learner = Linear(residual=False, norm=False, step_scale=scale)  # type: ignore[call-arg]
        layer = TTTLayer(DIM, HEADS, Reconstruction(), learner, rule, form=form).double()
        randomize(layer)
        return layer

    assert one("auto").plan.form == "solved"
    assert compare(run(one("auto"), tokens(), grads=True), run(one("primal"), tokens(), grads=True)) < BOUND


@pytest.mark.parametrize("trainable", [["w1"], ["b1"]])
def test_a_linear_map_that_is_partly_slow_is_not_solved(trainable: list[str]) -> None:
    def one(form: str) -> TTTLayer:
        learner = Linear(residual=False, norm=False, trainable=trainable)  # type: ignore[call-arg]
        return make(learner, form, anchor="online", mini_batch_size=16)

    assert one("auto").plan.form == "dual"
    assert "trainable" in one("auto").plan.reasons["solved"]
    assert compare(run(one("auto"), tokens(), grads=True), run(one("primal"), tokens(), grads=True)) < BOUND


def test_a_learner_that_mixes_tokens() -> None:
    """Against the summed form, which takes its gradients in another way: the weights that mini-batches leave."""
    names = list(make(Transformer(num_heads=2), read="previous").learner.init)
    options: dict[str, Any] = {"trainable": names[:4], "step_scale": {names[0]: 0.5, names[1]: 3.0}}
    each, all_ = (make(Transformer(num_heads=2, **options), read=read) for read in ("inclusive", "previous"))
    assert (each.plan.form, all_.plan.form) == ("mixed", "summed")
    left, right = (run(layer, tokens(8)).state.weights["commit"] for layer in (each, all_))
    assert set(left) == set(names[:4])
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-12)


def test_the_same_factor_for_all_is_a_larger_step() -> None:
    scaled = make(MLP(step_scale=dict.fromkeys(("w1", "b1", "w2", "b2"), 0.5)))  # type: ignore[call-arg]
    assert compare(run(scaled, tokens(), grads=True), run(make(MLP(), base_lr=0.1), tokens(), grads=True)) < BOUND


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


class Apart(nn.Module):
    """A module that does with its matrix what no primitive does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.eye(4) / 2), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.matrix_exp(self.weight) + self.shift


def test_any_module() -> None:
    options: dict[str, Any] = {"trainable": ["2/weight", "2/bias"], "step_scale": {"2/weight": 0.5}}
    layers = [make(ModuleLearner(net(), **options), form) for form in ("primal", "dual")]
    assert set(layers[0].learner.init) == {"2/weight", "2/bias"}
    assert set(layers[0].learner.slow) == {"0/weight", "0/bias"}
    assert compare(*[run(layer, tokens(), grads=True) for layer in layers]) < BOUND
    by_depth = make(ModuleLearner(net(), step_scale=0.1)).learner  # type: ignore[call-arg]
    assert by_depth.step_scales == {"0/weight": 0.1, "0/bias": 0.1}
    apart = [make(ModuleLearner(Apart(), trainable=["shift"]), form) for form in ("primal", "auto")]  # type: ignore[call-arg]
    assert compare(*[run(layer, tokens(), grads=True) for layer in apart]) < BOUND
    apart = [
        make(ModuleLearner(Apart(), step_scale={"weight": 0.1}), form, read="previous") for form in ("primal", "summed")
    ]  # type: ignore[call-arg]
    assert compare(*[run(layer, tokens(), grads=True) for layer in apart]) < BOUND


class Own(Learner):
    """A user's learner, whose constructor knows nothing of either setting."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {
            "up": Weight((d_in, self.width)),
            "down": Weight((self.width, d_out)),
            "mean": Weight((d_out,), fast=False),
        }

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.bias(w.linear(torch.tanh(w.linear(x, "up")), "down"), "mean")


def test_a_learner_of_ones_own() -> None:
    layers = [make(Own(5, trainable=["down", "mean"], step_scale={"mean": 0.1}), form) for form in ("primal", "dual")]  # type: ignore[call-arg]
    assert (set(layers[0].learner.init), set(layers[0].learner.slow)) == ({"down", "mean"}, {"up"})
    assert compare(*[run(layer, tokens(), grads=True) for layer in layers]) < BOUND
    assert "trainable=['down', 'mean']" in repr(layers[0].learner)
    with pytest.raises(MetaTTTError, match="names of Own's weights show none: give factors by name, of up, down"):
        make(Own(step_scale=0.5))  # type: ignore[call-arg]


def test_slow_weights_are_trained_by_the_outer_loop() -> None:
    layer = make(MLP(trainable=["w2", "b2"], learn_init=False))  # type: ignore[call-arg]
    layer(tokens())[0].sum().backward()
    assert layer.learner.slow["w1"].grad is not None
    assert layer.learner.init["w2"].grad is None


def test_kernels_leave_both_alone() -> None:
    for options in ({"trainable": ["w1"]}, {"step_scale": {"w1": 0.5}}):
        layer = make(Linear(**options))
        assert layer.form == "dual"
        with pytest.raises(MetaTTTError, match=r"layer\.form=fused has no kernel"):
            make(Linear(**options), "fused")
    assert make(Linear()).form == "fused"
    assert make(Linear(step_scale={"w1": 1.0})).form == "fused"  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"trainable": ["w9"]},
            "learner.trainable names w9: the weights of MLP are w1, b1, w2, b2, norm_scale, norm_bias",
        ),
        ({"trainable": []}, "learner.trainable=[] leaves the inner loop nothing to learn: name one of w1"),
        ({"trainable": "w1"}, "learner.trainable=w1 is not allowed: it must be a list of w1, b1"),
        ({"step_scale": {"w9": 1.0}}, "learner.step_scale names w9: the fast weights of MLP are w1, b1, w2, b2"),
        ({"trainable": ["w2"], "step_scale": {"w1": 0.5}}, "the fast weights of MLP are w2"),
        ({"step_scale": {"w1": 0}}, "learner.step_scale.w1=0 is not allowed"),
        ({"step_scale": -1.0}, "learner.step_scale=-1.0 is not allowed"),
    ],
)
def test_mistakes(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MetaTTTError) as caught:
        make(MLP(**options))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_that_do_not_look_at_the_length_of_gradients() -> None:
    for rule in (Sign(), Adam(), BlockMomentum(orthogonalize=True)):
        with pytest.raises(MetaTTTError, match=r"set learner\.step_scale=null"):
            TTTLayer(DIM, HEADS, Reconstruction(), MLP(step_scale=0.5), rule)  # type: ignore[call-arg]


def test_learners_without_weights() -> None:
    from metattt.optimizers import Append

    for options in ({"trainable": ["w1"]}, {"step_scale": 0.5}):
        with pytest.raises(MetaTTTError, match="KernelEstimator keeps its data"):
            TTTLayer(DIM, HEADS, Reconstruction(), KernelEstimator(**options), Append())


def test_overrides() -> None:
    layer = build("layer=ttt_mlp", "dim=8", "num_heads=2", "learner.trainable=[w2,b2]", "learner.step_scale={w2: 0.5}")
    assert (list(layer.learner.init), layer.learner.step_scales) == (["w2", "b2"], {"w2": 0.5})
    assert build("layer=ttt_mlp", "dim=8", "num_heads=2", "learner.step_scale=0.5").learner.step_scales == {
        "w1": 0.5,
        "b1": 0.5,
    }
    assert build("layer=lact", "dim=8", "num_heads=2", "learner.trainable=[w1]").learner.init.keys() == {"w1"}
    with pytest.raises(MetaTTTError, match="trainable"):
        build("layer=ttt_mlp", "learner.trainble=[w2]")
