"""The laws that every component obeys, each a function from a specimen to its worst error, and the table of their bounds."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call

from metattt.optimizers.block import BlockRule
from metattt.state import State
from metattt.testing.padding import masks, packing
from metattt.testing.specimen import (
    NotApplicable,
    Run,
    Specimen,
    compare,
    cotangent,
    distance,
    run,
    state_distance,
)


@dataclass(frozen=True)
class Law:
    """A law: its worst relative error on a specimen must be at most `bound`. `title` is how the table calls it."""

    name: str
    title: str
    worst_error: Callable[[Specimen], float]
    bound: float


def forms(spec: Specimen) -> float:
    """Every form, recomputed in groups or stored, gives the oracle's outputs and gradients, also when state is handed on."""
    return _forms(spec, torch.float64)


def forms_float32(spec: Specimen) -> float:
    return _forms(spec, torch.float32)


def _forms(spec: Specimen, dtype: torch.dtype) -> float:
    found = spec.forms()
    if not found:
        raise NotApplicable("the learner keeps its data and has one form")
    x = spec.tokens(dtype=dtype)
    cuts = [spec.make().optimizer.mini_batch_size + 2]  # inside a mini-batch: the second call goes on from carried state
    oracle = run(spec.make(form=found[0], dtype=dtype), x, cuts, grads=True)
    others = [(form, None) for form in found[1:]] + [(form, 0) for form in found]
    return max(compare(run(spec.make(form=f, group_size=g, dtype=dtype), x, cuts, grads=True), oracle) for f, g in others)


def derivatives(spec: Specimen) -> float:
    """Gradients of the oracle against central differences, along one direction for the tokens and one for each parameter."""
    found = spec.forms()
    layer = spec.make(form=found[0] if found else None)
    x = spec.tokens(batch=1, extra=1)
    expected = run(layer, x, grads=True).grads
    largest = max(g.norm().item() for g in expected.values())
    values = {name: p.detach() for name, p in layer.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for name, gradient in expected.items():
        direction = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        direction /= direction.norm()

        def loss(step: float, name: str = name, direction: Tensor = direction) -> Tensor:
            moved = {**values, name: values[name] + step * direction} if name in values else values
            tokens = x if name in values else x + step * direction
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                y = functional_call(layer, moved, (tokens,))[0]
            return (y * cotangent(y)).sum()

        near, far = (((loss(step) - loss(-step)) / (2 * step)).item() for step in (5e-6, 1e-5))
        slope = (4 * near - far) / 3  # Richardson: without the error of second order
        scale = max(gradient.norm().item(), 1e-3 * largest, 1e-30)
        error = abs((gradient * direction).sum().item() - slope) / scale
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def splits(spec: Specimen) -> float:
    """Calls that cut a sequence anywhere give the outputs, gradients and final state of one call."""
    layer = spec.make()
    _whole_calls_only(layer.optimizer.read)
    x = spec.tokens()
    whole = run(layer, x, grads=True)
    length, size = x.shape[1], layer.optimizer.mini_batch_size
    worst = 0.0
    for cuts in (
        list(range(1, length)),  # one token at a time
        list(range(size + 2, length)),  # prefill, then decode
        sorted({1, 3, size + 1, size + 2, length - 2} & set(range(1, length))),  # ragged
        list(range(size, length, size)),
    ):
        parts = run(layer, x, cuts, grads=True)
        worst = max(worst, compare(parts, whole), state_distance(layer, parts.state, whole.state))
    return worst


def causality(spec: Specimen) -> float:
    """`∂y_t/∂x_s = 0` for s > t, exactly, and the outputs up to t do not change with the tokens after t."""
    layer = spec.make()
    if layer.optimizer.read in ("block", "final"):
        raise NotApplicable(f"optimizer.read={layer.optimizer.read} is not causal")
    x = spec.tokens().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        y, _ = layer(x)
    worst = 0.0
    for t in range(x.shape[1] - 1):
        (gradient,) = torch.autograd.grad((y[:, t] * cotangent(y[:, t])).sum(), x, retain_graph=True)
        changed = torch.cat([x[:, : t + 1], 1 - x[:, t + 1 :]], dim=1)
        gap = distance(run(layer, changed).y[:, : t + 1], y[:, : t + 1].detach())
        leak = gradient[:, t + 1 :].abs().max().item()
        worst = max(worst, leak if math.isfinite(leak) else math.inf, gap if gap > 1e-12 else 0.0)  # the rest is rounding
    return worst


def limits(spec: Specimen) -> float:
    """At τ = 1, mini-batches of one token are online learning, and one mini-batch for all tokens is batch learning."""
    layer = spec.make()
    rule = layer.optimizer
    if not rule.updates:
        raise NotApplicable("the rule has no mini-batches")
    if rule.steps > 1 and rule.read != "final":
        raise NotApplicable(f"optimizer.steps={rule.steps} is defined for mini-batch anchors only")
    if rule.gradient_at == "decayed":
        raise NotApplicable("optimizer.gradient_at=decayed is defined for online anchors only")
    x = spec.tokens()
    worst = 0.0
    cases = [(x.shape[1], "batch"), (x.shape[1] + 3, "batch")]
    if not isinstance(rule, BlockRule):  # one that moves weights once per mini-batch has no online limit
        cases.append((1, "online"))
    for size, anchor in cases:
        one = run(spec.make(mini_batch_size=size, anchor="minibatch", plain=True), x, grads=True)
        other = run(spec.make(mini_batch_size=size, anchor=anchor, plain=True), x, grads=True)
        worst = max(worst, compare(one, other))
    return worst


def round_trips(spec: Specimen) -> float:
    """`state_dict`, deep copies and saved states give back the same layer and the same state; states move between devices."""
    layer = spec.make()
    x = spec.tokens()
    before, cut = run(layer, x), layer.optimizer.mini_batch_size + 1
    fresh = spec.make(seed=4)
    fresh.load_state_dict(layer.state_dict())
    twin = copy.deepcopy(layer)
    worst = max(distance(run(other, x).y, before.y) for other in (fresh, twin))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    worst = max(worst, distance(run(layer, x).y, before.y))  # a copy owns its parameters
    if run(twin, x).y.any():
        return math.inf  # the copy still computes with the parameters of the original
    state = run(layer, x[:, :cut]).state
    file = io.BytesIO()
    torch.save(state.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for other in (loaded, copy.deepcopy(state.detach()), state.to("cpu"), state.select(torch.arange(x.shape[0]))):
        worst = max(worst, state_distance(layer, other, state))
    if not isinstance(loaded, State) or _devices(state.to("meta")) - {"meta"}:
        return math.inf
    return worst


def precision_outputs(spec: Specimen) -> float:
    """bf16 autocast against fp32, outputs: relative Frobenius error; the carried weights stay fp32."""
    half, full = _precision(spec, grads=False)
    return _frobenius(half.y.float(), full.y)


def precision_gradients(spec: Specimen) -> float:
    """bf16 autocast against fp32, all gradients together: relative Frobenius error."""
    half, full = _precision(spec, grads=True)
    return _frobenius(*(torch.cat([g.float().flatten() for g in found.grads.values()]) for found in (half, full)))


def _precision(spec: Specimen, grads: bool) -> tuple[Run, Run]:
    spec = replace(spec, dim=max(spec.dim, 16 * spec.num_heads), longest_mini_batch=16)  # narrower heads are nearly singular under a norm
    layer = spec.make(dtype=torch.float32)
    x = torch.randn(2, 40, spec.dim, generator=torch.Generator().manual_seed(5))
    full = run(layer, x, grads=grads)
    with torch.autocast("cpu", torch.bfloat16):
        half = run(layer, x, grads=grads)
    for weights in half.state.weights.values():
        if any(value.dtype != torch.float32 for value in weights.values()):
            half.y.fill_(math.nan)
    return half, full


def _frobenius(found: Tensor, expected: Tensor) -> float:
    error = ((found - expected).norm() / expected.norm()).item()
    return error if math.isfinite(error) else math.inf


def _devices(state: State) -> set[str]:
    found: set[str] = set()

    def visit(tensor: Tensor) -> Tensor:
        found.add(tensor.device.type)
        return tensor

    state.map(visit)
    return found


def _whole_calls_only(read: str) -> None:
    if read in ("block", "final"):
        raise NotApplicable(f"optimizer.read={read} shows a query tokens that come after it")


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("forms", "forms agree, float64", forms, 1e-9),
        Law("forms_float32", "forms agree, float32", forms_float32, 1e-4),
        Law("derivatives", "gradients = finite differences", derivatives, 1e-6),
        Law("splits", "splits agree", splits, 1e-9),
        Law("causality", "no later token is seen", causality, 0.0),
        Law("limits", "b = 1 online, b >= T batch", limits, 1e-9),
        Law("masks", "padding changes nothing", masks, 1e-9),
        Law("packing", "packed = apart", packing, 1e-9),
        Law("round_trips", "copies and saved states", round_trips, 1e-12),
        Law("precision_outputs", "bf16 outputs", precision_outputs, 2e-2),
        Law("precision_gradients", "bf16 gradients", precision_gradients, 5e-2),
    )
}
