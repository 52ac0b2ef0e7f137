"""One call of the inner loop on a stream of tokens: put them on the frame, scan, and hand the hidden state on."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.forms import Carry, Tokens
from metattt.inner.loop import InnerLoop, mask_gates
from metattt.inner.packing import Frame, make_frame
from metattt.optimizers.base import Gates
from metattt.state import Context, State, Tensors
from metattt.tasks.base import Views


class Result(NamedTuple):
    """Predictions `[B, H, T, d]`, and what the next call needs."""

    y: Tensor
    weights: Carry
    phase: int | None
    learner: Tensors


def stream(loop: InnerLoop, views: Views, gates: Gates, state: State, after: Tensor, ctx: Context) -> Result:
    """Runs the inner loop over the tokens of one call.

    Args:
        views, gates: by token, padding last.
        state: the state before the call; its `weights` are empty at the start of a sequence.
        after: `[B]` tokens since the start of the document, after the call.
    """
    rule = loop.optimizer
    if ctx.first is not None and rule.read == "final":
        raise MetaTTTError("reset= packs documents, and optimizer.read=final answers all queries of a call with one set of weights")
    operand = views.k.dtype
    wide = torch.promote_types(operand, torch.float32)
    carry = state.weights or loop.start(views.k.shape[0], wide)
    size = rule.mini_batch_size
    tokens = Tokens(*views, gates.eta.to(wide), *(None if gate is None else gate.to(wide) for gate in gates[1:]))
    phase, count = state.phase, tokens.k.shape[2]
    open_ = lead = state.pos % size
    if loop.replays:
        tokens, ctx = _with_tail(tokens, ctx, state, size)
        phase, lead = (0 if phase is not None else None), (open_ - (size - 1) if phase is None else torch.zeros_like(open_))
        open_ = torch.zeros_like(open_)
    frame = make_frame(ctx, phase, open_, lead, rule.period, rule.block)
    placed = mask_gates(tokens.map(frame.place), frame.live)
    y, carry = loop.run(placed, carry, frame, after % size, operand)
    y = frame.take(y)
    tail = _tail(placed, frame, after, size) if loop.replays else {}
    return Result(y[:, :, y.shape[2] - count :], carry, frame.phase, tail)


def _with_tail(tokens: Tokens, ctx: Context, state: State, size: int) -> tuple[Tokens, Context]:
    """The raw tokens of the open mini-batch in front of the new ones."""
    stored = state.learner
    slots = state.phase if state.phase is not None else size - 1
    if slots == 0:
        return tokens, ctx
    batch = tokens.k.shape[0]
    filled = torch.arange(slots, device=state.pos.device) >= (slots - state.pos % size).unsqueeze(1)
    joined = {
        name: None if x is None else torch.cat([stored[name][:, :, size - 1 - slots :].to(x.dtype), x], dim=2)
        for name, x in tokens._asdict().items()
    }
    valid = ctx.valid
    if valid is not None or state.phase is None:
        valid = torch.ones_like(ctx.positions, dtype=torch.bool) if valid is None else valid
        valid = torch.cat([filled, valid], dim=1)
    first = None if ctx.first is None else torch.cat([filled.new_zeros(batch, slots), ctx.first], dim=1)
    context = ctx._replace(positions=F.pad(ctx.positions, (slots, 0)), valid=valid, first=first)
    return Tokens(**joined), context  # type: ignore[arg-type]


def _tail(placed: Tokens, frame: Frame, after: Tensor, size: int) -> Tensors:
    """The last `b − 1` columns of every sequence, zeros where they do not belong to the open mini-batch."""
    columns = placed.k.shape[2]
    places = torch.arange(1, columns + 1, device=after.device)
    end = torch.full_like(after, columns) if frame.live is None else (places * frame.live).amax(1)
    slot = torch.arange(size - 1, device=after.device)
    belongs = (slot >= size - 1 - (after % size).unsqueeze(1)).unsqueeze(1)
    index = end.unsqueeze(1) + slot  # in columns padded by b − 1 on the left
    tail = {}
    for name, x in placed._asdict().items():
        if x is None:
            continue
        padded = torch.cat([x.new_zeros(*x.shape[:2], size - 1, *x.shape[3:]), x], dim=2)
        shape = (index.shape[0], 1, size - 1, *(1,) * (x.ndim - 3))
        kept = padded.gather(2, index.view(shape).expand(-1, x.shape[1], -1, *x.shape[3:]))
        tail[name] = kept * belongs.view(index.shape[0], 1, size - 1, *(1,) * (x.ndim - 3))
    return tail
