"""The equations of a layer, put together from what its parts say of themselves and from the gates that its rule
gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from metattt.bidirectional import Bidirectional
from metattt.combined import Combined
from metattt.component import Component, says
from metattt.inner.planning import explain
from metattt.layer import TTTLayer
from metattt.learners.base import Learner
from metattt.optimizers.base import InnerOptimizer
from metattt.output import in_symbols, norm_in_words
from metattt.state import WHOLE_CALL, State
from metattt.tasks.base import Task

SYMBOLS = {"alpha": "α_t", "beta": "β_t", "kappa": "κ_t", "eta": "η_t", "decay": "Diag(a_t)"}
OF_A_MIXER = ("positive", "gates", "rates", "mix", "run", "forward")  # methods that its equations are about


class Section(NamedTuple):
    """Equations of one kind.

    Attributes:
        title: one word.
        lines: an equation each.
    """

    title: str
    lines: list[str]


def equations(layer: nn.Module) -> list[Section]:
    """What a layer computes, from the views of a token to its output.

    Another module than `TTTLayer`, `Combined` and `Bidirectional` may have a method `equations` that returns lines; of
    one that has none, or that changes what a base class has equations of, the name and the docstring are given.
    """
    if isinstance(layer, TTTLayer):
        return _of_layer(layer)
    if isinstance(layer, Combined):
        return _of_two(layer)
    if isinstance(layer, Bidirectional):
        both = "y = tanh(a) ∘ layer(x) + tanh(b) ∘ reversed(layer(reversed(x))), a and b a number per feature, learned"
        parts = [Section(f"layer.{one.title}", one.lines) for one in equations(layer.layer)]
        return [*parts, Section("output", [both])]
    if callable(own := getattr(layer, "equations", None)) and says(layer, about=OF_A_MIXER):
        return [Section("layer", list(own()))]
    summary = " ".join((type(layer).__doc__ or "").strip().partition("\n\n")[0].split())
    return [Section("layer", [f"{type(layer).__name__}: {summary}" if summary else type(layer).__name__])]


def text(sections: list[Section]) -> str:
    """The equations as plain text, titles in a column of their own."""
    width = max((len(one.title) for one in sections), default=0)
    return "\n".join(f"{'' if i else title:<{width}}  {line}" for title, own in sections for i, line in enumerate(own))


def _of_layer(layer: TTTLayer, lender: Task | None = None) -> list[Section]:
    """`lender`: the task that projects the tokens for this layer's."""
    task, learner = layer.task, layer.learner
    views = _said(task, Task)
    if not learner.has_weights:  # no loss is taken
        views = [line for line in views if not line.startswith("ℓ")]
    update = _update(layer, lender) if learner.has_weights else _said(layer.optimizer, InnerOptimizer)
    return [
        Section("task", views),
        Section("learner", [*_said(learner, Learner), *_weights(learner)]),
        *([Section("optimizer", update)] if update else []),
        Section("read", _read(layer)),
        Section("output", _output(layer)),
        Section("computed", computed(layer)),
    ]


def _of_two(layer: Combined) -> list[Section]:
    first: Any = layer.first
    second: Any = layer.second
    of_second = equations(second) if layer.out is None else _of_layer(second, first.task)
    parts = [Section(f"first.{one.title}", one.lines) for one in equations(first)]
    parts += [Section(f"second.{one.title}", one.lines) for one in of_second]
    if layer.out is None:
        gate = "y_t = RMSNorm(first(x)_t) ∘ σ(RMSNorm(second(x)_t))"
        y = {"serial": "y = second(first(x))", "gate": gate, "sum": "y_t = first(x)_t + second(x)_t"}[layer.how]
        return [*parts, Section("output", [y])]
    answer = "second(x)_t"
    if layer.head_norm is not None:
        answer = f"RMSNorm({answer})"
    if layer.head_scale is not None:
        answer = f"silu(θ_s x_t + c_s) {answer}"
    by_head = ", the latter by head" if answer != "second(x)_t" else ""
    normed = ", K and Q after its RMSNorm" if getattr(first.task, "qk_norm", False) else ""
    shared = f"in second, θK x_t, θV x_t and θQ x_t are those of first{normed}"
    return [*parts, Section("output", [f"y_t = θO (first(x)_t + {answer}){by_head}", shared])]


def _said(part: Component, kind: type[Component]) -> list[str]:
    """What a part says of itself, or its kind of it where a subclass has changed what the words are about."""
    return part.equations() if says(part) else kind.equations(part)


def _own(part: Component, kind: type[Component]) -> bool:
    """Whether a part has equations of its own that hold for it."""
    return type(part).equations is not kind.equations and says(part)


def _weights(learner: Learner) -> list[str]:
    """The weights of a head: which are fast, and where they start."""

    def shapes(names: Any) -> str:
        return ", ".join(f"{name} {'×'.join(map(str, learner.shapes[name][1:])) or '1'}" for name in names)

    lines = []
    if learner.init:
        still = not any(weight.requires_grad for weight in learner.init.values())
        zero = still and not any(bool(weight.any()) for weight in learner.init.values() if not weight.is_meta)
        start = "W_0 = 0" if zero else "W_0 keeps its random initial values" if still else "W_0 is learned"
        lines.append(f"W, in every head: {shapes(learner.init)}; {start}")
    if learner.step_scales:
        factors = ", ".join(f"{name} by {factor:g}" for name, factor in learner.step_scales.items())
        lines.append(f"gradients are multiplied by a factor of their weight, where it is not 1: {factors}")
    if learner.slow:
        lines.append(f"slow weights, learned by the outer loop alone: {shapes(learner.slow)}")
    if own := ", ".join(name for name, one in learner.named_parameters(recurse=False) if one.requires_grad):
        lines.append(f"parameters of its own, learned by the outer loop alone: {own}")
    if learner.norm:
        lines.append("LN: over the outputs of a head, ε = 1e-06, then norm_scale and norm_bias")
    return lines


class Seen(NamedTuple):
    """What a layer makes of a token, found out on two of them.

    Attributes:
        gates: symbols of the gates that are not 1 throughout, by name.
        views: names of the views.
        pairs: n, where a token has several pairs of k and v.
        unknown: of gates that the recurrence here does not know.
    """

    gates: dict[str, str]
    views: tuple[str, ...]
    pairs: int
    unknown: tuple[str, ...]


def _seen(layer: TTTLayer, lender: Any) -> Seen:
    # as many tokens as a square map has
    x = torch.randn(1, 4, layer.dim, generator=torch.Generator().manual_seed(0)).to(next(layer.parameters()))
    state = State(torch.zeros(1, dtype=torch.long, device=x.device), 0, {}, {}, {}, {})
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        views, gates, *_ = layer.tokens(
            x, state, layer.call(x, state).ctx, None if lender is None else lender.project(x)
        )
    given = {name: gate for name, gate in gates._asdict().items() if gate is not None}
    told = [name for name, gate in given.items() if name not in ("eta", "kappa") or not bool((gate == 1).all())]
    symbols = {name: SYMBOLS[name] for name in told if name in SYMBOLS}
    if views.weight is not None:  # of pairs: it is in η
        symbols["eta"] = "ω_t" if torch.allclose(gates.eta, views.weight.to(gates.eta)) else "η_t ω_t"
    return Seen(
        symbols,
        tuple(name for name, view in views._asdict().items() if view is not None),
        views.k.shape[3] if views.k.ndim == 5 else 1,
        tuple(name for name in told if name not in SYMBOLS),
    )


def _update(layer: TTTLayer, lender: Task | None) -> list[str]:
    """Gates, gradient and recurrence."""
    rule = layer.optimizer
    said, name = _said(rule, InnerOptimizer), type(rule).__name__
    seen = _seen(layer, lender)
    at, gradient = _gradient(layer, _anchor(rule, said), seen)
    if any(line.startswith("W_") for line in said):  # the rule is one of its own
        first = next((i for i, line in enumerate(said) if "G_" in line), None)
        if first is None:
            return said
        if "G_s" in said[first]:
            at = [line.replace("_t", "_s") for line in at]
        return [*said[:first], *at, *said[first:], *_pairs(layer.task, seen), *_several(rule)]
    changed = [
        one
        for one in ("coefficients", "commit", "current", "prepare", "gates_at")
        if getattr(type(rule), one, None) is not getattr(InnerOptimizer, one, None)
    ]
    if {"coefficients", "commit", "current"}.intersection(changed):
        own = "move" if hasattr(rule, "move") else "coefficients and .commit"
        return [*said, *at, f"W_t: made of these by {name}.{own}"]
    more = [f"the gate `{one}` is applied as {name} has it" for one in seen.unknown]
    if not _own(rule, InnerOptimizer):
        more += [f"with what {name}.{one} makes of them" for one in changed]
    return [*said, *more, *at, *_recurrence(rule, seen.gates, gradient), *_pairs(layer.task, seen), *_several(rule)]


def _pairs(task: Task, seen: Seen) -> list[str]:
    """How the pairs of a token are learned."""
    if seen.pairs == 1:
        return []
    weighed = ", each with a weight ω_t, a factor of its step" if "weight" in seen.views else ""
    if task.together:
        return [f"a token has {seen.pairs} pairs of k_t and v_t{weighed}; a step is the sum of theirs"]
    one = "learned one after the other"
    return [f"a token has {seen.pairs} pairs of k_t and v_t, {one}{weighed}; decays act before the first of them"]


def _several(rule: InnerOptimizer) -> list[str]:
    if rule.steps == 1 or rule.read == "final":
        return []
    return [f"{rule.steps} such steps for every mini-batch, each from the weights that the one before it left"]


def _by_block(said: list[str]) -> bool:
    """Whether a rule counts its weights by mini-batches."""
    return any(line.startswith("W_j") for line in said)


def _anchor(rule: InnerOptimizer, said: list[str]) -> str:
    """Where the gradient of token t is taken."""
    if rule.anchor == "batch":
        return "W_0"
    if _by_block(said):
        return "W_{j−1}"
    if rule.anchor == "online" or rule.mini_batch_size == 1:
        return "W_{t−1}"
    return "W_a"


def _gradient(layer: TTTLayer, anchor: str, seen: Seen) -> tuple[list[str], str]:
    """The equation of G_t, and what stands for it in a recurrence: for a linear map its closed form."""
    task, learner, rule = layer.task, layer.learner, layer.optimizer
    decayed = rule.gradient_at == "decayed" and rule.anchor == "online"
    scale = f"{seen.gates['alpha']} " if decayed and "alpha" in seen.gates else ""
    turned = f"{seen.gates['decay']} {anchor}" if decayed and "decay" in seen.gates else anchor
    at = f"∇ℓ_t({scale}{turned})"
    meaning = [_last_commit(rule)] if anchor == "W_a" else []
    if "erase_key" in seen.views or "erase_direction" in seen.views:  # what is erased is not what the loss would erase
        made = f"{scale}{'p_t' if 'erase_key' in seen.views else 'k_t'} {turned}"
        closed = f"(b_tᵀ({made}) − k_tᵀ v_t)" if "erase_direction" in seen.views else f"k_tᵀ({made} − v_t)"
        return [
            f"G_t = {closed[1:-1] if 'erase_direction' in seen.views else closed}, in the place of {at}",
            *meaning,
        ], closed
    weight, bias = (_own(learner, Learner) and learner.linear_map) or (None, None)
    slope = None
    if weight is not None and weight in learner.init and says(task, "slope", ("loss",)):
        slope = task.slope(f"{scale}k_t {turned}" + ("" if bias is None else f" + {scale}b"))
    if slope is None:
        return [f"G_t = {at}", *meaning], "G_t"
    if bias is not None and bias in learner.init:
        return [f"G_t = {at} = k_tᵀ e_t for W and e_t for b, e_t = {slope}", *meaning], "G_t"
    if slope.startswith("−"):
        closed = f"−k_tᵀ {slope[1:]}"
    elif slope.startswith("("):
        closed = f"k_tᵀ{slope}"
    else:
        closed = f"k_tᵀ({slope})"
    return [f"G_t = {at} = {closed}", *meaning], closed


def _last_commit(rule: InnerOptimizer) -> str:
    if rule.mini_batch_size == WHOLE_CALL:
        return "W_a: the weights before the call, whose tokens are one mini-batch"
    return (
        f"W_a: the weights after the last mini-batch that was whole before t's own, b = {rule.mini_batch_size} tokens"
    )


def _recurrence(rule: InnerOptimizer, gates: dict[str, str], gradient: str) -> list[str]:
    """`S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t` without the gates that are not there."""
    eta, kappa = gates.get("eta", ""), gates.get("kappa", "")

    def minus(*factors: str) -> str:
        sign, what = ("+", gradient[1:]) if gradient.startswith("−") else ("−", gradient)
        return " ".join([sign, *filter(None, factors), what])

    if rule.accumulates:
        tau = ["τ_i"] if rule.has_token_steps else []
        clip = [] if rule.max_norm is None else [f"min(1, {rule.max_norm:g}/‖M_t‖)"]
        return [
            f"M_t = M_{{t−1}} {minus(eta)}, M = 0 where a mini-batch begins",
            f"W_t = {' '.join(['W_a +', *tau, *clip, 'M_t'])}",
        ]
    old = " ".join(filter(None, [gates.get("alpha"), gates.get("decay"), "W_{t−1}"]))
    if rule.decay_to_init:
        old += f" + (1 − {gates.get('alpha', '1')}) W_0"
    if "beta" not in gates:
        return [f"W_t = {old} {minus(kappa, eta)}"]
    beta, write = gates["beta"], f"{kappa} " if kappa else ""
    momentum = f"S_t = {beta} S_{{t−1}} {minus(eta)}"
    if rule.nesterov:
        return [momentum, f"W_t = {old} + {write}({beta} S_t {minus(eta)})"]
    return [momentum, f"W_t = {old} + {write}S_t"]


def _read(layer: TTTLayer) -> list[str]:
    """Which weights a query sees."""
    rule, learner = layer.optimizer, layer.learner
    if not learner.has_weights:
        return ["z_t = f(q_t)"]
    said = _said(rule, InnerOptimizer)
    alone = rule.mini_batch_size == 1 and not _by_block(said)
    before, after = ("W_{j−1}", "W_j") if _by_block(said) else ("W_{t−1}", "W_t") if alone else ("W_a", "W_t")
    place = ", t in mini-batch j" if _by_block(said) else ""
    all_ = f"W_{rule.steps}" if any(line.startswith(("W_i", "W_1")) for line in said) else "W"
    weights, where = {
        "inclusive": ("W_t", ""),
        "exclusive": ("W_{t−1}", ""),
        "previous": (before, place),
        "committed": (before, f"{place}; {after} for the token that completes a mini-batch"),
        "block": ("W", ", W at the end of t's mini-batch (not causal)"),
        "final": (all_, f", {all_} after all tokens of the call (not causal)"),
    }[rule.read]
    if alone and rule.read in ("committed", "block"):
        weights, where = "W_t", ""
    linear = _own(learner, Learner) and learner.linear_map is not None and learner.linear_map[1] is None
    line = f"z_t = {f'q_t {weights}' if linear else f'f(q_t; {weights})'}{where}"
    if rule.read == "final" and rule.steps > 1 and all_ == "W":
        line += f"; they are read {rule.steps} times, each time from the weights that the last one left"
    known = weights != "W_a" or (_anchor(rule, said) == "W_a" and not rule.accumulates)
    return [line] if known else [line, _last_commit(rule)]


def _output(layer: TTTLayer) -> list[str]:
    y = in_symbols(layer.norm, layer.gate, layer.gate_function, "z_t")
    if isinstance(layer.out, nn.Linear):
        y = f"θO {f'({y})' if '∘' in y else y}" + (" + b_O" if layer.out.bias is not None else "")
    line = f"y_t = {y}" + ("" if layer.num_heads == 1 else f", z_t of the {layer.num_heads} heads side by side")
    return [line, *([] if layer.norm is None else [norm_in_words(layer.norm)])]


def computed(layer: TTTLayer) -> list[str]:
    """The form, and what is known of why."""
    plan = layer.plan
    if layer.form == "scan":
        return ["form=scan: the learner answers from its data"]
    line, other = f"form={layer.form}", "solved as one triangular system" if plan.solved else "in the dual form"
    other = "an error, as layer.form asks for a kernel" if plan.strict else other
    if plan.kernels:
        line += ", by the kernels " + ", ".join(f"{kernel.name} ({kernel.device})" for kernel in plan.kernels)
        line += f" where these take the sizes and types, else {other}"
    elif plan.solved:
        line += f", {other}"
    elif layer.optimizer.anchor == "online" and plan.form == "dual":
        line += f", token by token: {plan.reasons.get('solved', 'it is not solved')}"
    others = {name: why for name, why in plan.reasons.items() if name != "solved"}
    return [line, *([f"no kernel: {explain(others)}"] if others and not plan.kernels else [])]
