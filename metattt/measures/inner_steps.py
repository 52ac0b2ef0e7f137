"""What the inner loop achieves: its loss before the first step and after each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.forms import Tokens
from metattt.inner.packing import make_frame
from metattt.layer import TTTLayer
from metattt.learners.fast_weights import FastWeights
from metattt.state import Context


@torch.no_grad()
def inner_losses(layer: TTTLayer, x: Tensor) -> Tensor:
    """Loss of the learner on all tokens, before the first inner step and after each (arXiv 2310.13807, Fig. 1 and 3).

    Averaged over tokens and sequences and divided by the head width, as the paper logs it; the sum over heads is its curve.

    Args:
        layer: a layer whose queries read the final weights (`optimizer=whole`).
        x: `[B, T, D]`, the layer's input.

    Returns:
        `[steps + 1, H]`.

    Raises:
        MetaTTTError: a layer without inner steps over the whole call.
    """
    rule, learner = layer.optimizer, layer.learner
    if not learner.has_weights or rule.read != "final":
        raise MetaTTTError(f"{type(rule).__name__} takes no steps on the whole call: inner_losses needs a layer with optimizer=whole")
    batch, count = x.shape[:2]
    positions = torch.arange(count, device=x.device).expand(batch, -1)
    ctx = Context(positions, None, None, rule.mini_batch_size)
    views, _ = layer.task.views(x, {}, ctx)
    gates, _ = rule.gates(x, {}, ctx)
    operand = views.k.dtype
    wide = torch.promote_types(operand, torch.float32)
    tokens = Tokens(*views, gates.eta.to(wide), *(None if gate is None else gate.to(wide) for gate in gates[1:]))
    start = torch.zeros_like(positions[:, 0])
    frame = make_frame(ctx, 0, start, start, rule.period, rule.block)
    filled = torch.full_like(start, count) % rule.mini_batch_size
    slow = {name: value.to(wide) for name, value in learner.slow.items()}
    size = rule.compute_chunk or 2048
    pieces = tokens.split([min(size, count - first) for first in range(0, count, size)])
    losses = []
    for carry in layer.inner.steps(tokens, layer.inner.start(batch, wide), frame, filled, operand):
        accessor = FastWeights(rule.current(carry, filled), slow, operand)
        with torch.autocast(x.device.type, enabled=False):
            parts = [layer.task.loss(learner.predict(accessor, p.k.to(wide)), p.v.to(wide)).sum((0, 2)) for p in pieces]
        losses.append(torch.stack(parts).sum(0) / (batch * count * x.shape[-1] // layer.num_heads))
    return torch.stack(losses)
