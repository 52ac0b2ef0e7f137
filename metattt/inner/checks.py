"""Checks of tokens and calls that the inner loop cannot compute."""

from __future__ import annotations

import warnings

import torch

from metattt.errors import MetaTTTError
from metattt.inner.columns import ColumnLayout
from metattt.inner.parts import Parts
from metattt.inner.plan import HOOKED
from metattt.inner.tokens import Tokens
from metattt.optimizers.checks import check_gates
from metattt.state import Context, State


def check_tokens(parts: Parts, tokens: Tokens) -> None:
    """Raises an error for views and gates that the parts cannot use together.

    Called when a layer is built, with its parts' views and gates of one token, and again in a call with tokens of
    another kind, because your own parts may return something else then.

    Raises:
        MetaTTTError: naming what to give, or to set, instead.
    """
    check_gates(parts.rule, tokens.gates)
    if tokens.erases or tokens.views.k.ndim == 5:
        _check_generalised(parts, tokens)
    # (Torch does not compile a checkpoint around what writes, and it could not compile inner gradients in one.)
    parts.plan.checked.add(tokens.kind)


def check_call(parts: Parts, tokens: Tokens, state: State, ctx: Context) -> None:
    """As `check_tokens`; also raises an error for padding, documents, and phases that differ between sequences, if the
    read or the learner does not support them.

    Raises:
        MetaTTTError: naming what to give instead.
    """
    check_tokens(parts, tokens)
    if ctx.valid is None and ctx.first is None and state.phase is not None:
        return
    kind, final = type(parts.learner).__name__, parts.rule.read == "final"
    if parts.plan.looks_ahead:
        raise MetaTTTError(
            f"{kind} lets tokens see later ones, and would let them see padding: "
            "make it causal, or give sequences of one length"
        )
    if final and ctx.first is not None:
        raise MetaTTTError(
            "reset= packs documents, and optimizer.read=final answers all queries of a call with one set of weights: "
            "give each document a row of its own, padded, with mask="
        )
    if final and parts.learner.mixes_tokens and parts.plan.period is not None and state.phase is None:
        raise MetaTTTError(
            f"{kind} looks at several tokens, and optimizer.read=final would show it empty places "
            "of sequences that are inside different places of a mini-batch: give state=None, or sequences of one length"
        )


def _check_generalised(parts: Parts, tokens: Tokens) -> None:
    """Raises an error for what only an online rule of a linear learner supports, because its gradient is not that of
    the loss."""
    rule, task, learner, plan, decay = parts.rule, parts.task, parts.learner, parts.plan, tokens.gates.decay
    what = "erase views" if decay is None else "decays for every channel"
    erase_view = tokens.views.erase_key is not None or tokens.views.erase_direction is not None
    pairs = tokens.pairs is not None
    one_by_one = pairs and not task.together and (not plan.linear or tokens.gates.beta is not None)
    if (tokens.erases or one_by_one) and plan.reasons.get("solved") == HOOKED:
        raise MetaTTTError(f"{HOOKED}, and {'pairs of a token' if pairs else what} need its closed form: remove them")
    if tokens.erases and not plan.linear:
        why, fix = plan.reasons.get("solved"), "learner=linear_map"
        if rule.anchor != "online":
            why = f"optimizer.anchor={rule.anchor}"
            fix += " and optimizer=online" if decay is None else " and optimizer.anchor=online"
        elif why is None:
            why, fix = f"layer.form={plan.form}", "layer.form=auto"
        elif rule.accumulates or rule.steps != 1:
            fix = "optimizer.token_steps=none, optimizer.max_norm=null and optimizer.steps=1"
        elif plan.sees_weights:
            fix += " and optimizer=online"
        elif learner.linear_map is not None and not task.squared_error:
            fix = "task.loss=squared"
        raise MetaTTTError(
            f"{what} need a linear learner, the squared or dot loss and a gradient at the newest weights: set {fix} "
            f"({why})"
        )
    if tokens.erases and learner.linear_map is not None and learner.linear_map[1] is not None:
        raise MetaTTTError(f"{what} have no meaning for a bias: set learner.bias=false")
    if erase_view and plan.linear != "squared":
        raise MetaTTTError("an erase view needs a loss that erases, not the dot product: set task.loss=squared")
    if decay is not None:
        width = tokens.views.k.shape[-1]
        if decay.shape[-1] != width:
            raise MetaTTTError(
                f"decays for every channel are {decay.shape[-1]} wide and keys {width}: they must be equal"
            )
        if any((tokens.gates.alpha is not None, tokens.gates.beta is not None, rule.decay_to_init, task.together)):
            raise MetaTTTError(
                "decays for every channel stand alone: no decay per head, momentum, decay to W0 or window beside them"
            )
    if not pairs:
        return
    for wrong, message in (
        (
            learner.mixes_tokens,
            f"{type(learner).__name__} mixes the tokens of a mini-batch, and would mix the pairs of a token: "
            "set another learner",
        ),
        (
            plan.sees_weights,
            f"{type(rule).__name__} looks at the weights for every token, and this task gives several pairs a token: "
            "set another task",
        ),
        (
            rule.accumulates,
            "several pairs a token have no token steps and no clipping: set optimizer.token_steps=none and "
            "optimizer.max_norm=null",
        ),
        (
            rule.nesterov,
            "several pairs a token have no look-ahead along the momentum: set optimizer.nesterov=false",
        ),
        (
            one_by_one,
            "pairs that are learned one after the other need a linear learner, optimizer.anchor=online and no "
            "momentum: set learner=linear_map and optimizer=online",
        ),
    ):
        if wrong:
            raise MetaTTTError(message)


def say_cut(parts: Parts, phase: int | None, layout: ColumnLayout, count: int) -> None:
    """Warns once if a call of `count` tokens cuts a mini-batch of a `block` read: then its outputs depend on T."""
    begun = phase == 0 or parts.plan.period is None
    complete = (block.commit is True and isinstance(block.filled, int) for block in layout.blocks)
    whole = begun and (layout.phase == 0 or all(complete))
    if whole or parts.rule.mini_batch_size == 1 or ("cut",) in parts.plan.said or torch.compiler.is_compiling():
        return
    parts.plan.said.add(("cut",))
    warnings.warn(
        f"optimizer.read=block answers a mini-batch of optimizer.mini_batch_size={parts.rule.mini_batch_size} tokens "
        f"by what all of them teach, and this call of T={count} tokens cuts one: set optimizer.mini_batch_size to a "
        "divisor of the length of every call and document, or optimizer.read=previous",
        stacklevel=2,
    )
