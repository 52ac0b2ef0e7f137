"""The gradient of a weighted sum of losses: for reads that need no weights per token, and for any function of the
weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from metattt.inner.forms.dual import combine
from metattt.inner.gradients import vjp
from metattt.inner.tokens import Carry, Tokens, rated
from metattt.learners.fast_weights import FastWeights

if TYPE_CHECKING:
    from metattt.inner.loop import Work


def chunk(
    work: Work, tokens: Tokens, carry: Carry, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Carry]:
    """See `CHUNKS`; no row is read."""
    anchor = work.anchor(tokens, carry, phase)
    how = work.rule.coefficients(tokens.gates, phase, carry, read)  # type: ignore[arg-type]
    names, count = list(anchor), len(anchor)

    def losses(*weights: Tensor) -> Tensor:
        return work.losses(
            FastWeights(dict(zip(names, weights, strict=True)), work.slow, work.operand), tokens.k, tokens.v
        )

    weights = [anchor[name] for name in names]
    if tokens.rates is None:
        found = vjp(losses, weights, [weight for _, weight in how.carry.values()])
    else:  # a backward pass per weight, each with the weight's own step sizes
        factors = [rated(weight, tokens.rates, i) for _, weight in how.carry.values() for i in range(count)]
        each = vjp(losses, weights, factors)
        found = [[each[start + i][i] for i in range(count)] for start in range(0, len(each), count)]
    moved = {
        base: {name: combine(carry, factors, name, g) for name, g in zip(names, sums, strict=True)}
        for (base, (factors, _)), sums in zip(how.carry.items(), found, strict=True)
    }
    return None, carry | moved
