"""For learners that mix tokens: the open mini-batch is stored as raw tokens, and recomputed by the next call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.inner.columns import ColumnLayout, make_layout, take_columns
from metattt.inner.plan import Plan
from metattt.inner.tokens import NAMES, Tokens
from metattt.modules import expand_like
from metattt.state import Context, State, Tensors


def _with_tail(tokens: Tokens, ctx: Context, state: State, size: int) -> tuple[Tokens, Context]:
    """The raw tokens of the open mini-batch in front of the new ones."""
    stored = state.learner
    slots = state.phase if state.phase is not None else size - 1
    if slots == 0:
        return tokens, ctx
    given = [name for name, x in zip(NAMES, tokens.tensors, strict=True) if x is not None]
    if sorted(stored) != sorted(given):
        raise MetaTTTError(
            f"the tokens of the open mini-batch have {', '.join(stored)}, and those of this call {', '.join(given)}: "
            "give the same views and gates in every call"
        )
    batch = tokens.views.k.shape[0]
    filled = torch.arange(slots, device=state.pos.device) >= (slots - state.pos % size).unsqueeze(1)
    joined = [
        None if x is None else torch.cat([stored[name][:, :, -slots:].to(x.dtype), x], dim=2)
        for name, x in zip(NAMES, tokens.tensors, strict=True)
    ]
    valid = ctx.valid
    if valid is not None or state.phase is None:
        valid = torch.ones_like(ctx.positions, dtype=torch.bool) if valid is None else valid
        valid = torch.cat([filled, valid], dim=1)
    first = None if ctx.first is None else torch.cat([filled.new_zeros(batch, slots), ctx.first], dim=1)
    context = ctx._replace(positions=F.pad(ctx.positions, (slots, 0)), valid=valid, first=first)
    return Tokens.from_tensors(joined), context


def begun_again(plan: Plan, tokens: Tokens, state: State, ctx: Context, size: int) -> tuple[Tokens, ColumnLayout]:
    """The tokens of a call after those of the open mini-batch, and the columns that they all go to."""
    tokens, ctx = _with_tail(tokens, ctx, state, size)
    start = torch.zeros_like(state.pos)
    lead = start if state.phase is not None else state.pos % size - (size - 1)
    begin = state._replace(phase=None if state.phase is None else 0)
    return tokens, make_layout(ctx, begin, plan.period, plan.block, False, None, start, lead)


def tail(placed: Tokens, layout: ColumnLayout, after: Tensor, size: int) -> Tensors:
    """The last `b − 1` columns of every sequence, zeros where they do not belong to the open mini-batch."""
    columns = placed.views.k.shape[2]
    places = torch.arange(1, columns + 1, device=after.device)
    end = torch.full_like(after, columns) if layout.is_filled is None else (places * layout.is_filled).amax(1)
    slot = torch.arange(size - 1, device=after.device)
    belongs = (slot >= size - 1 - (after % size).unsqueeze(1)).unsqueeze(1)
    index = (end.unsqueeze(1) + slot).unsqueeze(1)  # in columns padded by b − 1 on the left
    kept_tokens = {}
    for name, x in zip(NAMES, placed.tensors, strict=True):
        if x is None:
            continue
        padded = torch.cat([x.new_zeros(*x.shape[:2], size - 1, *x.shape[3:]), x], dim=2)
        kept_tokens[name] = take_columns(padded, index) * expand_like(belongs, padded)
    return kept_tokens
