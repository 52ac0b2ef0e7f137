"""Chooses the form for a combination of task, learner and inner optimizer when a layer is built, and raises an error if
no form computes it exactly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError, check_choice
from metattt.functional import materialized
from metattt.inner.checks import check_tokens
from metattt.inner.parts import Parts
from metattt.inner.plan import HOOKED, Kernel, Plan
from metattt.inner.tokens import Tokens, check_views_of_data
from metattt.inner.trial import check_alone, check_token_local, check_width, looks_ahead, unsupported
from metattt.inner.verify import Function, other_function, other_loss, remembered
from metattt.learners.base import Learner
from metattt.learners.non_parametric import NonParametric
from metattt.optimizers.base import Gates, InnerOptimizer
from metattt.optimizers.checks import WrongReturn, check_move, linear_rule, settle
from metattt.state import WHOLE_CALL, Context, DataGates, Tensors
from metattt.tasks.base import Task, Views, dot_product, squared_error

T = TypeVar("T")

ERASE = ("erase_key", "erase_direction")
ASKED = ("auto", "primal", "dual", "summed", "fused")  #: of `layer.form`


def make_plan(
    form: str,
    task: Task,
    learner: Learner,
    optimizer: InnerOptimizer,
    dim: int,
    num_heads: int,
    head_dim: int,
    d_in: int,
    kernels: Sequence[Kernel],
    outer: str = "exact",
) -> Plan:
    """The plan for three parts; `form` is `layer.form`, `kernels` all that are registered, `outer` is `layer.outer`.

    Raises:
        MetaTTTError: as `choose_form` and `check_tokens`, or labels that a learner
            without weights cannot answer with.
    """
    prepared, found = tried(lambda: prepared_gates(optimizer, dim, num_heads, d_in)) or (None, None)
    if optimizer.updates:
        settle(optimizer, num_heads, found)
    if outer != "exact" and not learner.has_weights:
        raise MetaTTTError(
            f"layer.outer={outer} changes inner gradients, and {type(learner).__name__} has none: set layer.outer=exact"
        )
    if not learner.has_weights:
        check_choice("layer.form", form, ASKED)
        if isinstance(found, DataGates) and isinstance(learner, NonParametric):
            for name, gate in found._asdict().items():
                given = gate is not None and not (name == "write" and bool((gate == 1).all()))
                if given and name not in learner.gates:
                    off = getattr(optimizer, "data_gates", {}).get(name, "another optimizer")
                    raise MetaTTTError(f"{type(learner).__name__} does not use the {name} gate of its rule: set {off}")
        if (made := _views(task, dim, 1)) is not None:
            check_views_of_data(learner, made)
        if task.label_dim != head_dim:
            raise MetaTTTError(
                f"{type(learner).__name__} answers with labels, and those of this {type(task).__name__} are "
                f"{task.label_dim} wide, not {head_dim}: set task.huber_delta_from=constant, or task=reconstruction"
            )
        return Plan("")
    if learner.residual and d_in != head_dim:
        raise MetaTTTError(
            f"learner.residual=true needs equal widths, not {d_in} and {head_dim}: set learner.residual=false"
        )
    task, learner = materialized(task), materialized(learner)
    remembered(learner, task, ("width",), lambda: check_width(learner, num_heads, d_in, head_dim))
    covered: list[Kernel] = []
    reasons = {} if outer == "exact" else {"kernels": f"layer.outer={outer}, and they differentiate exactly"}
    if form in ("auto", "fused") and outer == "exact":
        covered, reasons = covering(kernels, task, learner, optimizer, num_heads, d_in, head_dim)
    chosen = choose_form(form, task, learner, optimizer, num_heads, d_in, covered, reasons)
    mixes, linear = learner.mixes_tokens, ""
    by_form = chosen if chosen in ("primal", "summed") else "mixed" if mixes else "dual"
    if optimizer.anchor == "online":
        loss, why = solvable(task, learner, optimizer, num_heads, d_in, head_dim)
        linear = loss if by_form in ("dual", "primal") else ""
        reasons |= {"solved": why} if why else {}
    elif by_form == "dual" and optimizer.anchor == "batch":  # -kᵀv of the dot product is the same at all weights
        linear = "dot" if solvable(task, learner, optimizer, num_heads, d_in, head_dim)[0] == "dot" else ""
    if linear and by_form == "dual":
        by_form = "chunks" if _by_chunks(task, learner, optimizer) else "solved"
    by_token = optimizer.anchor == "online" and by_form not in ("solved", "chunks")
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
        chunk=None if mixes else 1 if by_token else min(optimizer.compute_chunk or 128, optimizer.block),
        sees_weights=optimizer.state_dependent,
        weights={name: learner.shapes[name] for name in learner.init},
        replays=optimizer.read != "final"
        and optimizer.mini_batch_size != WHOLE_CALL
        and (mixes or (optimizer.steps > 1 and optimizer.mini_batch_size > 1)),
        looks_ahead=mixes and not optimizer.causal and looks_ahead(task, learner, num_heads, d_in),
    )
    if isinstance(found, Gates):
        if hasattr(optimizer, "move"):
            tried(lambda: check_move(materialized(optimizer), learner.init.items(), found))
        views = _views(task, dim, optimizer.mini_batch_size) or Views(*(torch.empty(1, num_heads, 1, d_in),) * 3)
        own = {} if prepared is None else {n: x for n, x in prepared._asdict().items() if n in ERASE and x is not None}
        check_tokens(Parts(task, learner, optimizer, plan), Tokens(views._replace(**own), found))
    return plan


def tried(ask: Callable[[], T]) -> T | None:
    """A part's result for a random token; None if the part cannot run when the layer is built. (Every call is checked,
    too.)

    Raises:
        MetaTTTError: `returned`.
    """
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            return ask()
        except WrongReturn:
            raise
        except Exception:  # a part of one's own may need more than a token
            return None


def returned(part: nn.Module, method: str, found: Any, kind: type[tuple[Any, ...]]) -> Any:
    """What `found` is a pair of, with the state for the next call.

    Raises:
        WrongReturn: it is no such pair.
    """
    pair = type(found) is tuple and len(found) == 2 and hasattr(found[0], "_fields")
    if not pair or not isinstance(found[1], Mapping) or not all(isinstance(x, Tensor) for x in found[1].values()):
        name = f"the state {found[1]}" if pair else f"a {type(found).__name__}"
        raise WrongReturn(
            f"{type(part).__name__}.{method} returns {name}: it must return ({kind.__name__}, state), the state a "
            "dictionary of tensors, and the one that it was given if the next call needs nothing"
        )
    return found


def _views(task: Task, dim: int, mini_batch_size: int) -> Views | None:
    made = tried(lambda: returned(task, "views", task.views(*_token(task, dim), _context(mini_batch_size)), Views))
    return None if made is None else made[0]


def prepared_gates(optimizer: InnerOptimizer, dim: int, num_heads: int, d_in: int) -> tuple[Views | None, object]:
    """A rule's gates of one random token, and what it makes of plain views."""
    rule = materialized(optimizer)
    x, state = _token(rule, dim)
    k = torch.randn(1, num_heads, 1, d_in, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    ctx = _context(rule.mini_batch_size)
    found, state = returned(rule, "gates", rule.gates(x, state, ctx), Gates)
    for name, gate in zip(found._fields, found, strict=True):
        if not isinstance(gate, Tensor | None):
            raise WrongReturn(
                f"{type(rule).__name__}.gates returns {name}={gate}: a gate is None or a tensor, [B, H, T] or with "
                "axes of length 1"
            )
    return rule.prepare(Views(k, k, k), found, x, state, ctx)[:2] if isinstance(found, Gates) else (None, found)


def _token(part: nn.Module, dim: int) -> tuple[Tensor, Tensors]:
    """A token `[1, 1, D]` in the type of the part's parameters, and the state before it."""
    dtype = next((x.dtype for x in part.parameters() if x.is_floating_point()), None)
    return torch.randn(1, 1, dim, generator=torch.Generator().manual_seed(0)).to(dtype), {}


def _context(mini_batch_size: int) -> Context:
    return Context(torch.zeros(1, 1, dtype=torch.long), None, None, mini_batch_size)


def covering(
    kernels: Sequence[Kernel], task: Task, learner: Learner, rule: InnerOptimizer, num_heads: int, d_in: int, d_out: int
) -> tuple[list[Kernel], dict[str, str]]:
    """The kernels that compute a combination, and for the others the reason why not, by name. Their assumptions are
    tested."""
    covered, reasons = [], {}
    for kernel in kernels:
        why = (
            ("learner.step_scale" if learner.step_scales else None)
            or kernel.reason_not_covered(task, learner, rule)
            or generic(learner, rule)
            or other_loss(task, kernel.loss, num_heads, d_out)
            or other_function(learner, kernel.function, num_heads, d_in)
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
    task: Task, learner: Learner, optimizer: InnerOptimizer, num_heads: int, d_in: int, d_out: int
) -> tuple[str, str | None]:
    """The loss (`squared`, `dot`) of an online rule of a linear learner that needs no loop over tokens, or an empty
    string and the reason."""
    if learner.linear_map is None:
        return "", f"{type(learner).__name__} is not a linear map"
    if optimizer.accumulates or optimizer.steps != 1:
        return "", "the rule has token steps, clipping or several steps"
    weight, bias = learner.linear_map
    if {weight, bias or weight} != set(learner.init):
        return "", f"its fast weights ({', '.join(learner.init)}) are not exactly those of its linear map"
    linear = LINEAR.setdefault((weight, bias), partial(_linear, weight, bias))
    why = generic(learner, optimizer) or other_function(learner, linear, num_heads, d_in)
    if why:
        return "", why
    if other_loss(task, dot_product, num_heads, d_out) is None:
        return "dot", None
    if not task.squared_error:
        return "", "the loss is neither ½‖f(k) − v‖² nor −⟨f(k), v⟩"
    why = other_loss(task, squared_error, num_heads, d_out)
    return ("", why) if why else ("squared", None)


def _by_chunks(task: Task, learner: Learner, optimizer: InnerOptimizer) -> bool:
    """Whether the form is `chunks`; tokens with channel decays take it anyway."""
    plain = linear_rule(optimizer, optimizer.anchor, ("inclusive", "exclusive")) is None
    plain = plain and set(optimizer.slots) <= {"anchor", "weights"}
    return plain and learner.linear_map is not None and learner.linear_map[1] is None and not task.together


LINEAR: dict[tuple[str, str | None], Function] = {}


def _linear(
    weight: str, bias: str | None, weights: Mapping[str, Tensor], slow: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    z = x @ weights[weight]
    return z if bias is None else z + weights[bias].unsqueeze(2)


def generic(learner: Learner, optimizer: InnerOptimizer) -> str | None:
    """Why no kernel and no solved form can be used at all; None if they can."""
    if learner._forward_hooks or learner._forward_pre_hooks:  # which run when the learner is called
        return HOOKED
    if optimizer.state_dependent:
        return f"the gates of {type(optimizer).__name__} depend on the weights"
    return None


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

    `auto` is `fused` if a kernel covers the combination, else `dual` if fast weights are used by primitives only, else
    `summed` if the read needs no per-token weights, else `primal` if tokens do not mix.

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
    mixes, read, auto = learner.mixes_tokens, optimizer.read, "set layer.form=auto"
    dual = form == "dual" or (mixes and not summed)  # of tokens that mix, a backward pass for each
    own = getattr(optimizer.coefficients, "__func__", None) is not InnerOptimizer.coefficients
    for wrong, why in (
        (
            mixes and optimizer.anchor == "online" and optimizer.mini_batch_size > 1,
            f"{name} mixes the tokens of a mini-batch, which optimizer.anchor=online takes apart: set "
            "optimizer.anchor=minibatch",
        ),
        (form == "fused" and mixes, f"layer.form=fused has no kernel for {name}, which mixes tokens: {auto}"),
        (
            form == "fused" and not covered,
            f"layer.form=fused has no kernel for this combination ({reason or explain(reasons)}): {auto}",
        ),
        (form == "primal" and mixes, f"layer.form=primal takes tokens apart, and {name} mixes them: {auto}"),
        (
            form == "dual" and mixes and summed,
            f"layer.form=dual takes a backward pass per token for {name}, which this read does not need: {auto}",
        ),
        (
            form == "auto" and reason and own and not (mixes or summed),
            f"{type(optimizer).__name__} has its own coefficients, which go with layer.form=dual, and that cannot "
            f"express {name}: {reason}. Set layer.form=primal for the plain recurrence of its gates, without them",
        ),
        (
            form == "summed" and not summed,
            f"layer.form=summed has no weights per token, which optimizer.read={read} needs: {auto}",
        ),
        (
            dual and reason and mixes,
            f"optimizer.read={read} cannot express {name}: {reason}. Set optimizer.read=previous",
        ),
        (
            dual and reason,
            f"layer.form=dual cannot express {name}: {reason}. Use its accessor's primitives, or {auto}",
        ),
        (
            dual and mixes and optimizer.max_norm is not None,
            f"optimizer.max_norm needs gradients of single tokens, and {name} mixes them: set optimizer.max_norm=null",
        ),
        (
            dual and mixes and optimizer.anchor != "minibatch",
            f"{name} mixes the tokens of a mini-batch: optimizer.read={read} needs optimizer.anchor=minibatch",
        ),
    ):
        if wrong:
            raise MetaTTTError(why)
    if form != "auto":
        return form
    if mixes:
        return "summed" if summed else "dual"
    return "fused" if covered and reason is None else "dual" if reason is None else "summed" if summed else "primal"
