"""Which form computes a combination of task, learner and inner optimizer, decided when a layer is built; what no form
computes is refused here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from metattt.errors import MetaTTTError, check_choice
from metattt.inner.checks import check_tokens
from metattt.inner.parts import Parts
from metattt.inner.plan import Kernel, Plan
from metattt.inner.tokens import Tokens
from metattt.inner.trial import check_alone, check_token_local, looks_ahead, materialized, unsupported
from metattt.inner.verify import Function, dot_product, other_function, other_loss, remembered, squared_error
from metattt.learners.base import Learner, NonParametric
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.optimizers.checks import settle
from metattt.state import Context, DataGates
from metattt.tasks.base import Task, Views

ASKED = ("auto", "primal", "dual", "summed", "fused")  #: of `layer.form`


def make_plan(
    form: str,
    task: Task,
    learner: Learner,
    optimizer: InnerOptimizer,
    dim: int,
    num_heads: int,
    d_in: int,
    kernels: Sequence[Kernel],
    outer: str = "exact",
) -> Plan:
    """The plan for three parts; `form` is `layer.form`, `kernels` all that are registered, `outer` is `layer.outer`.

    Raises:
        MetaTTTError: as `choose_form` and `check_tokens`, or labels that a learner
            without weights cannot answer with.
    """
    found = gates_of(optimizer, dim, num_heads, d_in)
    if optimizer.updates:
        settle(optimizer, num_heads, found)
    if outer != "exact" and not learner.has_weights:
        raise MetaTTTError(
            f"layer.outer={outer} is about inner gradients, and {type(learner).__name__} has none: set "
            "layer.outer=exact"
        )
    if not learner.has_weights:
        check_choice("layer.form", form, ASKED)
        if isinstance(found, DataGates) and isinstance(learner, NonParametric):
            for name, gate in found._asdict().items():
                given = gate is not None and not (name == "write" and bool((gate == 1).all()))
                if given and name not in learner.gates:
                    off = getattr(optimizer, "data_gates", {}).get(name, "another optimizer")
                    raise MetaTTTError(
                        f"{type(learner).__name__} has no use for the {name} gate of its rule: set {off}"
                    )
        if task.label_dim != dim // num_heads:
            raise MetaTTTError(
                f"{type(learner).__name__} answers with labels, and those of this {type(task).__name__} are "
                f"{task.label_dim} "
                f"wide, not {dim // num_heads}: set task.huber_delta_from=constant, or another task"
            )
        return Plan("")
    task, learner = materialized(task), materialized(learner)
    covered: list[Kernel] = []
    reasons = {} if outer == "exact" else {"kernels": f"layer.outer={outer}, and they differentiate exactly"}
    if form in ("auto", "fused") and outer == "exact":
        covered, reasons = covering(kernels, task, learner, optimizer, num_heads, d_in)
    chosen = choose_form(form, task, learner, optimizer, num_heads, d_in, covered, reasons)
    mixes, linear = learner.mixes_tokens, ""
    by_form = chosen if chosen in ("primal", "summed") else "mixed" if mixes else "dual"
    if by_form in ("dual", "primal") and optimizer.anchor == "online":
        linear, why = solvable(task, learner, optimizer, num_heads, d_in)
        reasons |= {"solved": why} if why and by_form == "dual" else {}
        by_form = "solved" if linear and by_form == "dual" else by_form
    by_token = optimizer.anchor == "online" and by_form != "solved"
    period, block = optimizer.period, optimizer.block
    if mixes:  # its tokens see those of their mini-batch, whatever may be computed together
        period, block = (None, sys.maxsize) if optimizer.whole else (optimizer.mini_batch_size,) * 2
    plan = Plan(
        by_form,
        linear,
        covered if chosen == "fused" else [],
        reasons,
        strict=form == "fused",
        outer=outer,
        slots=optimizer.slots,
        period=period,
        block=block,
        chunk=None if mixes else 1 if by_token else optimizer.chunk,
        sees_weights=optimizer.state_dependent,
        weights={name: learner.shapes[name] for name in learner.init},
        replays=optimizer.read != "final" and (mixes or (optimizer.steps > 1 and optimizer.mini_batch_size > 1)),
        looks_ahead=mixes and not optimizer.causal and looks_ahead(task, learner, num_heads, d_in),
    )
    if isinstance(found, Gates):
        views = views_of(task, dim, optimizer.mini_batch_size)
        if views is None:
            views = Views(*(torch.empty(1, num_heads, 1, d_in),) * 3)
        check_tokens(Parts(task, learner, optimizer, plan), Tokens(views, found))
    return plan


def views_of(task: Task, dim: int, mini_batch_size: int) -> Views | None:
    """What a task gives for one random token, as far as it can be known when a layer is built; None if it cannot be
    asked."""
    views: Views | None = None
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
        dtype = next((x.dtype for x in task.parameters() if x.is_floating_point()), None)
        x = torch.randn(1, 1, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
        views = task.views(x, {}, Context(torch.zeros(1, 1, dtype=torch.long), None, None, mini_batch_size))[0]
    return views


def gates_of(optimizer: InnerOptimizer, dim: int, num_heads: int, d_in: int) -> object | None:
    """What a rule gives for one random token, as far as it can be known when a layer is built; None if it cannot be
    asked."""
    found: object | None = None
    # (suppressed: whatever a rule of one's own does with a lone token; every call is checked, too)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(Exception):
        rule, random = materialized(optimizer), torch.Generator().manual_seed(0)
        dtype = next((x.dtype for x in rule.parameters() if x.is_floating_point()), None)
        x, k = (torch.randn(1, *n, generator=random).to(dtype) for n in ((1, dim), (num_heads, 1, d_in)))
        ctx = Context(torch.zeros(1, 1, dtype=torch.long), None, None, rule.mini_batch_size)
        found, state = rule.gates(x, {}, ctx)
        if isinstance(found, Gates):
            found = rule.prepare(Views(k, k, k), found, x, state, ctx)[1]
    return found


def covering(
    kernels: Sequence[Kernel], task: Task, learner: Learner, optimizer: InnerOptimizer, num_heads: int, width: int
) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that compute a combination, and of the others why they do not, by name. What they claim of it is
    evaluated."""
    covered, reasons = [], {}
    for kernel in kernels:
        why = (
            rescaled(learner)
            or kernel.reason_not_covered(task, learner, optimizer)
            or hooked(learner)
            or gated_by_state(optimizer)
            or other_loss(task, kernel.loss, num_heads, width)
            or other_function(learner, kernel.function, num_heads, width)
        )
        if why is None:
            covered.append(kernel)
        else:
            reasons[kernel.name] = why
    return covered, reasons


def explain(reasons: Mapping[str, str]) -> str:
    """Why fast paths do not cover a combination, once for all kernels of an operation that give the same reason."""
    return "; ".join(dict.fromkeys(f"{name.split('.')[0]}: {why}" for name, why in reasons.items()))


def solvable(
    task: Task, learner: Learner, optimizer: InnerOptimizer, num_heads: int, width: int
) -> tuple[str, str | None]:
    """The loss (`squared`, `dot`) of an online rule that needs no loop, or nothing and why: a linear learner, every
    gradient at the newest weights."""
    if learner.linear_map is None:
        return "", f"{type(learner).__name__} is not a linear map"
    if optimizer.accumulates or optimizer.steps != 1:
        return "", "the rule has token steps, clipping or several steps"
    if optimizer.state_dependent:
        return "", gated_by_state(optimizer)
    weight, bias = learner.linear_map
    if not {weight, bias or weight} <= set(learner.init):
        return "", f"not all of {', '.join(learner.shapes)} are fast (learner.trainable)"
    linear = LINEAR.setdefault((weight, bias), partial(_linear, weight, bias))
    why = hooked(learner) or other_function(learner, linear, num_heads, width)
    if why:
        return "", why
    if other_loss(task, dot_product, num_heads, width) is None:
        return "dot", None
    if not task.squared_error:
        return "", "the loss is neither ½‖f(k) − v‖² nor −⟨f(k), v⟩"
    why = other_loss(task, squared_error, num_heads, width)
    return ("", why) if why else ("squared", None)


LINEAR: dict[tuple[str, str | None], Function] = {}


def _linear(
    weight: str, bias: str | None, weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    z = x @ weights[weight]
    return z if bias is None else z + weights[bias].unsqueeze(2)


def rescaled(learner: Learner) -> str | None:
    """Step sizes by weight, which no kernel knows."""
    return "learner.step_scale" if learner.step_scales else None


def hooked(learner: Learner) -> str | None:
    """Hooks run when the learner is called, which fast paths do not do."""
    return "the learner has forward hooks" if learner._forward_hooks or learner._forward_pre_hooks else None


def gated_by_state(optimizer: InnerOptimizer) -> str | None:
    """Gates that depend on the weights, which fast paths do not ask for."""
    return f"the gates of {type(optimizer).__name__} depend on the weights" if optimizer.state_dependent else None


def choose_form(
    form: str,
    task: Task,
    learner: Learner,
    optimizer: InnerOptimizer,
    num_heads: int,
    d_in: int,
    covered: Sequence[Kernel],
    reasons: Mapping[str, str],
) -> str:
    """The form a layer uses.

    `auto` takes `fused` where a kernel covers the combination, else `dual` where every fast weight reaches only
    primitives, else `summed` where the read needs no per-token weights, else `primal` if tokens do not mix.

    Raises:
        MetaTTTError: the form cannot compute this combination exactly, or the learner mixes tokens without saying so.
    """
    check_choice("layer.form", form, ASKED)
    name = type(learner).__name__
    summed = optimizer.read in ("previous", "committed", "block", "final") or optimizer.steps > 1
    reason = remembered(learner, task, ("dual",), lambda: unsupported(task, learner, num_heads, d_in))
    whole = learner.mixes_tokens and optimizer.read in ("block", "final")  # it may see all tokens of its mini-batch
    if not whole:
        remembered(learner, task, ("tokens",), lambda: check_token_local(task, learner, num_heads, d_in))
    remembered(learner, task, ("alone", whole), lambda: check_alone(task, learner, num_heads, d_in, whole))
    if learner.mixes_tokens:
        return _mixing_form(form, name, optimizer, reason, summed)
    if form == "fused" and not covered:
        raise MetaTTTError(
            f"layer.form=fused has no kernel for this combination ({reason or explain(reasons)}): set layer.form=auto"
        )
    if form == "dual" and reason:
        raise MetaTTTError(
            f"layer.form=dual cannot express {name}: {reason}. Use its accessor's primitives, or set layer.form=auto"
        )
    if form == "summed" and not summed:
        raise MetaTTTError(
            f"layer.form=summed has no weights per token, which optimizer.read={optimizer.read} needs: set "
            "layer.form=auto"
        )
    if form != "auto":
        return form
    return "fused" if covered and reason is None else "dual" if reason is None else "summed" if summed else "primal"


def _mixing_form(form: str, name: str, optimizer: InnerOptimizer, reason: str | None, summed: bool) -> str:
    """The form for a learner whose tokens look at each other inside a mini-batch."""
    if optimizer.anchor == "online" and optimizer.mini_batch_size > 1:
        raise MetaTTTError(
            f"{name} mixes the tokens of a mini-batch, which optimizer.anchor=online takes apart: use minibatch"
        )
    if form == "fused":
        raise MetaTTTError(f"layer.form=fused has no kernel for {name}, which mixes tokens: set layer.form=auto")
    if form == "primal":
        raise MetaTTTError(f"layer.form=primal takes tokens apart, and {name} mixes them: set layer.form=auto")
    if summed:
        if form == "dual":
            raise MetaTTTError(
                f"layer.form=dual takes a backward pass per token for {name}, which this read does not need: use auto"
            )
        return "summed"
    if form == "summed":
        raise MetaTTTError(
            f"layer.form=summed has no weights per token, which optimizer.read={optimizer.read} needs: set "
            "layer.form=auto"
        )
    if reason is not None:
        raise MetaTTTError(
            f"optimizer.read={optimizer.read} cannot express {name}: {reason}. Set optimizer.read=previous"
        )
    if optimizer.max_norm is not None:
        raise MetaTTTError(
            f"optimizer.max_norm needs gradients of single tokens, and {name} mixes them: set optimizer.max_norm=null"
        )
    if optimizer.anchor != "minibatch":
        raise MetaTTTError(
            f"{name} mixes the tokens of a mini-batch: optimizer.read={optimizer.read} needs optimizer.anchor=minibatch"
        )
    return "dual"
