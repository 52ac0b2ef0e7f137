"""Per-token gradients and per-token weights, token by token: the reference implementation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metattt.inner.gradients import vjp
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, rated, scaled
from metattt.learners.fast_weights import FastWeights
from metattt.memory import Memory
from metattt.modules import expand_like
from metattt.optimizers.base import Gates
from metattt.state import Tensors


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """The recurrences of the rule, written out: `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`. See
    `FORMS`."""
    rule, pairs = loop.rule, tokens.views.k.shape[2] // tokens.views.q.shape[2]
    if pairs > 1 and not loop.task.together:  # each pair is a step of its own, and one of them is read
        y, seen_at = None, pairs - 1 if read == "inclusive" else 0
        for i in range(pairs):
            pair = tokens.map(lambda x, i=i: x[:, :, i : i + 1]).with_views(q=tokens.views.q)  # type: ignore[misc]
            answer, memory = chunk(loop, pair, memory, phase, read if i == seen_at else None)
            y = answer if i == seen_at else y
        return y, memory
    anchor = loop.anchor(tokens, memory, phase)
    names, slots = list(anchor), rule.slots
    batch, _, count = tokens.gates.eta.shape
    scales = loop.learner.step_scales
    found = {name: scaled(g, scales.get(name)) for name, g in gradients(loop, tokens, anchor).items()}
    seen = []
    for t in range(count):
        step = {}
        for i, (name, g) in enumerate(found.items()):
            eta = rated(tokens.gates.eta, tokens.gates.weight_lr, i)[:, :, t]
            step[name] = -expand_like(eta, g[:, t]) * g[:, t]
        before = rule.current(memory, phase + t) if read == "exclusive" or "update" not in slots else {}
        if "update" in slots:
            at: list[Any] = [None if gate is None else gate[:, :, t : t + 1] for gate in tokens.gates]
            one = Gates(*at)
            kept = rule.coefficients(one, phase + t, memory, None).advance["update"][0].get("update")
            memory = memory | {"update": _add(_scaled(memory.get("update"), kept), step)}
        else:
            _, alpha, beta, kappa, _, decay = (None if gate is None else gate[:, :, t] for gate in tokens.gates)
            if beta is not None:
                momentum = _add(_scaled(memory.get("momentum"), beta), step)
                step = _add(_scaled(momentum, beta), step) if rule.nesterov else momentum
                memory = memory | {"momentum": momentum}
            old = _scaled(before, alpha)
            if decay is not None and old is not None:
                old = {name: decay.exp().unsqueeze(-1) * x for name, x in old.items()}
            moved = _add(old, _scaled(step, kappa))
            if rule.decay_to_init and alpha is not None:
                moved = _add(_scaled(memory["origin"], 1 - alpha), moved)
            memory = memory | {"weights": moved}
        if read is not None and t % pairs == (pairs - 1 if read == "inclusive" else 0):
            seen.append(before if read == "exclusive" else rule.current(memory, phase + t + 1))
    if read is None:
        return None, memory
    rows = {name: torch.stack([w[name] for w in seen], dim=1).flatten(0, 1) for name in names}
    y = loop.learner.predict(FastWeights(rows, loop.slow, loop.matmul_dtype), _alone(tokens.views.q))
    return y.squeeze(2).unflatten(0, (batch, count // pairs)).transpose(1, 2), memory


def gradients(loop: Parts, tokens: Tokens, anchor: Tensors) -> Tensors:
    """∇ℓ_t of every token, `[B, n, H, *shape]` by name."""
    names = list(anchor)
    batch, heads, count = tokens.gates.eta.shape
    if tokens.views.erase_key is not None or tokens.views.erase_direction is not None:
        return _generalised(loop, tokens, names[0], anchor[names[0]])
    losses = loop.losses_by(names, _alone(tokens.views.k), _alone(tokens.views.v))
    copies = [anchor[name].unsqueeze(1).expand(-1, count, *anchor[name].shape[1:]).flatten(0, 1) for name in names]
    constant = loop.plan.outer == "first_order"
    found = vjp(losses, copies, [tokens.gates.eta.new_ones(batch * count, heads, 1)], constant)[0]
    return {name: g.unflatten(0, (batch, count)) for name, g in zip(names, found, strict=True)}


def _generalised(loop: Parts, tokens: Tokens, name: str, weight: Tensor) -> Tensors:
    """`b_tᵀ(p_t W) − k_tᵀ v_t` of every token, for a linear learner: see `metattt.tasks.base.Views`."""
    k, v, _, p, b, _ = tokens.views
    made, erased = (k if p is None else p) @ weight, k if b is None else b
    change = erased.unsqueeze(-1) * made.unsqueeze(-2) - k.unsqueeze(-1) * v.unsqueeze(-2)
    change = change.detach() if loop.plan.outer == "first_order" else change
    return {name: change.transpose(1, 2)}


def _alone(x: Tensor) -> Tensor:
    """Every token as a sequence of its own: `[B, H, n, d]` to `[B·n, H, 1, d]`."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _scaled(weights: Tensors | None, factor: Tensor | None) -> Tensors | None:
    if weights is None or factor is None:
        return weights
    return {name: expand_like(factor, x) * x for name, x in weights.items()}


def _add(a: Tensors | None, b: Tensors | None) -> Tensors:
    assert b is not None
    return b if a is None else {name: a[name] + x for name, x in b.items()}
