"""Tasks, learners and optimizers as objects: public, printed, built once or not at all, on one device, at sane
rates."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import metattt
from metattt.catalog.known_layers import known_layers
from metattt.composition.compose import load_components
from metattt.layer import TTTLayer
from metattt.learners import MLP, FastWeights, KernelEstimator, KernelRidge, Learner, Linear, ModuleLearner, Weight
from metattt.learners.log_linear import LogLinear
from metattt.optimizers import Append, BlockMomentum, GradientDescent, InnerOptimizer, Momentum, WholeSequence
from metattt.registry import REGISTERED
from metattt.setting import setting
from metattt.tasks import DecodedReconstruction, Reconstruction
from metattt.testing.specimen import Specimen, compare, run

KNOWN = known_layers()
FORMS = ("primal", "dual")


def layer(optimizer: InnerOptimizer, learner: Learner | None = None, **options: Any) -> TTTLayer:
    torch.manual_seed(0)
    return TTTLayer(16, 2, Reconstruction(), learner or Linear(), optimizer, **options)


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_registered_part_is_exported() -> None:
    load_components()
    for (group, name), target in REGISTERED.items():
        module, _, cls = target.rpartition(".")
        if group in ("learner", "task", "optimizer") and module.startswith("metattt."):
            package = importlib.import_module(f"metattt.{group}s")
            assert cls in package.__all__ and getattr(package, cls).__module__ == module, f"{group}={name}"


# -- built once, or not at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", [{"form": "summed"}, {"dim": 12, "num_heads": 4}])
def test_a_layer_that_refuses_lets_go_of_its_parts(mistake: dict[str, Any]) -> None:
    parts = (Reconstruction(rope="full"), MLP(), GradientDescent(4, token_steps="shared"))
    names = ("task", "learner", "optimizer")
    refusal(lambda: TTTLayer(**{"dim": 16, "num_heads": 2, **dict(zip(names, parts, strict=True)), **mistake}))
    assert not any(part.belongs or list(part.parameters()) for part in parts)
    y, _ = TTTLayer(16, 2, *parts)(torch.randn(1, 5, 16))
    assert y.shape == (1, 5, 16)


def test_copies_of_an_unbuilt_part_are_parts_of_their_own() -> None:
    for first in (Linear(), ModuleLearner(nn.Linear(8, 8))):
        second = copy.copy(first)
        a, b = layer(GradientDescent(4), first), layer(GradientDescent(4), second)
        assert not {id(p) for p in a.parameters()} & {id(p) for p in b.parameters()}
        assert compare(run(a, torch.ones(1, 5, 16)), run(b, torch.ones(1, 5, 16))) == 0


# -- devices and types -------------------------------------------------------------------------------------------------


class Constants(nn.Module):
    """Constants of every kind beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0, 1, 8), persistent=False)

    shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) * self.frozen + self.shift


PARTS: dict[str, Callable[[], TTTLayer]] = {
    "decoded": lambda: TTTLayer(16, 2, DecodedReconstruction(), MLP(init="xavier", norm=False, residual=False), WholeSequence()),
    "module": lambda: layer(GradientDescent(4), ModuleLearner(Constants(), residual=True, norm=True)),
    "gates": lambda: layer(Momentum(4, decay="mamba2", momentum="shared")),
    "retnet": lambda: layer(Momentum(4, decay="retnet", momentum="none")),
    "block": lambda: layer(BlockMomentum(4, lr="per_weight")),
    **{name: (lambda name=name: metattt.build(f"layer={name}", "dim=16", "num_heads=2")) for name in KNOWN},
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_are_made_on_one_device(name: str) -> None:
    with torch.device("meta"):
        blank = PARTS[name]()
    assert all(tensor.is_meta for tensor in (*blank.parameters(), *blank.buffers()))
    if name == "module":  # its constants were given, and have no values now
        return
    blank.to_empty(device="cpu")
    for tensor in (*blank.parameters(), *blank.buffers()):
        tensor.data.fill_(torch.nan)  # what `to_empty` may leave
    made = PARTS[name]()
    blank.load_state_dict(made.state_dict())
    x = torch.randn(1, 9, 16)
    outputs = []
    for built in (made, blank):
        torch.manual_seed(0)
        outputs.append(built(x)[0])
    assert torch.equal(*outputs)


# -- parts of one's own, with a slip -----------------------------------------------------------------------------------


class Numbers(Learner):
    """Weights of one number each, which meet all features of a token."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out)), "c": Weight((1,), value=0.1), "g": Weight((1,), value=0.7)}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.bias(w.scale(w.linear(x, "w", "c").tanh(), "g"), "c")


class Row(Learner):
    """A weight that is a matrix with one row and a vector, and a product that sees the sum of a token alone."""

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((1, d_out))}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        return w.scale(w.linear(x.sum(-1, keepdim=True), "w"), "w")


def test_a_matrix_that_is_a_vector_too_has_no_dual_form() -> None:
    assert layer(GradientDescent(4), Row()).form == "primal"
    refusal(lambda: layer(GradientDescent(4), Row(), form="dual"), "dual cannot express Row: w is used as a matrix and as a vector")


class OfRows(Learner):
    """A map made of a product with other rows than those of the tokens, as many as a mini-batch has or one."""

    count: int = setting(default=8)

    def weights(self, d_in: int, d_out: int) -> dict[str, Weight]:
        return {"w": Weight((d_in, d_out), std=0.5), "own": Weight((d_in, d_out), std=0.5)}

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        rows = torch.eye(x.shape[-1], dtype=x.dtype)[: self.count].expand(*x.shape[:2], -1, -1)
        made = torch.tanh(w.linear(rows, "w"))
        return w.linear(x, "own") + (x @ made if self.count == x.shape[-1] else made)


class InPlace(Reconstruction):
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return prediction.sub_(v).square_().sum(-1)


@pytest.mark.parametrize("read", ["inclusive", "previous"])
@pytest.mark.parametrize(("make", "task", "why"), [
    (OfRows, Reconstruction, r"a weight is applied to \[2, 2, 8, 8\], which are no rows of the tokens \[2, 2, 1, 8\]"),
    (lambda: OfRows(1), Reconstruction, r"a weight is applied to \[2, 2, 1, 8\], which are no rows of the tokens"),
    (lambda: MLP(residual=False, norm=False), InPlace, "or has made, is changed in place"),
    (lambda: Linear(residual=False, norm=False), InPlace, "or has made, is changed in place"),
])  # fmt: skip
def test_what_dual_would_compute_wrong_takes_another_form(make: Any, task: Any, why: str, read: Any) -> None:
    def made(form: str) -> TTTLayer:
        return Specimen(make, task, lambda: GradientDescent(8, read=read), 16, 2, {"form": form}, 8).make()

    refusal(lambda: made("dual"), match=why)
    x = torch.randn(2, 18, 16, dtype=torch.float64)
    assert compare(run(made("auto"), x, grads=True), run(made("primal"), x, grads=True)) <= 1e-9


def constant(w: FastWeights, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = w.linear(x, "other").sigmoid()
    return w.linear(w.linear(x, "other").detach(), "w") * gate


def mine_of(forward: Callable[[FastWeights, Tensor], Tensor]) -> type[Learner]:
    def weights(self: Learner, d_in: int, d_out: int) -> dict[str, Weight]:
        shapes = {"w": (d_in, d_out), "other": (d_in, d_out), "column": (d_in, 1), "wide": (d_out,)}
        return {name: Weight(shape, std=0.5) for name, shape in shapes.items()}

    return type("Mine", (Learner,), {"weights": weights, "forward": lambda self, w, x: forward(w, x)})


class LearnedLoss(Reconstruction):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        super().build(dim, num_heads, head_dim)
        self.net = nn.Linear(head_dim, head_dim)

    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return squared(self.net(prediction), v)


DIFFERENTIATED: dict[str, tuple[Callable[[], Learner], type[Reconstruction], dict[str, Any]]] = {
    "constants": (mine_of(constant), Reconstruction, {}),
    "a checkpoint": (
        mine_of(lambda w, x: checkpoint(lambda x: w.linear(x, "w", "wide").tanh(), x, use_reentrant=False)), Reconstruction, {},
    ),
    "a bias wider than its matrix": (mine_of(lambda w, x: w.linear(x, "column", "wide").tanh() * w.linear(x, "w")), Reconstruction, {}),
    "a weight of one number": (Numbers, Reconstruction, {"base_lr": 0.5}),
    "a weight of one number, clipped": (Numbers, Reconstruction, {"base_lr": 0.5, "max_norm": 0.1}),
    "a loss with parameters": (MLP, LearnedLoss, {"base_lr": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_dual_differentiates_what_torch_does(name: str) -> None:
    learner, task, settings = DIFFERENTIATED[name]
    spec = Specimen(learner, task, lambda: GradientDescent(4, **settings))
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected, found = (run(spec.make(form=form), x, grads=True) for form in FORMS)
    assert compare(found, expected) <= 1e-9
    assert task is Reconstruction or expected.grads["task.net.weight"].any()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("learner", [KernelEstimator, KernelRidge, LogLinear])
def test_one_label_for_all_along_an_axis(learner: type[Learner], axis: int) -> None:
    """For a learner without weights, as if it were written out; also from call to call."""
    found = []
    for whole in (False, True):

        class One(Reconstruction):
            def views(self, x: Tensor, state: Any, ctx: Any) -> Any:
                views, state = super().views(x, state, ctx)
                v = torch.ones_like(views.v) if whole else torch.ones_like(views.v).narrow(axis, 0, 1)  # noqa: B023
                return views._replace(v=v), state

        torch.manual_seed(0)
        made = TTTLayer(16, 2, One(), learner(), Append()).double()
        x = torch.randn(2, 9, 16, dtype=torch.float64)
        y, state = made(x[:, :5])
        found.append(torch.cat([y, made(x[:, 5:], state)[0]], 1))
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["auto", "dual"])
@pytest.mark.parametrize("view", ["q", "v"])
def test_a_view_of_another_type_is_a_number_for_all_that(view: str, form: str) -> None:
    """Rounded to bf16 by the task, and computed with in the type of the layer."""
    rules = (
        ("squared", Linear(residual=False, norm=False), Momentum(1, "online")),
        ("dot", Linear(residual=False, norm=False, bias=False), GradientDescent(1, "online")),
    )
    for loss, learner, rule in rules:
        found = []
        for narrow in (False, True):

            class Rounded(Reconstruction):
                def views(self, x: Tensor, state: Any, ctx: Any) -> Any:
                    views, state = super().views(x, state, ctx)
                    rounded = getattr(views, view).bfloat16()
                    return views._replace(**{view: rounded if narrow else rounded.to(x.dtype)}), state  # noqa: B023

            torch.manual_seed(0)
            made = TTTLayer(16, 2, Rounded(loss=loss), copy.deepcopy(learner), copy.deepcopy(rule), form=form)
            found.append(made(torch.randn(2, 9, 16))[0])
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def mine(base: Any, name: str, value: Any, first: bool) -> Any:
    """A part whose constructor sets an attribute before that of its base class, or after it."""
    steps = [lambda self: setattr(self, name, value), base.__init__]

    def __init__(self: Any) -> None:
        for step in steps if first else reversed(steps):
            step(self)

    return type("Mine", (base,), {"__init__": __init__})()


@pytest.mark.parametrize(("base", "name", "first"), [
    (Linear, "init", True), (Linear, "belongs", False), (Reconstruction, "loss", False), (GradientDescent, "slots", True),
])  # fmt: skip
def test_a_name_that_the_base_class_uses(base: Any, name: str, first: bool) -> None:
    for value in ("xavier", nn.Linear(2, 2)):
        refusal(partial(mine, base, name, value, first), match=rf"Mine sets an attribute called '{name}', which \w+ has for its own use")
    refusal(lambda: type("Mine", (Linear,), {"init": "xavier"}), "'init', which Learner has for its own use")


class Averaged(Numbers):
    """Takes away the mean of the batch, with no derivative and no change in the values of one sequence."""

    def forward(self, w: FastWeights, x: Tensor) -> Tensor:
        y = super().forward(w, x)
        return y + y.mean(0) - y.mean(0).detach()


def squared(prediction: Tensor, v: Tensor) -> Tensor:
    return (prediction - v).square().sum(-1)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "normalised over the batch": (lambda p, v: squared(p / (p.square().mean(0) + 1).sqrt(), v), "the other sequences"),
    "divided by B": (lambda p, v: squared(p, v) / p.shape[0], "the other sequences"),
    "divided by T": (lambda p, v: squared(p, v) / p.shape[2], "later tokens, or on how many"),
    "by the token's index": (lambda p, v: squared(p, v) * torch.arange(p.shape[2]), "earlier tokens, or on its place"),
    "with other tokens, no derivative": (lambda p, v: squared(p, v) * p.detach().sum((2, 3), True)[..., 0], "later"),
    "normalised over heads": (lambda p, v: squared(p / (p.square().mean((1, 3), True) + 1).sqrt(), v), "the weights of other heads"),
    "with noise": (lambda p, v: squared(p + torch.randn_like(p), v), "chance"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_another_in_other_company(name: str) -> None:
    function, word = LOSSES[name]
    task = type("Mine", (Reconstruction,), {"loss": lambda self, p, v: function(p, v)})()
    refusal(lambda: TTTLayer(16, 2, task, MLP(), GradientDescent(4)), f"Mine.loss of what MLP predicts for a token depends on {word}")


def test_a_learner_that_is_another_in_other_company() -> None:
    mixing = type("Mine", (Averaged,), {"mixes_tokens": True})()
    for learner, read in ((Averaged(), "inclusive"), (mixing, "previous"), (copy.copy(mixing), "block")):
        refusal(partial(layer, GradientDescent(4, read=read), learner), "depends on the other sequences of its batch")
    for choice in (lambda x: x.sum() > 0, lambda x: (s := x.abs().sum((0, 1))) > s.mean(-1, True)):
        branch = type("Mine", (Numbers,), {"forward": lambda self, w, x: Numbers.forward(self, w, x * choice(x))})  # noqa: B023
        refusal(lambda: layer(GradientDescent(4), branch()), "other sequences of its batch")  # noqa: B023
    by_count = type("Mine", (Numbers,), {"forward": lambda self, w, x: Numbers.forward(self, w, x) / x.shape[2]})
    refusal(lambda: layer(GradientDescent(4), by_count()), "later tokens, or on how many there are")
    whole = by_count()
    whole.mixes_tokens = True
    assert layer(GradientDescent(4, read="block"), whole).form == "summed"  # it always sees a whole mini-batch
    silent, whole = type("Mine", (Reconstruction,), {"loss": lambda self, p, v: squared(p, v).detach()})(), by_count()
    whole.mixes_tokens = True
    refusal(lambda: TTTLayer(8, 2, silent, whole, GradientDescent(4, read="block")), "a derivative by the prediction")
