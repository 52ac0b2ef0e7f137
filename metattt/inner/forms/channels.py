"""Decay for every input channel of a linear map, `W_t = Diag(a_t) W_{t−1} − η_t G_t`, for all tokens of a chunk at once.

What token s has written reaches token t as `Diag(Π_{r=s+1..t} a_r) k_sᵀ`, so `q_t·k_s` becomes
`Σ_c q_tc k_sc exp(Σ_{r=s+1..t} log a_rc)`. A product of decays may be as small as it likes and is divided by nowhere:
the chunk is halved again and again, and between a first half and a second one the decay is split at the middle, into
one factor from s to the middle and one from there to t. Both are at most 1; a decay of exactly 0 is `exp(−∞)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.inner.tokens import Carry, Tokens
from metattt.learners.fast_weights import matmul
from metattt.optimizers.base import newest

if TYPE_CHECKING:
    from metattt.inner.loop import Work


class Rows(NamedTuple):
    """Rows of a score matrix: `value` `[..., n, d]`, and whether row t stands before the decay of its own token."""

    value: Tensor
    before: bool


def chunk(work: Work, tokens: Tokens, carry: Carry, read: str | None) -> tuple[Tensor | None, Carry]:
    """Predictions and the carry after the tokens: the solved form (`metattt.inner.forms.solved`) with channel decays.

    With predictions `F_t = p_t W'_t` (W' is W_{t−1}, before or after its decay as the rule says), what is erased along
    b and written along k, `W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ F_t − k_tᵀ v_t)`:
    `(I + tril(p D b) η) F = p D₀ W₀ + tril(p D k) η v`, where D are the decays from one token to another.
    """
    assert work.learner.linear_map is not None
    assert tokens.decay is not None
    name, rule, operand = work.learner.linear_map[0], work.rule, work.operand
    weight, decay = carry[newest(carry)][name], tokens.decay
    k, v, b, eta = tokens.k, tokens.v, tokens.b, tokens.eta.unsqueeze(-1)
    erases, pairs = work.plan.linear == "squared", k.shape[2] // tokens.q.shape[2]
    rows = [Rows(k if tokens.p is None else tokens.p, rule.gradient_at == "previous")] if erases else []
    if read is not None:
        rows.append(Rows(tokens.q if pairs == 1 else tokens.q.repeat_interleave(pairs, 2), read == "exclusive"))
    scores = decayed_scores(rows, [k] if b is None or not erases else [k, b], decay, operand)
    since = decay.cumsum(2)
    seen = [matmul(row.value * _until(row, since).exp(), weight, operand) for row in rows]
    lost = [(k, -eta * v)]  # the weights lose the first, transposed, times the second
    if erases and b is None:
        lost = [(k, eta * solve(scores[0][0] * eta.mT, seen[0] - v))]
    elif erases:
        made = solve(scores[0][1] * eta.mT, seen[0] - matmul(scores[0][0], lost[0][1], operand))
        lost.append((b, eta * made))  # type: ignore[arg-type]
    y = None
    if read is not None:
        y, query = seen[-1], rows[-1]
        for (column, update), score in zip(lost, scores[-1], strict=True):
            # a query that comes after its token sees what that has written, undecayed
            own = score if query.before else score + torch.diag_embed((query.value * column).sum(-1))
            y = y - matmul(own, update, operand)
        if pairs > 1:
            y = y[:, :, (0 if query.before else pairs - 1) :: pairs]
    left = _from(decay).exp()
    moved = since[:, :, -1].exp().unsqueeze(-1) * weight
    for column, update in lost:
        moved = moved - matmul((column * left).mT, update, operand)
    return y, {**carry, "weights": {name: moved}}


def decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor, operand: torch.dtype
) -> list[list[Tensor]]:
    """`Σ_c row_tc column_sc exp(Σ_r decay_rc)` for s < t, with r from s + 1 to t, or to t − 1 for rows that stand
    before the decay of their token: `[..., n, n]`, strictly lower triangular, for every row and column.

    Args:
        rows, columns: `[..., n, d]`.
        decay: logarithms, `[..., n, d]`.
        operand: type to which matmul operands are rounded.
    """
    count = decay.shape[-2]
    size = 1 << (count - 1).bit_length()
    if size > count:
        missing = (0, 0, 0, size - count)
        rows = [row._replace(value=F.pad(row.value, missing)) for row in rows]
        columns, decay = [F.pad(x, missing) for x in columns], F.pad(decay, missing)
    found = [[decay.new_zeros(*decay.shape[:-2], size, 1, 1) for _ in columns] for _ in rows]
    half = 1
    while half < size:
        early, late = decay.unflatten(-2, (-1, 2, half)).unbind(-3)  # [..., blocks, half, d]
        left, since = _from(early).exp(), late.cumsum(-2)
        written = torch.cat([x.unflatten(-2, (-1, 2, half)).select(-3, 0) * left for x in columns], -2).mT
        for row, blocks in zip(rows, found, strict=True):
            asked = row.value.unflatten(-2, (-1, 2, half)).select(-3, 1) * _until(row, since).exp()
            between = matmul(asked, written, operand).split(half, -1)
            for i, corner in enumerate(between):
                blocks[i] = _joined(blocks[i], corner)
        half *= 2
    return [[x.squeeze(-3)[..., :count, :count] for x in blocks] for blocks in found]


def _joined(blocks: Tensor, corner: Tensor) -> Tensor:
    """`[[A, 0], [corner, B]]` of consecutive blocks A and B: `[..., 2m, h, h]` and `[..., m, h, h]` to `[..., m, 2h, 2h]`."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(first, (0, first.shape[-1])), torch.cat([corner, second], -1)], -2)


def _until(row: Rows, since: Tensor) -> Tensor:
    """Decays from the start up to a row: `since` is the sum with that of its own token. (A difference of two sums would
    be one of infinities.)"""
    return F.pad(since[..., :-1, :], (0, 0, 1, 0)) if row.before else since


def _from(decay: Tensor) -> Tensor:
    """Sums of the decays after each token, `[..., n, d]`."""
    return F.pad(decay[..., 1:, :].flip(-2).cumsum(-2).flip(-2), (0, 0, 0, 1))


def solve(system: Tensor, right: Tensor) -> Tensor:
    """`(I + T)⁻¹ R`, T strictly lower triangular."""
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
