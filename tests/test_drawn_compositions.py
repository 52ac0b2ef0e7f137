"""Compositions drawn at random are refused in a line or two, or equal the oracle (`oracle.py`)."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from oracle import NOT_COVERED, RULES, Call, not_covered, outputs
from oracle_parts import LEARNERS, Tokens
from refusals_for_tests import refusal
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.layer import TTTLayer
from metattt.learners import Convolution, GlobalEstimator, KernelEstimator, Learner, Linear, Transformer
from metattt.optimizers import (
    Append,
    ChannelDecay,
    GradientDescent,
    InnerOptimizer,
    Momentum,
    Preconditioned,
    StateGated,
)
from metattt.optimizers.block import Adam, Sign
from metattt.optimizers.mirror import MirrorDescent
from metattt.registry import PARAMETERS, REGISTERED
from metattt.tasks import Reconstruction
from metattt.testing.specimen import Specimen, distance

MOST = 1e6  # of an output: what is larger is drawn again with smaller steps
ATTEMPTS = 150  # draws for one that is not refused

RIDGES = ("kernel_ridge", "recurrent_ridge", "chebyshev_ridge")
DATA = ("kernel_estimator", *RIDGES, "log_linear", "global_estimator", "oja", "slots")
NETWORKS = ("linear", "mlp", "swiglu", "glu", "convolution", "transformer", "module")
BLOCK_RULES = ("block_momentum", "bounded", "sign", "adam", "mirror")
LINEAR_RULES = ("delta_gradient", "channel_decay", "key_step", "preconditioned")  # of a linear map alone
RULES_OF_ALL = ("gradient_descent", "momentum", "state_gated", "whole", *BLOCK_RULES)
STRATA: list[tuple[str, str, str | None]] = [
    *((network, rule, None) for network in NETWORKS for rule in RULES_OF_ALL),
    *(("linear_map", rule, task) for rule in LINEAR_RULES for task in ("rwkv7", "gated", None)),
    *(("linear_map", rule, task) for rule in RULES_OF_ALL[:2] for task in ("rwkv7", "gated", "pairs", None)),
    *(("linear_map", rule, "pairs") for rule in LINEAR_RULES[:3]),
    ("linear_map", "state_gated", None),
    *((learner, "append", None) for learner in DATA for _ in range(2)),
    *(("nested_ttt", rule, None) for rule in ("gradient_descent", "adam")),
]
"""Learners, rules and tasks (None: any) that go together: seed i draws for the i-th, over and over, so that none is left to
chance."""

ALWAYS = ("mini_batch_size", "seed", "steps", "read", "iterations")  # the defaults are long, or do nothing here
VALUES: dict[str, tuple[Any, ...]] = {  # of keys whose type says little
    "mini_batch_size": (1, 2, 3, 4, 5), "steps": (1, 1, 1, 2, 3), "compute_chunk": (None, 1, 2, 3), "seed": (0, 7),
    "base_lr": (0.2, 0.5, 1.0, -0.3), "conv_width": (1, 2, 4), "short_conv": (None, 2, 3), "rope_theta": (10.0, 1000.0),
    "kv_heads": (None, 1), "corruption_rate": (0.1, 0.5), "huber_delta": (0.3, 1.0), "loss_p": (1.5, 3.0),
    "max_norm": (None, 0.1, 1.0), "momentum_init": (0.5, 0.9), "decay_init": (0.5, 0.9), "rank": (None, 2, "head_dim"),
    "curvature_decay_init": (0.5, 0.9), "write_init": (0.5,), "temperature": (1.0, 4.0), "lower_bound": (0.0, 0.3),
    "strongest": (0.6,), "squash": (1.5,), "centre_init": (-0.2, 0.5), "q": (2.0, 3.0, 4.0), "mass": (0.5, 1.0),
    "threshold": (1e-3, 0.05), "beta1": (0.0, 0.9), "beta2": (0.5, 0.99), "eps": (1e-8, 1e-3), "levels": (0, 2, 3, 4),
    "sinks": (0, 1, 2), "neighbours": (1, 2, 3), "bandwidth": (None, 0.5, 2.0), "ridge": (0.5, 1.0),
    "tolerance": (0.0,), "ridge_floor": (0.0, 0.25), "iterations": (30,), "chunk": (1, 2, 3, 64), "depth": (1, 2, 3),
    "width": (1, 2, 3), "expansion": (0.5, 1.0, 2.0), "channels": (1, 2), "num_heads": (1, 2), "count": (1, 2, 3),
    "activation": ("gelu_tanh", "gelu", "relu", "silu", "tanh", "sigmoid", "identity"), "degree": (1, 1, 2),
    "scale": (0.5, 1.0, 2.0), "blend_init": (0.5,),
    "erase_scale": (1.0, 2.0), "correction": (None, 0.5), "rope_heads": (None, 1, 2), "rope_columns": (None,),
    "step_scale": (0.5, {"w1": 0.3, "b1": 3.0}, {"w1": 0.5}),
    "trainable": (["w1"], ["w1", "b1"], ["norm_scale", "w1"]),
}  # fmt: skip


def modules(width: int) -> tuple[nn.Module, ...]:
    return (nn.Linear(width, width), nn.Sequential(nn.Linear(width, width + 1, bias=False), nn.Tanh(), nn.Linear(width + 1, width)))


def nested(dim: int, group_size: int) -> nn.Module:
    rule = GradientDescent(mini_batch_size=2, base_lr=0.1)
    return TTTLayer(dim, 1, Reconstruction(), Linear(), rule, group_size=group_size)


class Drawn(NamedTuple):
    """A composition as it would be written down, and the calls that it is given."""

    heads: int
    width: int
    parts: dict[str, tuple[str, dict[str, Any]]]
    layer: dict[str, Any]
    batch: int
    lengths: list[int]
    flags: tuple[bool, bool]
    seed: int

    def build(self, shrink: float) -> tuple[TTTLayer, list[Call]]:
        """The layer, with parameters that hide nothing, and the calls; `shrink` multiplies the step size, or x."""
        torch.manual_seed(self.seed)
        made = []
        for group, (name, given) in self.parts.items():
            given = dict(given)
            if "module" in given:
                given["module"] = modules(self.width)[given["module"]]
            if "base_lr" in inspect.signature(kind(group, name).__init__).parameters:
                given["base_lr"] = given.get("base_lr", 1.0) * shrink
            made.append(kind(group, name)(**given))
        layer = TTTLayer(self.heads * self.width, self.heads, *made, **self.layer).double()
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.data += 0.2 * torch.randn_like(parameter)
        return layer, [self.call(length, shrink) for length in self.lengths]

    def call(self, length: int, shrink: float) -> Call:
        x = torch.randn(self.batch, length, self.heads * self.width, dtype=torch.float64)
        x = x * shrink if "base_lr" not in self.parts["optimizer"][1] else x
        mask = torch.rand(self.batch, length) < 0.7 if self.flags[0] else None
        reset = torch.rand(self.batch, length) < 0.2 if self.flags[1] else None
        if mask is not None:
            mask[0, 0] = True  # else nothing may depend on anything
            x = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
        return Call(x, mask, reset)


@cache
def kind(group: str, name: str) -> Any:
    module, _, cls = REGISTERED[group, name].rpartition(".")
    return getattr(importlib.import_module(module), cls)


def ours(group: str) -> list[str]:
    """What is registered in a group, but for parts of other tests."""
    return sorted(n for (g, n), target in REGISTERED.items() if g == group and target.startswith("metattt."))


def part(rng: random.Random, group: str, name: str) -> tuple[str, dict[str, Any]]:
    """A part with some of its settings drawn over what they may be."""
    given: dict[str, Any] = {}
    allowed = PARAMETERS[REGISTERED[group, name]]
    for key, one in list(inspect.signature(kind(group, name).__init__).parameters.items())[1:]:
        if key == "module":
            given[key] = rng.randrange(2)
        elif key == "layer":
            given[key] = nested
        elif key not in ("trainable", "step_scale") and rng.random() < (0.9 if key in ALWAYS else 0.5):
            some = choices(key, one, allowed[key])
            given[key] = rng.choice(some[2:] if key == "read" and name in BLOCK_RULES else some)  # no weights per token
    if group == "learner" and name not in (*DATA, "nested_ttt") and rng.random() < 0.4:
        key = rng.choice(("step_scale", "trainable"))
        given[key] = rng.choice(VALUES[key])
    return name, given


def choices(key: str, one: inspect.Parameter, allowed: tuple[Any, ...]) -> tuple[Any, ...]:
    if allowed:
        return tuple(value for value in allowed if (key, value) != ("rope", "map"))  # of images: test_layer_table.py
    if isinstance(one.default, bool):
        return (True, False)
    if key == "window":
        return (1, 2, 3) if one.default else (None, 1, 2, 3)
    return VALUES[key]


def draw(rng: random.Random, learner: str, rule: str, task: str | None) -> Drawn:
    """A composition with these parts, and the rest at random."""
    task = task or ("reconstruction" if rng.random() < 0.4 else rng.choice(ours("task")))
    chosen = {"task": task, "learner": learner.replace("linear_map", "linear"), "optimizer": rule}
    parts = {group: part(rng, group, name) for group, name in chosen.items()}
    if learner == "linear_map":
        plain = {"bias": False, "residual": False, "norm": False, "trainable": None}
        parts["learner"][1].update(plain, learn_init=rng.random() < 0.5)
        if "anchor" in inspect.signature(kind("optimizer", rule).__init__).parameters and rng.random() < 0.8:
            parts["optimizer"][1].update(anchor="online", steps=1)
    if learner in ("oja", "slots"):
        parts["optimizer"][1].update(channels=rng.choice(("head_dim", 2)), decay="none", levels=0, write="per_head")
        parts["optimizer"][1].update({"write": "none"} if learner == "slots" else {"channels": "head_dim"})
    elif rule == "append":  # a learner refuses a gate that it has no use for: tests/test_refusals.py
        uses = kind("learner", learner.replace("linear_map", "linear")).gates if learner in DATA else ()
        off = {"decay": {"channels": 0}, "blend": {"blend": "none"}, "levels": {"levels": 0}}
        for gate in off.keys() - uses:
            parts["optimizer"][1].update(off[gate])
    heads, width = rng.choice(((1, 4), (2, 4), (2, 3), (1, 6)))
    layer = {
        "output_norm": rng.choice((True, False, "rms", "head_rms", "head_layer")),
        "gate": rng.choice((False, False, True, "silu", "sigmoid")),
        "output_bias": rng.random() < 0.5,
        "form": rng.choice(("auto", "auto", "auto", "dual", "primal", "summed", "fused")),
        "group_size": rng.choice((None, 0, 1, 2)),
        "outer": rng.choice(("exact",) * 5 + ("first_order",)),
    }
    if layer["gate"] is not False:
        layer["gate_rank"] = rng.choice((None, "head_dim", 2))
    alone = rule == "whole" or learner == "global_estimator" or rng.random() < 0.2
    lengths = [rng.randint(4, 11)] if alone else [rng.randint(1, 5) for _ in range(rng.choice((2, 3)))]
    flags = rng.random() < 0.4, rng.random() < 0.3
    return Drawn(heads, width, parts, layer, rng.choice((1, 2, 3)), lengths, flags, rng.getrandbits(31))


def run(layer: TTTLayer, calls: list[Call]) -> list[Tensor]:
    state, ys = None, []
    for call in calls:
        y, state = layer(call.x, state, mask=call.mask, reset=call.reset)
        ys.append(y)
    return ys


def gradients(layer: TTTLayer, calls: list[Call], ys: list[Tensor]) -> dict[str, Tensor]:
    """Of a random sum of outputs by parameters and by x."""
    generator = torch.Generator().manual_seed(0)
    total = torch.stack([(y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in ys]).sum()
    leaves = {name: one for name, one in layer.named_parameters() if one.requires_grad}
    leaves |= {f"x of call {i}": call.x for i, call in enumerate(calls)}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def exploded(ys: list[Tensor]) -> bool:
    return any(not bool(y.isfinite().all()) or float(y.detach().abs().max()) > MOST for y in ys)


Limits = dict[str, tuple[Tensor, Tensor, float, float]]
"""What is compared: found, expected, the share that they may differ by, and the least number that it is a share of."""


class Chaotic(Exception):
    """The smallest change of x changes the result, or it explodes: nothing to compare."""


def differences(drawn: Drawn, shrink: float, with_gradients: bool) -> dict[str, float]:
    """By how much more than is allowed a layer differs from the oracle, by what differs.

    Raises:
        MetaTTTError: the composition, or a call, is refused.
        Chaotic: the numbers say nothing.
    """
    layer, calls = drawn.build(shrink)
    if not_covered(layer) is not None:
        raise MetaTTTError("not covered by the oracle")
    calls = [call._replace(x=call.x.requires_grad_(with_gradients)) for call in calls]
    with torch.set_grad_enabled(with_gradients):
        found = run(layer, calls)
    if not with_gradients:
        layer.requires_grad_(False)
    with torch.enable_grad():
        expected = outputs(layer, calls)
    if exploded(expected):
        raise Chaotic
    pairs = enumerate(zip(found, expected, strict=True))
    limits: Limits = {f"outputs of call {i}": (a, b, 1e-9, 0.0) for i, (a, b) in pairs}
    if with_gradients:
        ours, theirs = gradients(layer, calls, found), gradients(layer, calls, expected)
        floor = 1e-3 * max(float(g.abs().max()) for g in theirs.values() if g.numel())
        if exploded(list(theirs.values())):
            raise Chaotic
        limits |= {f"gradient of {name}": (ours[name], theirs[name], 1e-7, floor) for name in theirs}
    measured = {name: distance(a, b, floor) / limit for name, (a, b, limit, floor) in limits.items() if a.numel()}
    wrong = {name: value for name, value in measured.items() if not value <= 1}
    if wrong and explained(layer, calls, limits, wrong):
        raise Chaotic
    return wrong


def explained(layer: TTTLayer, calls: list[Call], limits: Limits, wrong: dict[str, float]) -> bool:
    """Whether the oracle itself changes by as much as a tenth of every difference when numbers change in their last
    digits: x, the parameters, and what a sign is taken of (of a number that is 0 but for rounding it is chance)."""
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor, by: float, size: Tensor) -> Tensor:
        return x.detach() + by * size * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(moved(one, 1e-13, one))
    calls = [c._replace(x=moved(c.x, 1e-13, c.x).requires_grad_(c.x.requires_grad)) for c in calls]
    with mock.patch.object(Tensor, "sign", lambda u: torch.sign(moved(u, 1e-15, u.detach().abs().max()))):
        again = outputs(layer, calls)
    found = {f"outputs of call {i}": y for i, y in enumerate(again)}
    if calls[0].x.requires_grad:
        found |= {f"gradient of {name}": g for name, g in gradients(layer, calls, again).items()}
    limit = {name: 0.1 * value * limits[name][2] for name, value in wrong.items()}
    return all(not distance(limits[name][1], found[name], limits[name][3]) < limit[name] for name in wrong)


def drawn(seed: int) -> Iterator[Drawn]:
    rng = random.Random(seed)
    for _ in range(ATTEMPTS):
        yield draw(rng, *STRATA[seed % len(STRATA)])


@pytest.mark.parametrize("seed", [
    *range(len(STRATA)),
    152, 255,  # learners that mix tokens, read token by token
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(STRATA), 6 * len(STRATA)) if seed not in (152, 255)),
])  # fmt: skip
def test_a_drawn_composition_equals_the_oracle(seed: int) -> None:
    """The first one of a seed that is not refused; and refusals are short."""
    refused: list[str] = []
    for one in drawn(seed):
        for shrink in (1.0, 0.1, 0.01):
            try:
                wrong = differences(one, shrink, with_gradients=(seed + seed // len(STRATA)) % 2 == 0)
            except MetaTTTError as error:
                refused.append(str(error))
                break
            except Chaotic:
                continue
            assert not wrong, f"{one}, steps times {shrink}: {wrong}"
            assert not [text for text in refused if len(text.splitlines()) > 2]
            return
    pytest.fail(f"none of {ATTEMPTS} compositions was taken")


def test_the_oracle_knows_every_part() -> None:
    """One that it does not know would be left out of all draws: write it there, or say in `NOT_COVERED` why not."""
    known = {"optimizer": RULES, "learner": (*LEARNERS, "NestedTTT")}
    for group in ("task", "learner", "optimizer"):
        for name in ours(group):
            cls = kind(group, name).__name__
            if f"{group}={name}" not in NOT_COVERED:
                assert hasattr(Tokens, f"of_{cls.lower()}") if group == "task" else cls in known[group], cls


LONG: dict[str, tuple[str, Callable[[], InnerOptimizer]]] = {
    "channels": ("rwkv7", lambda: ChannelDecay(rank=2)),
    "channels, factors of steps": ("gated", lambda: ChannelDecay(rank=2)),
    "preconditioned": ("reconstruction", Preconditioned),
    "solved": ("reconstruction", lambda: Momentum(1, "online", momentum="none", decay="per_head", gradient_at="decayed")),
    "pairs": ("pairs", lambda: Momentum(1, "online", momentum="none", decay="per_head")),
    "windows": ("window", lambda: Momentum(1, "online", decay="per_head")),
    "dual": ("reconstruction", lambda: GradientDescent(200, token_steps="shared")),
}


@pytest.mark.parametrize("outer", ["exact", "first_order"])
@pytest.mark.parametrize("name", LONG)
def test_more_tokens_than_a_chunk(name: str, outer: Any) -> None:
    task, rule = LONG[name]
    torch.manual_seed(0)
    learner = Linear(bias=False, residual=False, norm=False, step_scale={"w1": 0.7} if "factors" in name else None)
    layer = TTTLayer(8, 2, kind("task", task)(**{} if task == "rwkv7" else {"normalize_qk": True}), learner, rule(), outer=outer).double()
    calls = [Call(torch.randn(1, length, 8, dtype=torch.float64, requires_grad=True)) for length in (70, 69)]
    found, expected = run(layer, calls), outputs(layer, calls)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    ours, theirs = gradients(layer, calls, found), gradients(layer, calls, expected)
    floor = 1e-3 * max(float(g.abs().max()) for g in theirs.values())
    assert max(distance(ours[key], theirs[key], floor) for key in theirs) < 1e-7


# -- what draws have found ---------------------------------------------------------------------------------------------


def flags(*rows: str) -> Tensor:
    return torch.tensor([[one == "1" for one in row] for row in rows])


def made(learner: Learner, rule: InnerOptimizer) -> TTTLayer:
    return Specimen(lambda: learner, Reconstruction, lambda: rule).make()


PASSES: list[Callable[[], InnerOptimizer]] = [
    lambda: GradientDescent(3, read="final", steps=2),
    lambda: GradientDescent(3, read="final", steps=2, anchor="batch"),  # gradients of both calls begin at W0
    lambda: Momentum(3, read="final", steps=2, anchor="batch"),
    lambda: Sign(3, read="final", steps=2),
    lambda: Adam(3, read="final", steps=3),
    lambda: MirrorDescent(3, read="final", steps=3),
    lambda: GradientDescent(3, read="final", steps=3, token_steps="shared"),
]


@pytest.mark.parametrize(("make", "masks"), [
    # a call without tokens changes nothing, and each pass commits the mini-batch that the call cuts off
    *((lambda rule=rule: made(Linear(), rule()), masks) for rule in PASSES
      for masks in (("11 11", "00 10", "1101 1111"), ("1111111 1111100",))),
    # the query of padding is 0, and the sum of a linear kernel's values, too
    (lambda: made(GlobalEstimator(kernel="linear"), Append()), ("1011 1000",)),
])  # fmt: skip
def test_calls_with_padding(make: Callable[[], TTTLayer], masks: tuple[str, ...]) -> None:
    calls = [flags(*rows.split()) for rows in masks]
    calls = [Call(torch.randn(*mask.shape, 8, dtype=torch.float64), mask) for mask in calls]
    layer = make()
    for y, expected, call in zip(run(layer, calls), outputs(layer, calls), calls, strict=True):
        if call.mask.any(1).all():
            torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-12)


def test_a_query_that_meets_no_key_of_a_global_estimator() -> None:
    """elu(q) + 1 is 0 in every feature, in bf16 from −6 on: the answer is 0, not 0/0."""
    layer = TTTLayer(8, 2, Reconstruction(feature_map="elu", bias=True), GlobalEstimator(kernel="linear"), Append(), output_norm=False)
    layer.task.q.weight.data.zero_()
    layer.task.q.bias.data.fill_(-7)
    x = torch.randn(1, 6, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    y.float().sum().backward()
    assert not y.any() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("beta2", [0.0, 0.9999, 1 - 1e-9])
def test_decays_of_adam_near_one(beta2: float) -> None:
    """In fp32 the steps are those of float64: 1 − β2^j is no difference of numbers that are rounded to 1."""
    x, ys = torch.randn(1, 12, 8), []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        layer = TTTLayer(8, 2, Reconstruction(), Linear(norm=False), Adam(4, beta2=beta2, base_lr=0.1), output_norm=False).to(dtype)
        layer.out.weight.data.fill_(1)
        ys.append(layer(x.to(dtype))[0].double())
    torch.testing.assert_close(*ys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("most", [1e20, 1e38])
def test_a_norm_whose_square_is_no_number_clips_nothing(most: float) -> None:
    x = torch.randn(1, 9, 8)
    ys = []
    for max_norm in (None, most):
        torch.manual_seed(0)
        ys.append(TTTLayer(8, 2, Reconstruction(), Linear(), GradientDescent(4, max_norm=max_norm))(x)[0])
    torch.testing.assert_close(*ys)


def test_equally_near_labels_share_the_places() -> None:
    """Keys that are masked are all 0; which of them is taken must not depend on how a sequence is split."""
    task = Reconstruction(corruption="mask", corruption_rate=0.7, seed=0)
    layer = TTTLayer(8, 2, task, KernelEstimator(kernel="nearest", neighbours=2), Append()).double()
    calls = [Call(torch.randn(2, length, 8, dtype=torch.float64)) for length in (9, 1, 8)]
    torch.testing.assert_close(run(layer, calls), outputs(layer, calls), rtol=1e-9, atol=1e-12)


def test_empty_places_are_not_shown_to_learners_that_mix_tokens() -> None:
    calls = [Call(torch.randn(2, 3, 8, dtype=torch.float64), mask) for mask in (flags("111", "110"), None)]
    layer = made(Transformer(), GradientDescent(2, read="final"))
    assert refusal(lambda: run(layer, calls)).startswith("Transformer looks at several tokens, and optimizer.read=final")


def test_a_step_gate_of_a_gradient_that_is_almost_nothing() -> None:
    """Its square, a sum of products that cancel, is less than 0 by rounding."""
    torch.manual_seed(0)
    layer = TTTLayer(8, 2, Reconstruction(), Convolution(width=1), StateGated(4, read="previous"))
    assert layer(100 * torch.randn(2, 64, 8))[0].isfinite().all()
