"""Checks of an inner optimizer: gates that its computation would ignore, and what its methods return."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.memory import at_start, fits, zeros
from metattt.optimizers.base import Gates, InnerOptimizer


def settle(rule: InnerOptimizer, num_heads: int, gates: object) -> None:
    """Finds out which gates a rule has, when a layer is built and after a setting was assigned.

    Args:
        num_heads: H.
        gates: what `gates` gives for a token, if it is known before the first call.

    Raises:
        MetaTTTError: token steps and gates that cannot go together.
    """
    if type(rule).current is not InnerOptimizer.current and type(rule).coefficients is InnerOptimizer.coefficients:
        raise MetaTTTError(
            f"{type(rule).__name__} has its own current, and not the coefficients of the same W_t, by which most forms "
            "compute it: define both, or neither"
        )
    if "commit" not in rule.slots and getattr(rule.commit, "__func__", None) is not InnerOptimizer.commit:
        raise MetaTTTError(
            f"{type(rule).__name__} has its own commit, which is called after mini-batches alone: leave it out, or set "
            f"optimizer.anchor=minibatch (now {rule.anchor})"
        )
    tau, size = rule.token_steps(), rule.mini_batch_size
    if tau is not None and tau.shape not in ((1, size), (num_heads, size)):
        raise MetaTTTError(
            f"{type(rule).__name__}.token_steps has shape {list(tau.shape)}, expected [1 or {num_heads}, {size}] for "
            f"optimizer.mini_batch_size={size}"
        )
    # (not by assignment: that would count as a changed setting)
    rule.__dict__["has_token_steps"] = tau is not None
    if isinstance(gates, Gates):
        if gates.beta is not None:
            rule.__dict__["has_momentum"] = True
        check_gates(rule, gates)


def check_gates(rule: InnerOptimizer, gates: Gates) -> None:
    """Raises an error for gates that the rule's computation would ignore. Called when a layer is built, and in every
    call.

    Raises:
        MetaTTTError: naming the gate, and what to leave out or to set.
    """
    kind = type(rule).__name__
    if gates.weight_lr is not None and gates.weight_lr.shape[-1] != len(rule.weight_names):
        raise MetaTTTError(
            f"{kind} gives weight_lr of shape {list(gates.weight_lr.shape)}, expected [B, H, T, "
            f"{len(rule.weight_names)}]: one for each of {', '.join(rule.weight_names)}"
        )
    if gates.weight_lr is not None and (rule.read in ("inclusive", "exclusive") or rule.anchor == "online"):
        raise MetaTTTError(
            f"{kind} gives weight_lr, which weights per token do not have (optimizer.anchor={rule.anchor}, "
            f"optimizer.read={rule.read}): set anchor=minibatch and read=previous, or learner.step_scale in their place"
        )
    if getattr(rule, "counts", False) and gates.alpha is gates.beta is gates.kappa is None:
        raise MetaTTTError(f"{kind} counts tokens by the gate kappa, and gives none: give kappa=torch.ones_like(eta)")
    if type(rule).coefficients is not InnerOptimizer.coefficients:
        return  # it computes with its gates itself
    if not rule.has_token_steps and rule.token_steps() is not None:
        raise MetaTTTError(
            f"{kind}.token_steps gives τ, and gave none when the layer was built: give it at any time, of ones"
        )
    extra = [name for name in ("alpha", "beta", "kappa", "decay") if getattr(gates, name) is not None]
    if extra and rule.accumulates:
        what = "token_steps" if rule.has_token_steps else "max_norm"
        raise MetaTTTError(
            f"{kind} gives {', '.join(extra)} beside {what}, whose W_t = W_a + τ_t M_t has no other gate than η: leave "
            f"out one of them, or set optimizer.{what}={'none' if what == 'token_steps' else 'null'}"
        )
    if gates.beta is not None and not rule.has_momentum:
        raise MetaTTTError(
            f"{kind} gives beta, and gave none when the layer was built: set has_momentum = True on the class"
        )


class WrongReturn(MetaTTTError):
    """A method of a part returns something else than its contract says."""


def check_move(rule: Any, init: Iterable[tuple[str, Tensor]], gates: Gates) -> None:
    """Asks a `BlockRule` for one step on gradients of 0, from the weights `init` `[H, *shape]`.

    Raises:
        WrongReturn: `move` does not return the slots that it keeps, with all weights in the shapes that they had, or
            writes to what it is given.
    """
    begun = rule.begin(at_start(rule.slots, init, 1, torch.float32))
    memory = {slot: zeros(slot, begun["commit"]) for slot in ("update", *rule.own_slots)} | begun
    pooled = (None if gate is None else gate.mean(-1) for gate in (gates.alpha, gates.beta))
    given = [(x, x._version) for held in memory.values() for x in held.values()]
    moved = rule.move(memory, *pooled)
    if any(x._version != version for x, version in given):
        raise WrongReturn(
            f"{type(rule).__name__}.move changes in place what it is given, which the state of an earlier call holds, "
            "too: make new tensors, such as m + u for m.add_(u)"
        )
    shapes = {name: tuple(weight.shape) for name, weight in memory["commit"].items()}
    for slot in ("commit", *rule.own_slots):
        held = moved.get(slot) if isinstance(moved, Mapping) else None
        if not isinstance(held, dict) or not fits(slot, held, shapes):
            what = {name: list(x.shape) for name, x in held.items()} if isinstance(held, dict) else held
            raise WrongReturn(
                f"{type(rule).__name__}.move returns {slot} {what}: it must return "
                f"{' and '.join(('commit', *rule.own_slots))}, each with all weights, "
                f"{ {name: list(shape) for name, shape in shapes.items()} }"
            )


RULE = (
    "coefficients", "current", "commit", "pool_gates", "slots", "permutation", "accumulates", "period", "block",
)  # fmt: skip
"""What makes `InnerOptimizer` the linear rule that kernels compute: none of it may be replaced, on the class or on the
object."""


def linear_rule(
    optimizer: InnerOptimizer, anchor: str = "minibatch", reads: Collection[str] = ("inclusive",)
) -> str | None:
    """Why an optimizer is not a linear rule that begins anew with every mini-batch (with the anchor `online`, with
    every token), or None if it is: common to all kernels."""
    changed = [
        name
        for name in RULE
        if name in vars(optimizer) or getattr(type(optimizer), name) is not getattr(InnerOptimizer, name)
    ]
    own = "acts once per mini-batch" if hasattr(optimizer, "move") else f"has its own {', '.join(changed)}"
    for wrong, reason in (
        (bool(changed), f"{type(optimizer).__name__} {own}"),
        (optimizer.anchor != anchor, f"optimizer.anchor={optimizer.anchor}"),
        (optimizer.read not in reads, f"optimizer.read={optimizer.read}"),
        (optimizer.steps != 1, f"optimizer.steps={optimizer.steps}"),
        (optimizer.max_norm is not None, "optimizer.max_norm clips"),
        (optimizer.has_momentum, "momentum is carried between mini-batches"),
        (optimizer.decay_to_init, "optimizer.decay_to_init decays towards W0"),
    ):
        if wrong:
            return reason
    return None
