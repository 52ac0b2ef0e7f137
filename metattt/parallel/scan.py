"""States that need not wait for each other: a segment changes them by a factor and a sum.

Where gradients do not depend on the weights that are carried (linear attention, decays, every rule whose gradients are
taken at W0), a segment leaves `W' = W'₀ + A (W − W₀)`: W'₀ is what it leaves from W₀, which every process finds out by
itself, and `A = Π α_t` a number per head. So W goes along the line as fast as it can be multiplied and added, and the
processes read their segments at the same time. The price is the inner loop of these layers twice, without projections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from metattt.errors import MetaTTTError
from metattt.inner.causality import same
from metattt.inner.packing import Call, Packing
from metattt.layer import TTTLayer
from metattt.memory import Memory
from metattt.models.language_model import LanguageModel
from metattt.modules import CausalConv, document_tail, expand_like
from metattt.optimizers.base import Gates
from metattt.parallel.heads import DividedLayer, runs_alike
from metattt.state import Context, State, Tensors
from metattt.tasks.base import Views

if TYPE_CHECKING:
    from metattt.parallel.relay import Relay

COUNT, BEFORE = 9, 5  # tokens that the layer is tried on, and tokens read before them
FIXED = ("anchor", "origin")  # slots that hold W0 from the first token to the last


class Scan:
    """What one block continues from, found while it runs.

    Args:
        relay: of the call.
        number: of the block.
        pos: `[B]` tokens that were read before.
    """

    def __init__(self, relay: Relay, number: int, pos: Tensor):
        self.relay, self.number, self.pos = relay, number, pos

    def pass_on(self, what: str, anchor: Tensor, value: Any) -> tuple[Tensor, Any]:
        """Hands on what this process's tokens leave, and takes what those before have left (`Relay.take`)."""
        return self.relay.take((self.number, what), self.relay.hand_on((self.number, what), anchor, value))

    def convolve(self, conv: CausalConv, x: Tensor, tail: None, ctx: Context) -> tuple[Tensor, Tensor]:
        """The convolution before the layer, after the last tokens of the process before; this one's go to the next at
        once."""
        own = document_tail(conv.pad(x, None), conv.weight.shape[-1] - 1, ctx)
        return CausalConv.forward(conv, *self.pass_on("tail", x, own), ctx)

    def run(
        self, layer: TTTLayer, x: Tensor, state: State, packing: Packing | None, donate_state: bool
    ) -> tuple[Tensor, State]:
        """As `TTTLayer.run`: what the task and the learner carry is taken from the process before as late as it can be,
        and handed on as soon as it can be."""
        if isinstance(layer, DividedLayer):
            layer, x = layer.local(x)
        state = state._replace(pos=self.pos)
        call = layer.call(x, state, packing)
        taken, projected = self._tails(layer, x, call.ctx)
        views, gates, state = layer.tokens(x, state._replace(task=taken), call.ctx, projected)
        views, weights = self._weights(layer, views, gates, state, call)
        y, after = layer.inner_loop(views, gates, state._replace(weights=weights), call)
        return layer.output(x, y), after

    def _tails(self, layer: TTTLayer, x: Tensor, ctx: Context) -> tuple[Tensors, tuple[Tensor, ...] | None]:
        """The tails of the task's convolutions, and the projections of `x`, through which derivatives come back; None
        where the task carries nothing."""
        if not carries(layer, x):
            return {}, None
        q, *others = layer.task.project(x)
        fresh = layer.task.views(x, {}, ctx, (q, *others))[1]  # type: ignore[call-arg]
        q, taken = self.pass_on("task", q, fresh)
        return taken or {}, (q, *others)

    def _weights(self, layer: TTTLayer, views: Views, gates: Gates, state: State, call: Call) -> tuple[Views, Memory]:
        """The views, through whose queries derivatives come back, and the weights that the process before leaves; this
        one's go on before anything is read."""
        origin = layer.inner.start(len(state.pos), gates.eta.dtype)
        last, key = self.relay.line.last, (self.number, "weights")
        fresh = {} if last else left_by(layer, views, gates, state._replace(weights=origin), call)
        q, taken = self.relay.take(key, views.q)
        weights: Memory = origin if taken is None else {**origin, **taken}
        if not last:
            q = self.relay.hand_on(key, q, moved(fresh, kept(gates, call.ctx), weights, origin))
        return views._replace(q=q), weights


def left_by(layer: TTTLayer, views: Views, gates: Gates, state: State, call: Call) -> Memory:
    """The weights after a segment that begins at `state`."""
    return layer.inner_loop(views, gates, state, call)[1].weights


def kept(gates: Gates, ctx: Context) -> Tensor:
    """A `[B, H]`: what a segment keeps of the weights before it; nothing, where a document starts in it."""
    factor = gates.eta.new_ones(gates.eta.shape[:2]) if gates.alpha is None else gates.alpha.prod(-1)
    return factor if ctx.first is None else factor.masked_fill(ctx.first.any(1, keepdim=True), 0)


def moved(fresh: Memory, factor: Tensor, weights: Memory, origin: Memory) -> Memory:
    """`W'₀ + A (W − W₀)`, of every tensor that moves; `origin` are those of a fresh sequence."""
    first, start = next(iter(origin.values())), next(iter(weights.values()))  # at the start all slots are W0
    return {
        slot: {
            name: x + expand_like(factor, x) * (weights.get(slot, start)[name] - first[name])
            for name, x in named.items()
        }
        for slot, named in fresh.items()
        if slot not in FIXED
    }


def may_scan(model: LanguageModel, tokens: int) -> bool:
    """Whether blocks can look for their states while they run: not while they are run again or compiled, nor where the
    tail of a convolution reaches beyond the process before.

    Args:
        model: of all blocks.
        tokens: that every process reads at least.
    """
    compiled = any(getattr(block, "_compiled_call_impl", None) is not None for block in model.blocks)
    tails = (
        part.weight.shape[-1] - 1 for block in model.blocks for part in block.modules() if isinstance(part, CausalConv)
    )
    return not (model.checkpoint_blocks or compiled) and tokens >= max(tails, default=0)


def scannable(layer: nn.Module, dim: int) -> bool:
    """Whether a layer's weights are moved by a segment as `moved` says, and whether it carries nothing else but what
    the last tokens leave, such as tails of convolutions: tried on a few tokens, whatever its parts are called.

    Args:
        layer: of a model.
        dim: D, width of its tokens.
    """
    if not isinstance(layer, TTTLayer) or not runs_alike(layer):
        return False
    plan, rule = layer.plan, layer.optimizer
    if not layer.learner.has_weights or plan.period is not None or plan.replays or not rule.causal or rule.has_momentum:
        return False
    if any(parameter.is_meta for parameter in layer.parameters()):
        return False
    like = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, BEFORE + COUNT, dim, generator=generator).to(like)
    with torch.no_grad():
        _, state = layer(x[:, :BEFORE])
        if state.optimizer or state.learner or not _tail_alone(layer, x[:, BEFORE:], state):
            return False
        for scale in (0.1, 10.0):  # weights that the layer's own tokens would not lead to
            weights = {
                slot: named
                if slot in FIXED
                else {n: w + scale * torch.randn(w.shape, generator=generator).to(w) for n, w in named.items()}
                for slot, named in state.weights.items()
            }
            if not _moves_so(layer, x[:, BEFORE:], state._replace(weights=weights)):
                return False
    return True


def carries(layer: TTTLayer, x: Tensor) -> bool:
    """Whether the task carries something from call to call: asked of it with one token."""
    with torch.no_grad():
        one = x[:1, :1]
        return bool(layer.task.views(one, {}, layer.call(one, layer.start(one)).ctx)[1])


def _tail_alone(layer: TTTLayer, x: Tensor, state: State) -> bool:
    """Whether what the task carries after `x` depends on `x` alone, as the tails of convolutions do, and whether its
    views are made of its projections: the graph of what is handed over goes through that of q."""
    task, ctx = layer.task, layer.call(x, state).ctx
    if not state.task:
        return True
    if any(not tensor.is_floating_point() for tensor in state.task.values()):
        return False
    try:
        projected = task.project(x)
        views, after = task.views(x, state.task, ctx, projected)  # type: ignore[call-arg]
        fresh = task.views(x, {}, ctx, projected)[1]  # type: ignore[call-arg]
        others = task.views(x, state.task, ctx, (-projected[0], *projected[1:]))[0]  # type: ignore[call-arg]
    except (MetaTTTError, TypeError):  # its projections are not told from its views
        return False
    usual = task.views(x, state.task, ctx)[0]
    pairs = [(one, other) for one, other in zip(usual, views, strict=True) if one is not None and other is not None]
    alike = [one is None for one in usual] == [one is None for one in views] and after.keys() == fresh.keys()
    alike = alike and not same(views.q, others.q)
    return alike and all(same(one, other) for one, other in [*pairs, *((after[name], fresh[name]) for name in after)])


def _moves_so(layer: TTTLayer, x: Tensor, state: State) -> bool:
    call = layer.call(x, state)
    views, gates, after = layer.tokens(x, state, call.ctx)
    if after.optimizer or after.task.keys() != state.task.keys():
        return False
    origin = layer.inner.start(len(x), gates.eta.dtype)
    found = left_by(layer, views, gates, state, call)
    fresh = left_by(layer, views, gates, state._replace(weights=origin), call)
    expected = moved(fresh, kept(gates, call.ctx), state.weights, origin)
    first = next(iter(origin.values()))
    expected |= {slot: first for slot in found if slot in FIXED}
    alike = {slot: named.keys() for slot, named in found.items()} == {slot: of.keys() for slot, of in expected.items()}
    return alike and all(same(w, expected[slot][n]) for slot, named in found.items() for n, w in named.items())
