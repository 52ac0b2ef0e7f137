"""Per-token gradients and per-token weights, token by token: the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metattt.inner.forms.dual import scaled
from metattt.inner.gradients import vjp
from metattt.inner.tokens import Carry, Tokens, rated
from metattt.learners.fast_weights import FastWeights
from metattt.modules import spread
from metattt.state import Tensors

if TYPE_CHECKING:
    from metattt.inner.loop import Work


def chunk(
    work: Work, tokens: Tokens, carry: Carry, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Carry]:
    """The recurrences of the rule, written out: `S_t = β_t S_{t−1} − η_t G_t`, `W_t = α_t W_{t−1} + κ_t S_t`. See
    `CHUNKS`."""
    rule, anchor = work.rule, work.anchor(tokens, carry, phase)
    names, bases = list(anchor), rule.bases
    batch, _, count = tokens.eta.shape
    gradients = _gradients(work, tokens, anchor)
    seen = []
    for t in range(count):
        step = {}
        for i, (name, g) in enumerate(gradients.items()):
            eta = rated(tokens.eta, tokens.rates, i)[:, :, t]
            step[name] = -spread(eta, g[:, t]) * g[:, t]
        before = rule.current(carry, phase + t) if read == "exclusive" or "update" not in bases else {}
        if "update" in bases:
            carry = carry | {"update": _add(carry.get("update"), step)}
        else:
            alpha, beta, kappa = (
                None if gate is None else gate[:, :, t] for gate in (tokens.alpha, tokens.beta, tokens.kappa)
            )
            if beta is not None:
                memory = _add(_scaled(carry.get("momentum"), beta), step)
                step = _add(_scaled(memory, beta), step) if rule.nesterov else memory
                carry = carry | {"momentum": memory}
            moved = _add(_scaled(before, alpha), _scaled(step, kappa))
            if rule.pull and alpha is not None:
                moved = _add(_scaled(carry["origin"], 1 - alpha), moved)
            carry = carry | {"weights": moved}
        if read is not None:
            seen.append(before if read == "exclusive" else rule.current(carry, phase + t + 1))
    if read is None:
        return None, carry
    rows = {name: torch.stack([w[name] for w in seen], dim=1).flatten(0, 1) for name in names}
    y = work.learner.predict(FastWeights(rows, work.slow, work.operand), _alone(tokens.q))
    return y.squeeze(2).unflatten(0, (batch, count)).transpose(1, 2), carry


def _gradients(work: Work, tokens: Tokens, anchor: Tensors) -> Tensors:
    """∇ℓ_t of every token, `[B, n, H, *shape]` by name."""
    names = list(anchor)
    batch, heads, count = tokens.eta.shape

    def losses(*weights: Tensor) -> Tensor:
        accessor = FastWeights(dict(zip(names, weights, strict=True)), work.slow, work.operand)
        return work.losses(accessor, _alone(tokens.k), _alone(tokens.v))

    copies = [anchor[name].unsqueeze(1).expand(-1, count, *anchor[name].shape[1:]).flatten(0, 1) for name in names]
    constant = work.plan.outer == "first_order"
    found = vjp(losses, copies, [tokens.eta.new_ones(batch * count, heads, 1)], constant)[0]
    scales = work.learner.step_scales
    return {n: scaled(g, scales.get(n)).unflatten(0, (batch, count)) for n, g in zip(names, found, strict=True)}


def _alone(x: Tensor) -> Tensor:
    """Every token as a sequence of its own: `[B, H, n, d]` to `[B·n, H, 1, d]`."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _scaled(weights: Tensors | None, factor: Tensor | None) -> Tensors | None:
    if weights is None or factor is None:
        return weights
    return {name: spread(factor, x) * x for name, x in weights.items()}


def _add(a: Tensors | None, b: Tensors | None) -> Tensors:
    assert b is not None
    return b if a is None else {name: a[name] + x for name, x in b.items()}
