"""Decay for every input channel of a linear map, `W_t = Diag(a_t) W_{t−1} − η_t G_t`, for all tokens of a chunk at once.

What token s has written reaches token t as `Diag(Π_{r=s+1..t} a_r) k_sᵀ`, so `q_t·k_s` becomes
`Σ_c q_tc k_sc Π_{r=s+1..t} a_rc`. Such a product may be as small as it likes, and nothing is divided by one: tokens are
joined to pairs, pairs to fours and so on, and between a first half and a second one the product is split at the middle,
into one from s to the middle and one from there to t. Both are at most 1, and a decay may be 0 or 1 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.inner.forms.dual import scaled
from metattt.inner.tokens import Tokens
from metattt.learners.fast_weights import matmul
from metattt.memory import Memory
from metattt.optimizers.base import newest

if TYPE_CHECKING:
    from metattt.inner.loop import InnerLoop


CHUNK = {"cpu": 32}  # tokens by device, where the plan leaves it open: on a CPU, levels of joining cost more than products
LARGE_CHUNK = 64


class Rows(NamedTuple):
    """Rows of a score matrix: `value` `[..., n, d]`, and whether row t stands before the decay of its own token."""

    value: Tensor
    before: bool


def chunk(loop: InnerLoop, tokens: Tokens, carry: Memory, read: str | None) -> tuple[Tensor | None, Memory]:
    """Predictions and the carry after the tokens: the solved form (`metattt.inner.forms.solved`) with channel decays.

    With predictions `F_t = p_t W'_t` (W' is W_{t−1}, before or after its decay as the rule says), what is erased along
    b and written along k, `W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ F_t − k_tᵀ v_t)`:
    `(I + tril(p D b) η) F = p D₀ W₀ + tril(p D k) η v`, where D are the decays from one token to another. All but the
    products with W₀ is done for many chunks together.
    """
    assert loop.learner.linear_map is not None
    assert tokens.gates.decay is not None
    name, rule, operand, read_before = loop.learner.linear_map[0], loop.rule, loop.operand, read == "exclusive"
    base, count = carry[newest(carry)][name], tokens.views.k.shape[2]
    pairs = count // tokens.views.q.shape[2]
    size = min(count, max(1, (rule.compute_chunk or CHUNK.get(tokens.views.k.device.type, LARGE_CHUNK)) // pairs) * pairs)

    def split(x: Tensor, fill: float = 0.0) -> Tensor:
        """`[B, H, T, ·]` to `[B, H, chunks, size, ·]`."""
        return F.pad(x, (0, 0, 0, -count % size), value=fill).unflatten(2, (-1, size))

    written = tokens.gates.eta if tokens.gates.kappa is None else tokens.gates.eta * tokens.gates.kappa  # there is no momentum here
    step = scaled(written, loop.learner.step_scales.get(name))
    k, v, eta = split(tokens.views.k), split(tokens.views.v), split(step.unsqueeze(-1))
    b, erases = None if tokens.views.b is None else split(tokens.views.b), loop.plan.linear == "squared"
    constant = loop.plan.outer == "first_order"
    if constant:  # the outer loop takes every G = bᵀF − kᵀv for a constant, but not how far it decays
        k, v, b = k.detach(), v.detach(), None if b is None else b.detach()
    q = split(tokens.views.q if pairs == 1 else tokens.views.q.repeat_interleave(pairs, 2))
    rows = [Rows(k if tokens.views.p is None else split(tokens.views.p), rule.gradient_at == "previous")] if erases else []
    rows += [] if read is None else [Rows(q, read_before)]
    columns = [k] if b is None or not erases else [k, b]
    scores, until, left = decayed_scores(rows, columns, split(tokens.gates.decay.exp(), 1.0), operand)
    reached = [row.value * (_before(until) if row.before else until) for row in rows]
    # What the weights lose is Σ columnᵀ (η made), with made = `fixed + met W₀` of the erased column.
    fixed, met = -v, None
    if erases:
        right = -v if b is None else matmul(scores[0][0], eta * v, operand)
        both = solve(scores[0][-1] * eta.mT, torch.cat([right, reached[0]], -1))
        fixed, met = both.split([v.shape[-1], both.shape[-1] - v.shape[-1]], -1)
    own = []
    for score, column in zip(scores[-1] if read is not None else [], columns, strict=False):
        # a query that comes after its token sees what that has written, undecayed
        own.append(score if read_before else score + torch.diag_embed((q * column).sum(-1)))
    weight, answers = base, []
    # Chunk by chunk. (`unbind`, since a slice per chunk would make the backward pass quadratic in their number.)
    kept, lost = until[..., -1, :].unsqueeze(-1), [(column * left).mT for column in columns]
    pieces = zip(*(x.unbind(2) for x in (eta, v, fixed, kept)), strict=True)
    met_by = None if met is None else met.unbind(2)
    lost_by, own_by = ([x.unbind(2) for x in parts] for parts in (lost, own))
    asked_by = None if read is None else reached[-1].unbind(2)
    for i, (rate, label, made, keep) in enumerate(pieces):
        made = made if met_by is None else made + matmul(met_by[i], weight, operand)
        made = made.detach() if constant else made
        updates = [rate * made] if b is None or not erases else [-rate * label, rate * made]
        if asked_by is not None:
            y = matmul(asked_by[i], weight, operand)
            for scores_by, update in zip(own_by, updates, strict=True):
                y = y - matmul(scores_by[i], update, operand)
            answers.append(y)
        weight = keep * weight
        for columns_by, update in zip(lost_by, updates, strict=True):
            weight = weight - matmul(columns_by[i], update, operand)
    after = {**carry, "weights": {name: weight}}
    if read is None:
        return None, after
    return torch.cat(answers, 2)[:, :, (0 if read_before else pairs - 1) : count : pairs], after


def decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor, operand: torch.dtype
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """`Σ_c row_tc column_sc Π_r decay_rc` for s < t, with r from s + 1 to t, or to t − 1 for rows that stand before the
    decay of their token: `[..., n, n]`, strictly lower triangular, for every row and column.

    Args:
        rows, columns: `[..., n, d]`.
        decay: from 0 to 1, `[..., n, d]`.
        operand: type to which matmul operands are rounded.

    Returns:
        Scores by row and column, the products of decays up to and with each token, and those after each token,
        `[..., n, d]`.
    """
    count = decay.shape[-2]
    size = 1 << (count - 1).bit_length()
    if size > count:
        missing = (0, 0, 0, size - count)
        rows = [row._replace(value=F.pad(row.value, missing)) for row in rows]
        columns, decay = [F.pad(x, missing) for x in columns], F.pad(decay, missing, value=1.0)
    found = [[decay.new_zeros(*decay.shape[:-2], size, 1, 1) for _ in columns] for _ in rows]
    # products inside blocks of `half` tokens, `[..., blocks, half, d]`: up to each token, and from there on
    until, left, half = decay.unsqueeze(-2), torch.ones_like(decay).unsqueeze(-2), 1
    while half < size:
        early, late = until.unflatten(-3, (-1, 2)).unbind(-3)
        after_early, after_late = left.unflatten(-3, (-1, 2)).unbind(-3)
        halves = [x.unflatten(-2, (-1, 2, half)).select(-3, 0) * after_early for x in columns]
        written = (halves[0] if len(halves) == 1 else torch.cat(halves, -2)).mT
        for row, blocks in zip(rows, found, strict=True):
            asked = row.value.unflatten(-2, (-1, 2, half)).select(-3, 1) * (_before(late) if row.before else late)
            corners = matmul(asked, written, operand).split(half, -1)
            blocks[:] = [_joined(block, corner) for block, corner in zip(blocks, corners, strict=True)]
        until = torch.cat([early, early[..., -1:, :] * late], -2)
        left = torch.cat([after_early * late[..., -1:, :], after_late], -2)
        half *= 2
    scores = [[x.squeeze(-3)[..., :count, :count] for x in blocks] for blocks in found]
    return scores, until.squeeze(-3)[..., :count, :], left.squeeze(-3)[..., :count, :]


def _joined(blocks: Tensor, corner: Tensor) -> Tensor:
    """`[[A, 0], [corner, B]]` of consecutive blocks A and B: `[..., 2m, h, h]` and `[..., m, h, h]` to `[..., m, 2h, 2h]`."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(first, (0, first.shape[-1])), torch.cat([corner, second], -1)], -2)


def _before(until: Tensor) -> Tensor:
    """Products up to each token without its own, of those with it."""
    return F.pad(until[..., :-1, :], (0, 0, 1, 0), value=1.0)


def solve(system: Tensor, right: Tensor) -> Tensor:
    """`(I + T)⁻¹ R`, T strictly lower triangular."""
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
