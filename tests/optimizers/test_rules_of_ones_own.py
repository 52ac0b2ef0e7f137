"""Rules of one's own: what their gates hold is read off the gates, and what cannot be kept is refused in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
import torch
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt import MetaTTTError, TTTLayer, build, optimizers
from metattt.learners import MLP, KernelEstimator, Learner, Linear, Weight
from metattt.modules import expand_like
from metattt.optimizers import BlockRule, Gates, GradientDescent, InnerOptimizer, Momentum, StepSize, WholeSequence
from metattt.state import Context, Tensors
from metattt.tasks import LaCTViews, Reconstruction
from metattt.testing import LAWS, Specimen

BOUND = 1e-9
LETTERS = {"a": "alpha", "b": "beta", "k": "kappa"}
LINEAR_MAP = partial(Linear, bias=False, residual=False, norm=False)
task = partial(Reconstruction, normalize_qk=True)


class Own(InnerOptimizer):
    """Gates by their letters: α, β, κ of a head, w factors of weights, d decays of channels. It declares nothing."""

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


class Counting(BlockRule):
    counts = True

    def gates(self, x: Tensor, state: Any, ctx: Any) -> tuple[Gates, Any]:
        gates, state = super().gates(x, state, ctx)
        return gates._replace(kappa=torch.ones_like(gates.eta)), state

    def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
        count = memory["pool"]["count"].clamp(min=1)
        return {"commit": {n: w + memory["update"][n] / expand_like(count, w) for n, w in memory["commit"].items()}}


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
    "the mean over a mini-batch": (Linear, rule(Counting)),
    "decay per mini-batch": (Linear, rule(PerMiniBatch, names="a")),
    "decay per mini-batch, by halves": (Linear, rule(PerMiniBatch, names="ak", update_decays=True)),
}


@pytest.mark.parametrize("name", EXACT)
def test_forms_and_splits_agree(name: str) -> None:
    learner, make = EXACT[name]
    if learner in (Linear, MLP):
        learner = partial(learner, residual=True, norm=True)
    spec = Specimen(learner, task, make)
    for law in ("forms", "splits", "masks"):
        assert LAWS[law].worst_error(spec) <= BOUND, law


def test_gates_are_a_mean_however_small_its_weights_are() -> None:
    """κ weighs the tokens of the mean that `move` receives, and a constant gate stays what it is."""
    found = []

    class Weighed(PerMiniBatch):
        names = "ak"

        def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
            gates, state = super().gates(x, state, ctx)
            return gates._replace(alpha=torch.full_like(gates.eta, 0.5), kappa=0.01 * gates.eta), state

        def move(self, memory: Any, alpha: Tensor | None, beta: Tensor | None) -> Any:
            found.append(alpha)
            return super().move(memory, alpha, beta)

    layer = layer_of(partial(Weighed, mini_batch_size=4))
    found.clear()
    layer(x)
    assert found and all(torch.allclose(alpha, torch.full_like(alpha, 0.5)) for alpha in found)


REFUSED: dict[str, tuple[Callable[..., InnerOptimizer], str]] = {
    **{
        f"{what} and {name}": (make, rf"Mine gives {LETTERS[name]} beside {what}, .* optimizer\.{what}=")
        for name in LETTERS
        for what, make in (("token_steps", rule(Steps, names=name)), ("max_norm", rule(Own, names=name, max_norm=0.1)))
    },
    "rates by token": (rule(Own, names="w"), r"Mine gives weight_lr, .* set anchor=minibatch and read=previous"),
    "rates online": (partial(online(names="w"), read="previous"), r"Mine gives weight_lr, .*optimizer\.anchor=online"),
    "another number of rates": (
        partial(rule(Own, gates=lambda self, x, *_: (Gates(x[..., :2].mT, weight_lr=x.new_ones(1, 2, 1, 3)), {})), read="previous"),
        r"Mine gives weight_lr of shape \[1, 2, 1, 3\], expected \[B, H, T, 2\]: one for each of w1, b1",
    ),
    "token steps per mini-batch": (rule(PerMiniBatch, token_steps=Steps.token_steps), "does not use token_steps, max_norm and nesterov"),
    "clipping per mini-batch": (rule(PerMiniBatch, max_norm=0.1), "does not use token_steps, max_norm"),
    "decayed gradients by mini-batch": (rule(Own, names="a", gradient_at="decayed"), r"set optimizer\.anchor=online"),
    "token steps of another length": (
        rule(Own, token_steps=lambda self: torch.ones(1, 3)),
        r"Mine\.token_steps has shape \[1, 3\], expected \[1 or 2, 4\] for optimizer\.mini_batch_size=4",
    ),
    "weights that the coefficients do not give": (
        rule(Own, current=lambda self, memory, filled: {name: 0.8 * w for name, w in memory["weights"].items()}),
        "Mine has its own current, and not the coefficients .*: define both, or neither",
    ),
    **{
        f"a commit with anchor={anchor}": (
            partial(rule(Own, commit=lambda self, memory, filled: memory), anchor=anchor),
            rf"Mine has its own commit, .*: leave it out, or set optimizer\.anchor=minibatch \(now {anchor}\)",
        )
        for anchor in ("online", "batch")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_the_layer_is_built(name: str) -> None:
    make, words = REFUSED[name]
    for form in ("auto", "primal", "dual", "fused"):
        refusal(partial(layer_of, make, form=form), match=words, lines=1)


@pytest.mark.parametrize("anchor", ["online", "batch"])
def test_a_commit_of_ones_own_is_called_where_a_read_asks_for_the_last_one(anchor: str) -> None:
    def stay(self: Any, memory: Any, filled: Any) -> Any:
        return memory

    torch.manual_seed(0)
    plain = layer_of(partial(rule(Own), anchor=anchor, read="previous"))
    mine = layer_of(partial(rule(Own, commit=stay), anchor=anchor, read="previous"))
    mine.load_state_dict(plain.state_dict())
    expected, found = plain(x)[0], mine(x)[0]
    assert torch.equal(found[:, :4], expected[:, :4]) and not torch.allclose(found[:, 4:], expected[:, 4:])


def test_coefficients_that_no_form_would_use_are_refused() -> None:
    """The plain recurrence, token by token, takes the gates alone."""

    class Raw(Linear):
        def forward(self, w: Any, x: Tensor) -> Tensor:
            return torch.tanh(x @ (2 * w["w1"]))

    def half(self: Any, gates: Gates, *rest: Any) -> Any:
        return InnerOptimizer.coefficients(self, gates._replace(eta=gates.eta / 2), *rest)

    assert layer_of(rule(Own), Raw).form == "primal"
    refusal(lambda: layer_of(rule(Own, coefficients=half), Raw), match="Mine has its own coefficients, .*form=primal")


@pytest.mark.parametrize(
    ("attributes", "more", "words"),
    [
        ({}, "beta", r"gives beta, and gave none when the layer was built: set has_momentum = True"),
        ({"max_norm": 0.1}, "alpha", "gives alpha beside max_norm"),
        ({}, "tau", "token_steps gives τ, and gave none when the layer was built"),
    ],
)
def test_what_comes_up_later_is_refused_before_anything_is_computed(attributes: dict[str, Any], more: str, words: str) -> None:
    layer = layer_of(rule(Own, **attributes))
    layer(x)
    kind, before = type(layer.optimizer), Own.gates  # the class is changed, not the rule: nobody is told

    def gates(self: Own, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
        found, state = before(self, x, state, ctx)
        return found._replace(**{more: torch.full_like(found.eta, 0.5)}), state

    if more == "tau":
        kind.token_steps = lambda self: torch.ones(1, self.mini_batch_size)  # type: ignore[method-assign]
    else:
        kind.gates = gates  # type: ignore[method-assign, assignment]
    refusal(lambda: layer(x), match=words)


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


def takes_effect(make: Callable[..., TTTLayer], part: Callable[[TTTLayer], Any], name: str, given: str, value: Any) -> None:
    """A setting assigned later gives the layer that is made with it, `given`, or is refused."""
    layer = make()
    try:
        setattr(part(layer), name, value)
        found = layer(x)[0]
        expected = make(**{given: value})
    except MetaTTTError:
        return
    if not given.endswith((".corruption", ".seed")):  # noise
        held = layer.state_dict()
        if any(not torch.equal(start, held[key]) for key, start in expected.state_dict().items()):
            assert not torch.equal(found, make()(x)[0]), f"{given}={value} would be of the initial values alone"
        expected.load_state_dict(held)
        torch.testing.assert_close(found, expected(x)[0], msg=f"{given}={value}")


OURS = [getattr(optimizers, name) for name in optimizers.__all__]


@pytest.mark.parametrize(
    "kind", [kind for kind in OURS if issubclass(kind, InnerOptimizer) and not inspect.isabstract(kind) and kind != StepSize]
)
def test_settings_assigned_later_take_effect_or_are_refused(kind: type[InnerOptimizer]) -> None:
    learner, parameters = LINEAR_MAP if kind().updates else KernelEstimator, inspect.signature(kind).parameters
    short = {"mini_batch_size": 4} if "mini_batch_size" in parameters else {}  # of 64 tokens none would be committed

    def made(**settings: Any) -> TTTLayer:
        torch.manual_seed(0)
        return layer_of(partial(kind, **short | settings), learner)

    for name, parameter in parameters.items():
        for value in another(get_type_hints(kind.__init__)[name], parameter.default):
            takes_effect(made, lambda layer: layer.optimizer, name, name, value)


FEW = ("attention", "comba", "ttt_mlp")
MORE = ("delta_net", "gated_delta_net2", "rwkv7", "mttt_mlp", "delta_product", "omega_net", "lact", "titans", "mesa_net")


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_settings_of_a_known_layer_assigned_later_take_effect_or_are_refused(name: str) -> None:
    def made(**given: Any) -> TTTLayer:
        overrides = [f"{key}={str(value).lower()}" for key, value in given.items()]
        return build(name, *overrides, dim=8, num_heads=2, seed=0).double()

    parts = {"task": lambda layer: layer.task, "learner": lambda layer: layer.learner, "layer": lambda layer: layer}
    for path, part in parts.items():
        first = part(made())
        for attribute, one in first._settings.items():
            for value in another(one.annotation, getattr(first, attribute, None)) if one.init else ():
                takes_effect(made, part, attribute, f"{path}.{one.alias or attribute}", value)


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_a_momentum_that_is_left_out_in_a_call_is_zero(form: str) -> None:
    class Mine(InnerOptimizer):
        has_momentum, given = True, True

        def gates(self, x: Tensor, state: Tensors, ctx: Context) -> tuple[Gates, Tensors]:
            beta = x.new_full((1, 1, 1), 0.9) if x.shape[1] != 3 else x.new_zeros(1, 1, 1) if self.given else None
            return Gates(x.new_full((1, 1, 1), 0.3), beta=beta), state

    layer = layer_of(Mine, form=form)
    found = []
    for given in (True, False):
        layer.optimizer.given = given
        state, ys = None, []
        for part in x.split((2, 3, 4, x.shape[1] - 9), 1):
            y, state = layer(part, state)
            ys.append(y)
        found.append(torch.cat(ys, 1))
    torch.testing.assert_close(*found)


def test_a_mini_batch_that_is_open_keeps_its_size() -> None:
    layer = layer_of(partial(GradientDescent, 8))
    state = layer(x)[1]
    layer.optimizer.mini_batch_size = 5
    refusal(lambda: layer(x, state), match=r"the state is at token 3 of a mini-batch, .*=5 was set since")


def test_settings_that_come_too_late() -> None:
    layer = layer_of(partial(GradientDescent, 4, token_steps="shared"))
    for name, value in (("base_lr", 0.5), ("lr_scale", "none"), ("token_steps", "none"), ("mini_batch_size", 8)):
        refusal(partial(setattr, layer.optimizer, name, value), match=rf"GradientDescent\.{name} = .* comes too late, .* {name}={value}")
    layer.optimizer.base_lr = 1.0  # as it is
    with pytest.raises(MetaTTTError, match=r"Momentum\.momentum = 'none' comes too late"):
        layer_of(Momentum).optimizer.momentum = "none"
    with pytest.raises(MetaTTTError, match=r"WholeSequence\.sampling = 'sgd' comes too late"):  # its anchor follows from it
        layer_of(WholeSequence).optimizer.sampling = "sgd"
    with pytest.raises(MetaTTTError, match=r"LaCTViews\.rope_heads = 4 comes too late"):
        TTTLayer(8, 2, LaCTViews(), Linear(), Momentum()).task.rope_heads = 4
    layer.optimizer.steps = 2
    refusal(lambda: layer(x), match=r"optimizer\.steps=2 .* would show queries the future")


def test_token_steps_are_those_of_the_numbers_that_are_there() -> None:
    """They are kept while decoding; `.data` changes a parameter without a trace."""
    layer = build("ttt_linear", dim=8, num_heads=2)
    rule, x = layer.optimizer, torch.randn(1, 20, 8)
    with torch.no_grad():
        before, (y, _) = rule.token_steps(), layer(x)
        assert rule.token_steps() is before
        rule.token_step_offset.data += 1
        after, (z, _) = rule.token_steps(), layer(x)
        assert (after > before).all() and not torch.equal(y, z)
        rule.token_step_map = "relu"
        assert torch.equal(rule.token_steps(), 1 / torch.arange(1, 17) + rule.token_step_offset)
        layer.double()
        assert rule.token_steps().dtype == torch.float64
    assert rule.token_steps().requires_grad


# -- parts that do not hand on what they must -------------------------------------------------------------------------


def mine(base: type, **methods: Any) -> Any:
    return type("Mine", (base,), methods)


def slots(move: Callable[[Any], Any]) -> Any:
    """A rule of a mini-batch with a slot of its own; one that it does not return would be zero in every mini-batch."""
    return mine(BlockRule, own_slots=("squares",), move=lambda self, memory, alpha, beta: move(memory))(4)


def learner(made: Callable[[int, int], Any]) -> Any:
    return mine(Learner, weights=lambda self, d_in, d_out: made(d_in, d_out), forward=lambda self, w, x: w.linear(x, "w"))()


def plainly(base: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """What the method of a base class returns, changed."""
    return mine(base, **{name: lambda self, *given, **more: change(getattr(base, name)(self, *given, **more))})


SLIPS: list[tuple[Callable[[], Any], str]] = [  # a rule, a learner or a task, and what is said of it
    (lambda: slots(lambda memory: {"commit": memory["commit"]}), "returns squares None: it must return commit and"),
    (lambda: slots(lambda memory: memory["squares"]["w1"].zero_()), r"Mine\.move changes in place what it is given"),
    (lambda: slots(lambda memory: {"commit": {"w1": torch.ones(1)}}), r"commit \{'w1': \[1\]\}: .*, each with .* weights, \{'w1': \[1, 2,"),
    (lambda: plainly(Linear, "forward", torch.Tensor.detach)(), r"no derivative by its fast weights \(w1, b1\): use"),
    (
        lambda: learner(lambda d_in, d_out: {"w": Weight((d_in, 1))}),
        r"Mine\.forward returns \[1, 2, 4, 1\] for tokens \[1, 2, 4, 4\]: expected \[1, 2, 4, 4\]",
    ),
    (lambda: plainly(GradientDescent, "gates", lambda found: found[0])(4), r"Mine\.gates returns a Gates: it must return \(Gates, state\)"),
    (lambda: plainly(GradientDescent, "gates", lambda found: (found[0], {"seen": 1}))(4), "gates returns the state {'seen': 1}: it must"),
    (lambda: plainly(Reconstruction, "views", lambda found: ((*found[0],), found[1]))(), "views returns a tuple: it must return .Views, "),
    (lambda: learner(lambda i, o: {"w": Weight(o)}), r"Mine\.weights gives 'w' the shape 4: write Weight\(\(4,\)\)"),
    (lambda: learner(lambda i, o: {"w": torch.zeros(i, o)}), "returns {'w': 'Tensor'}: it must return a Weight by name"),
    (
        lambda: mine(Linear, forward=lambda self, w, x: w.linear(x.mul_(2), "w1", "b1"))(),
        r"Mine\.forward changes in place the tokens that it is given",
    ),
    (
        lambda: plainly(Counting, "gates", lambda found: (found[0]._replace(kappa=None), found[1]))(4),
        "Mine counts tokens by the gate kappa, and gives none",
    ),
    (lambda: plainly(Reconstruction, "loss", lambda loss: loss.cumsum(-1))(), "loss lets tokens see each other"),
    (lambda: plainly(Reconstruction, "loss", torch.Tensor.detach)(), r"loss returned \[1, 2, 4\] .*, with a derivative by the prediction"),
]


@pytest.mark.parametrize(("part", "told"), SLIPS)
def test_what_is_handed_on_is_checked(part: Callable[[], Any], told: str) -> None:
    def build() -> TTTLayer:
        one = part()
        parts: dict[type, Any] = {Reconstruction: task(), Learner: Linear(), InnerOptimizer: GradientDescent(4)}
        parts[next(kind for kind in parts if isinstance(one, kind))] = one
        return TTTLayer(8, 2, *parts.values())

    refusal(build, match=told)


def test_a_slot_that_is_left_out_later_or_handed_on_is_told() -> None:
    """It forgets in a later mini-batch, which building does not see; with `update` handed on, sums would count twice."""

    def move(memory: Any) -> Any:
        more = {"squares": {name: x + 1 for name, x in memory["squares"].items()}}
        return {"commit": memory["commit"]} | (more if float(memory["squares"]["w1"].max()) == 0 else {})

    layer = TTTLayer(8, 2, task(), Linear(), slots(move))
    refusal(lambda: layer(torch.randn(1, 12, 8)), "Mine.move returns ['commit']: it must return ['commit', 'squares']")
    layer = TTTLayer(8, 2, task(), Linear(), slots(lambda memory: memory | {"commit": memory["commit"]}))
    refusal(lambda: layer(torch.randn(1, 12, 8)), "'update', 'squares']: it must return ['commit', 'squares'] and no other")
