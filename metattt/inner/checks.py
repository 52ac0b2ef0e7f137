"""What a call may not ask of the inner loop: looked at before it begins."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from metattt.errors import MetaTTTError
from metattt.inner.tokens import Block, Tokens
from metattt.optimizers.checks import check_gates
from metattt.state import Context, State

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


def check_call(loop: InnerLoop, tokens: Tokens, state: State, ctx: Context) -> None:
    """Refuses what rests on the tokens of a call: their gates, padding, documents and places.

    Raises:
        MetaTTTError: naming what to give instead.
    """
    rule, kind, mixes = loop.rule, type(loop.learner).__name__, loop.learner.mixes_tokens
    others = [gate for gate in tokens.gates[1:] if gate is not None]
    if others or (not rule.has_token_steps and rule.token_steps() is not None):  # η alone is every rule's
        check_gates(rule, tokens.gates)
    if tokens.erases or tokens.views.k.ndim == 5:
        check_generalised(loop, tokens)
    if loop.plan.looks_ahead and (ctx.valid is not None or ctx.first is not None or state.phase is None):
        raise MetaTTTError(
            f"{kind} lets tokens look at later ones, and would let them look at padding: "
            "make it causal, or give sequences of one length"
        )
    if rule.read != "final":
        return
    if ctx.first is not None:
        raise MetaTTTError(
            "reset= packs documents, and optimizer.read=final answers all queries of a call with one set of weights"
        )
    if mixes and loop.plan.period is not None and state.phase is None:
        raise MetaTTTError(
            f"{kind} looks at several tokens, and optimizer.read=final would show it empty places "
            "of sequences that are inside different places of a mini-batch: give state=None, or sequences of one length"
        )


def check_generalised(loop: InnerLoop, tokens: Tokens) -> None:
    """Refuses what only a linear learner's online rule can take: its gradient is no longer that of the loss.

    Asked when a layer is built, with what its parts give for one token, and again in every call that has such views or
    gates: parts of one's own may give something else then.
    """
    rule, what = loop.rule, "decays for every channel" if tokens.gates.decay is not None else "an erase view"
    if tokens.erases and not loop.plan.linear:
        why = loop.plan.reasons.get("solved", f"optimizer.anchor={rule.anchor}")
        raise MetaTTTError(
            f"{what} needs a linear learner, the squared or dot loss and a gradient at the newest weights, not {why}: "
            "set learner=linear_map and optimizer.anchor=online"
        )
    if tokens.erases and loop.learner.linear_map is not None and loop.learner.linear_map[1] is not None:
        raise MetaTTTError(f"{what} has no meaning for a bias: set learner.bias=false")
    if tokens.gates.decay is not None and tokens.gates.decay.shape[-1] != tokens.views.k.shape[-1]:
        raise MetaTTTError(
            f"decays for every channel are {tokens.gates.decay.shape[-1]} wide and keys {tokens.views.k.shape[-1]}: they must be equal"
        )
    alone = tokens.gates.alpha is None and tokens.gates.beta is None and not rule.decay_to_init and not loop.task.together
    if tokens.gates.decay is not None and not alone:
        raise MetaTTTError(
            "decays for every channel stand alone: no decay per head, momentum, decay to W0 or window beside them"
        )
    if (tokens.views.erase_key is not None or tokens.views.erase_direction is not None) and loop.plan.linear != "squared":
        raise MetaTTTError("an erase view needs a loss that erases, not the dot product: set task.loss=squared")
    if tokens.pairs is not None and loop.learner.mixes_tokens:
        raise MetaTTTError(
            f"{type(loop.learner).__name__} mixes the tokens of a mini-batch, and would mix the pairs of a token: set another learner"
        )
    if tokens.pairs is not None and loop.plan.sees_weights:
        raise MetaTTTError(
            f"{type(rule).__name__} looks at the weights for every token, and this task gives several pairs a token: set another task"
        )
    if tokens.pairs is not None and rule.accumulates:
        raise MetaTTTError(
            "several pairs a token have no token steps and no clipping: set optimizer.token_steps=none and max_norm=null"
        )
    if tokens.pairs is not None and rule.nesterov:
        raise MetaTTTError("several pairs a token have no look-ahead along the momentum: set optimizer.nesterov=false")
    if tokens.pairs is not None and not loop.task.together and (not loop.plan.linear or tokens.gates.beta is not None):
        raise MetaTTTError(
            "pairs that are learned one after the other need a linear learner, optimizer.anchor=online and no momentum: "
            "set learner=linear_map and optimizer=online"
        )


def say_cut(loop: InnerLoop, begin: int | None, end: int | None, blocks: Sequence[Block], tokens: Tokens) -> None:
    """Warns, once, of a `block` read whose mini-batches the call cuts: what its queries see depends on T."""
    whole = begin == 0 and (end == 0 or all(block.commit is True for block in blocks))
    if loop.rule.read != "block" or whole or loop.plan.said_cut or torch.compiler.is_compiling():
        return
    loop.plan.said_cut = True
    warnings.warn(
        "optimizer.read=block answers a mini-batch of "
        f"optimizer.mini_batch_size={loop.rule.mini_batch_size} tokens by what all of them teach, and this "
        f"call of T={tokens.views.q.shape[2]} tokens cuts one: set mini_batch_size to a divisor of the length of every "
        "call and document, or optimizer.read=previous",
        stacklevel=2,
    )
