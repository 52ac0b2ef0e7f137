"""Rules of one's own: what their gates hold is read off the gates, and what no form could keep is refused in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from metattt import optimizers
from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import MLP, KernelEstimator, Linear
from metattt.learners.base import Learner
from metattt.learners.weight import Weight
from metattt.modules import expand_like
from metattt.optimizers import BlockRule, Gates, GradientDescent, InnerOptimizer, Momentum, StepSize
from metattt.state import Context, DataGates, Tensors
from metattt.tasks import Reconstruction
from metattt.testing.laws import forms, splits
from metattt.testing.padding import masks
from metattt.testing.specimen import Specimen

BOUND = 1e-9
LETTERS = {"a": "alpha", "b": "beta", "k": "kappa"}
LINEAR_MAP = partial(Linear, bias=False, residual=False, norm=False)
task = partial(Reconstruction, normalize_qk=True)


class Own(InnerOptimizer):
    """Gates by their letters: α, β, κ of a head, w factors of the weights, d decays of channels. It says nothing of itself."""

    names = ""

    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        self.heads = num_heads
        self.maps = nn.ModuleDict({name: nn.Linear(dim, num_heads) for name in "e" + self.names if name not in "wd"})
        self.weight_lr = nn.Linear(dim, num_heads * len(self.weight_names))
        self.channels = nn.Linear(dim, dim)

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        found = {LETTERS.get(name, "eta"): linear(x).sigmoid().mT for name, linear in self.maps.items()}
        for letter, name, maps, sign in (("w", "weight_lr", self.weight_lr, 1), ("d", "decay", self.channels, -1)):
            if letter in self.names:
                found[name] = sign * maps(x).sigmoid().unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return Gates(**{**found, "eta": 0.3 * found["eta"]}), state


class Steps(Own):
    def token_steps(self) -> Tensor | None:
        return torch.linspace(1, 0.5, self.mini_batch_size, dtype=torch.float64).unsqueeze(0)


class PerMiniBatch(Own, BlockRule):
    def build(self, dim: int, num_heads: int, head_dim: int) -> None:
        BlockRule.build(self, dim, num_heads, head_dim)
        Own.build(self, dim, num_heads, head_dim)

    def move(self, memory: dict[str, Tensors], alpha: Tensor | None, beta: Tensor | None) -> dict[str, Tensors]:
        kept = torch.ones(1, 1) if alpha is None else alpha
        return {"commit": {name: expand_like(kept, w) * w + memory["update"][name] for name, w in memory["commit"].items()}}


def rule(base: type[InnerOptimizer], **attributes: Any) -> Callable[..., InnerOptimizer]:
    """A class with these attributes, for mini-batches of four tokens."""
    made: Any = type("Mine", (base,), attributes)
    return partial(made, mini_batch_size=4)


def online(**attributes: Any) -> Callable[..., InnerOptimizer]:
    return partial(rule(Own, **attributes), mini_batch_size=1, anchor="online")


def layer_of(make: Callable[..., InnerOptimizer], learner: Callable[..., Learner] = Linear, **options: Any) -> TTTLayer:
    return TTTLayer(8, 2, task(), learner(), make(), **options).double()


x = torch.randn(2, 11, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

EXACT: dict[str, tuple[Callable[..., Learner], Callable[..., InnerOptimizer]]] = {
    "momentum that nothing declares": (Linear, rule(Own, names="b")),
    "all gates": (Linear, rule(Own, names="abk", nesterov=True)),
    "all gates, solved": (LINEAR_MAP, online(names="abk", decay_to_init=True, gradient_at="decayed")),
    "no momentum where it is declared": (Linear, rule(Own, has_momentum=True, nesterov=True, decay_to_init=True)),
    "a write gate alone, MLP": (MLP, rule(Own, names="k")),
    "a write gate and channel decays": (LINEAR_MAP, online(names="dk")),
    "the same, read before": (LINEAR_MAP, partial(online(names="dk", gradient_at="decayed"), read="exclusive")),
    "weight_lr": (Linear, partial(rule(Own, names="aw"), read="previous")),
    "decay per mini-batch": (Linear, rule(PerMiniBatch, names="a")),
    "decay per mini-batch, by halves": (Linear, rule(PerMiniBatch, names="ak", update_decays=True)),
}


@pytest.mark.parametrize("name", EXACT)
def test_forms_and_splits_agree(name: str) -> None:
    learner, make = EXACT[name]
    if learner in (Linear, MLP):
        learner = partial(learner, residual=True, norm=True)
    spec = Specimen(learner, task, make)
    for law in (forms, splits, masks):
        assert law(spec) <= BOUND, law.__name__


def three_rates(x: Tensor) -> Gates:
    return Gates(x[..., :2].mT, weight_lr=x[..., None, :3].expand(-1, -1, 2, -1).transpose(1, 2))


REFUSED: dict[str, tuple[Callable[..., InnerOptimizer], str]] = {
    **{
        f"{what} and {name}": (make, rf"Mine gives {LETTERS[name]} beside {what}, .* optimizer\.{what}=")
        for name in LETTERS
        for what, make in (
            ("token_steps", rule(Steps, names=name)),
            ("max_norm", rule(Own, names=name, max_norm=0.1)),
        )
    },
    "rates by token": (rule(Own, names="w"), r"Mine gives weight_lr, .* set anchor=minibatch and read=previous"),
    "rates online": (partial(online(names="w"), read="previous"), r"Mine gives weight_lr, .*optimizer\.anchor=online"),
    "another number of rates": (
        partial(rule(Own, gates=lambda self, x, state, ctx: (three_rates(x), state)), read="previous"),
        r"Mine gives weight_lr of shape \[1, 2, 1, 3\], expected \[B, H, T, 2\]: one for each of w1, b1",
    ),
    "token steps per mini-batch": (
        rule(PerMiniBatch, token_steps=Steps.token_steps),
        "does not use token_steps, max_norm and nesterov",
    ),
    "clipping per mini-batch": (rule(PerMiniBatch, max_norm=0.1), "does not use token_steps, max_norm"),
    "decayed gradients by mini-batch": (rule(Own, names="a", gradient_at="decayed"), r"set optimizer\.anchor=online"),
    "token steps of another length": (
        rule(Own, token_steps=lambda self: torch.ones(1, 3)),
        r"Mine\.token_steps has shape \[1, 3\], expected \[1 or 2, 4\] for optimizer\.mini_batch_size=4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_the_layer_is_built(name: str) -> None:
    make, words = REFUSED[name]
    for form in ("auto", "primal", "dual", "fused"):
        with pytest.raises(MetaTTTError, match=words) as caught:
            layer_of(make, form=form)
        assert "\n" not in str(caught.value)


class Moody(Own):
    """Gates and token steps as the weather is."""

    weather = ""

    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        gates, state = super().gates(x, state, ctx)
        more = {name: torch.full_like(gates.eta, 0.5) for name in ("alpha", "beta") if name in self.weather}
        return gates._replace(**more), state

    def token_steps(self) -> Tensor | None:
        return torch.ones(1, self.mini_batch_size) if "steps" in self.weather else None


@pytest.mark.parametrize(
    ("attributes", "weather", "words"),
    [
        ({}, "beta", r"gives beta, and gave none when the layer was built: set has_momentum = True"),
        ({"max_norm": 0.1}, "alpha", "gives alpha beside max_norm"),
        ({}, "steps", "token_steps gives τ, and gave none when the layer was built"),
    ],
)
def test_what_comes_up_later_is_refused_before_anything_is_computed(
    attributes: dict[str, Any], weather: str, words: str
) -> None:
    layer = layer_of(rule(Moody, **attributes))
    layer(x)
    type(layer.optimizer).weather = weather  # type: ignore[attr-defined]  # not by assignment: nobody is told
    with pytest.raises(MetaTTTError, match=words):
        layer(x)
    layer.optimizer.note = "by assignment"  # type: ignore[assignment]
    if attributes:
        with pytest.raises(MetaTTTError, match=words):
            layer(x)
    else:
        y, state = layer(x[:, :5])
        torch.testing.assert_close(torch.cat([y, layer(x[:, 5:], state)[0]], 1), layer(x)[0])


def test_a_rule_that_cannot_be_asked_with_one_token_is_built() -> None:
    def gates(self: Own, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        if x.shape[1] == 1:
            raise ValueError("pairs only")
        return Own.gates(self, x, state, ctx)

    assert torch.equal(layer_of(rule(Own, gates=gates))(x)[1].pos, torch.tensor([11, 11]))
    with pytest.raises(MetaTTTError, match="set has_momentum = True on the class"):
        layer_of(rule(Own, names="b", gates=gates))(x)
    assert "momentum" in layer_of(rule(Own, names="b", gates=gates, has_momentum=True))(x)[1].weights


@pytest.mark.parametrize(("letter", "name"), [(1, "keep"), (0, "write")])
def test_gates_of_data_are_read_off_the_gates(letter: int, name: str) -> None:
    class Forgets(InnerOptimizer):
        updates = False

        def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[DataGates, Tensors]:
            gate = x[..., :1].sigmoid().mT
            given = [torch.ones_like(gate), None, None]
            given[letter] = gate
            return DataGates(*given), state  # type: ignore[arg-type]

    with pytest.raises(MetaTTTError, match=f"KernelEstimator does not use the {name} gate of its rule"):
        TTTLayer(8, 2, task(), KernelEstimator(), Forgets())


# -- settings that are assigned later ------------------------------------------------------------------------------------


def another(kind: Any, value: Any) -> list[Any]:
    """Other values of a setting, from its type."""
    choices = [one for part in (kind, *get_args(kind)) for one in get_args(part) if isinstance(one, str)]
    if choices:
        return [one for one in choices if one != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    return [0.5 * value] if isinstance(value, float) else [1] if value is None else []


OURS = [getattr(optimizers, name) for name in optimizers.__all__]


@pytest.mark.parametrize(
    "kind", [kind for kind in OURS if issubclass(kind, InnerOptimizer) and not inspect.isabstract(kind) and kind != StepSize]
)
def test_settings_assigned_later_take_effect_or_are_refused(kind: type[InnerOptimizer]) -> None:
    parameters = list(inspect.signature(kind).parameters.values())
    learner = LINEAR_MAP if kind().updates else KernelEstimator

    def build(**settings: Any) -> TTTLayer:
        torch.manual_seed(0)
        return TTTLayer(8, 2, task(), learner(), kind(**settings)).double()

    for parameter in parameters:
        hint = get_type_hints(kind.__init__)[parameter.name]
        for value in another(hint, parameter.default):
            layer = build()
            try:
                setattr(layer.optimizer, parameter.name, value)
                found = layer(x)[0]
                expected = build(**{parameter.name: value})
            except MetaTTTError:
                continue
            expected.load_state_dict(layer.state_dict())
            torch.testing.assert_close(found, expected(x)[0], msg=f"{parameter.name}={value}")


def test_settings_that_come_too_late() -> None:
    layer = layer_of(partial(GradientDescent, 4, token_steps="shared"))
    for name, value in (("base_lr", 0.5), ("lr_scale", "none"), ("token_steps", "none"), ("mini_batch_size", 8)):
        with pytest.raises(MetaTTTError, match=rf"GradientDescent\.{name} = .* comes too late, .* {name}={value}"):
            setattr(layer.optimizer, name, value)
    layer.optimizer.base_lr = 1.0  # as it is
    with pytest.raises(MetaTTTError, match=r"Momentum\.momentum = 'none' comes too late"):
        layer_of(Momentum).optimizer.momentum = "none"
    layer.optimizer.steps = 2
    with pytest.raises(MetaTTTError, match=r"optimizer\.steps=2 .* would show queries the future"):
        layer(x)


class Forgetful(BlockRule):
    """A slot that it names and does not return would be zero in every mini-batch."""

    own_slots = ("squares",)

    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        return {"commit": memory["commit"]}


class Bare(Forgetful):
    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        return memory["commit"]


class Narrow(Forgetful):
    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        return memory | {"commit": {"w1": memory["commit"]["w1"][..., :1], "b1": memory["commit"]["b1"]}}


class Nothing(Forgetful):
    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        return None


class OneString(Forgetful):
    own_slots = "squares"  # type: ignore[assignment]


class Taken(Forgetful):
    own_slots = ("update",)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Forgetful, r"Forgetful\.move returns squares None: it must return commit and squares"),
        (Bare, "Bare.move returns commit None"),
        (Nothing, "Nothing.move returns commit None"),
        (Narrow, r"Narrow\.move returns commit \{'w1': \[1, 2, 4, 1\], .*, each with all weights, \{'w1': \[1, 2, 4, 4\]"),
        (OneString, r"OneString\.own_slots='squares' is not allowed: it must be a tuple"),
        (Taken, r"Taken\.own_slots=\('update',\) is not allowed: .* none of them"),
    ],
)
def test_a_move_returns_every_slot(rule: type[BlockRule], told: str) -> None:
    with pytest.raises(MetaTTTError, match=told):
        TTTLayer(8, 2, task(), Linear(), rule(4))(torch.randn(1, 8, 8))


class OneNumber(Learner):
    def weights(self, d_in: int, d_out: int) -> Any:
        return {"w": Weight((d_in, 1))}

    def forward(self, w: Any, x: Tensor) -> Tensor:
        return w.linear(x, "w")


class Fitful(Forgetful):
    """It forgets in a later mini-batch, which building does not see."""

    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        moved = {"commit": memory["commit"], "squares": {name: x + 1 for name, x in memory["squares"].items()}}
        return moved if float(memory["squares"]["w1"].max()) == 0 else {"commit": memory["commit"]}


def test_a_slot_that_is_left_out_later_is_told() -> None:
    layer = TTTLayer(8, 2, task(), Linear(), Fitful(4))
    with pytest.raises(MetaTTTError, match=r"Fitful\.move returns \['commit'\]: it must return \['commit', 'squares'\]"):
        layer(torch.randn(1, 12, 8))


class Listed(OneNumber):
    def weights(self, d_in: int, d_out: int) -> Any:
        return [Weight((d_in, d_out))]


class Misfit(OneNumber):
    def weights(self, d_in: int, d_out: int) -> Any:
        return {"w": Weight((d_in + 1, d_out))}


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        (Listed, r"Listed\.weights returns \[Weight.*: it must return a Weight by name"),
        (Misfit, r"Misfit\.forward fails for tokens \[1, 2, 4, 4\]: "),
    ],
)
def test_weights_that_do_not_fit_are_refused(learner: type[Learner], told: str) -> None:
    with pytest.raises(MetaTTTError, match=told):
        TTTLayer(8, 2, task(), learner(), GradientDescent(4))


def test_a_class_in_place_of_a_part_is_refused() -> None:
    with pytest.raises(MetaTTTError, match=r"layer\.learner is a class \(Linear\): it must be a Learner"):
        TTTLayer(8, 2, task(), Linear, GradientDescent(4))  # type: ignore[arg-type]


def test_a_prediction_of_another_width_is_refused() -> None:
    told = r"OneNumber\.forward returns \[1, 2, 4, 1\] for tokens \[1, 2, 4, 4\]: expected \[1, 2, 4, 4\]"
    for norm in (True, False):
        with pytest.raises(MetaTTTError, match=told):
            TTTLayer(8, 2, task(), OneNumber(norm=norm), GradientDescent(4))


class Stateless(GradientDescent):
    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> Any:
        return super().gates(x, state, ctx)[0]


class Number(GradientDescent):
    def gates(self, x: Tensor, state: Tensors, ctx: Context) -> Any:
        return Gates(eta=0.1), state  # type: ignore[arg-type]


class Viewless(Reconstruction):
    def views(self, x: Tensor, state: Tensors, ctx: Context, **given: Any) -> Any:
        return super().views(x, state, ctx, **given)[0]


@pytest.mark.parametrize(
    ("part", "rule", "told"),
    [
        (task, Stateless, r"Stateless\.gates returns a Gates: it must return \(Gates, state\)"),
        (task, Number, r"Number\.gates returns eta=0\.1: a gate is None or a tensor"),
        (Viewless, GradientDescent, r"Viewless\.views returns a Views: it must return \(Views, state\)"),
    ],
)
def test_what_is_handed_on_is_not_forgotten(part: Any, rule: Any, told: str) -> None:
    with pytest.raises(MetaTTTError, match=told):
        TTTLayer(8, 2, part(), Linear(), rule(4))


class Summed(Reconstruction):
    def loss(self, prediction: Tensor, v: Tensor) -> Tensor:
        return super().loss(prediction, v).cumsum(-1)


def test_a_loss_that_mixes_tokens_is_named() -> None:
    with pytest.raises(MetaTTTError, match=r"Summed\.loss lets tokens see each other"):
        TTTLayer(8, 2, Summed(), Linear(), GradientDescent(4))
