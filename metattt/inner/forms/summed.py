"""The gradient of a weighted sum of losses: for reads that need no weights per token, and for any function of the
weights."""

from __future__ import annotations

from torch import Tensor, nn

from metattt.functional import with_values
from metattt.inner.forms.dual import band_of, combine
from metattt.inner.gradients import vjp
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, rated, scaled
from metattt.memory import Memory
from metattt.state import Tensors


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`; no row is read."""
    anchor = loop.anchor(tokens, memory, phase)
    how = loop.rule.coefficients(tokens.gates, phase, memory, read)
    names, count = list(anchor), len(anchor)
    if loop.plan.outer == "first_order":
        loop, tokens, anchor = _as_constants(loop, tokens, anchor)

    losses = loop.losses_by(names, tokens.views.k, tokens.views.v)
    weights, band = [anchor[name] for name in names], band_of(tokens)

    def of_losses(factor: Tensor) -> Tensor:
        return factor if band is None else factor @ band

    if tokens.gates.weight_lr is None:
        found = vjp(losses, weights, [of_losses(weight) for _, weight in how.advance.values()])
    else:  # a backward pass per weight, each with the weight's own step sizes
        factors = [
            of_losses(rated(weight, tokens.gates.weight_lr, i))
            for _, weight in how.advance.values()
            for i in range(count)
        ]
        each = vjp(losses, weights, factors)
        found = [[each[start + i][i] for i in range(count)] for start in range(0, len(each), count)]
    scales = loop.learner.step_scales
    after = dict(memory)
    for (base, (kept, _)), sums in zip(how.advance.items(), found, strict=True):
        moved = {name: scaled(g, scales.get(name)) for name, g in zip(names, sums, strict=True)}
        after[base] = combine(memory, kept, moved)
    return None, after


def _as_constants(loop: Parts, tokens: Tokens, anchor: Tensors) -> tuple[Parts, Tokens, Tensors]:
    """Detaches the inputs of the gradients, so that `Σ_s η_s G_s` has derivatives with respect to η only.

    The second-order graph is still built.
    """
    parts = nn.ModuleList((loop.task, loop.learner))
    task, learner = with_values(parts, {name: x.detach() for name, x in parts.named_parameters()})
    slow = {name: x.detach() for name, x in loop.slow.items()}
    views = tokens.with_views(k=tokens.views.k.detach(), v=tokens.views.v.detach())
    fixed = loop._replace(task=task, learner=learner, slow=slow)  # type: ignore[arg-type]
    return fixed, views, {name: x.detach() for name, x in anchor.items()}
