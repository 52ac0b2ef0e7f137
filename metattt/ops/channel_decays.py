"""Scores between the tokens of a chunk if every channel has its own decay.

Products of decays may be arbitrarily small, and are never divisors. Tokens are joined to pairs, pairs to
fours and so on. Between a first half and a second one the product is split at the middle: into one from s to the middle
and one from there to t. Both are at most 1, and a decay may be 0 or 1 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.ops.chunk import decays, matmul


class Rows(NamedTuple):
    """Rows of a score matrix: `value` `[..., n, d]`, and whether row t is read before the decay of its own token."""

    value: Tensor
    before: bool

    def decayed(self, until: Tensor | None) -> Tensor:
        """The rows times the products of decays up to each token; `until` `[..., n, d]` are those with its own, None is
        1."""
        if until is None:
            return self.value
        return self.value * (F.pad(until[..., :-1, :], (0, 0, 1, 0), value=1.0) if self.before else until)


def decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor, matmul_dtype: torch.dtype
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """`Σ_c row_tc column_sc Π_r decay_rc` for s < t, with r from s + 1 to t, or to t − 1 for rows that stand before the
    decay of their token: `[..., n, n]`, strictly lower triangular, for every row and column.

    Args:
        rows, columns: `[..., n, d]`.
        decay: from 0 to 1, `[..., n, d]`.
        matmul_dtype: type to which the operands of products are rounded.

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
            asked = row._replace(value=row.value.unflatten(-2, (-1, 2, half)).select(-3, 1)).decayed(late)
            corners = matmul(asked, written, matmul_dtype).split(half, -1)
            blocks[:] = [_joined(block, corner) for block, corner in zip(blocks, corners, strict=True)]
        until = torch.cat([early, early[..., -1:, :] * late], -2)
        left = torch.cat([after_early * late[..., -1:, :], after_late], -2)
        half *= 2
    scores = [[x.squeeze(-3)[..., :count, :count] for x in blocks] for blocks in found]
    return scores, until.squeeze(-3)[..., :count, :], left.squeeze(-3)[..., :count, :]


def evenly_decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor | None, matmul_dtype: torch.dtype
) -> tuple[list[list[Tensor]], Tensor | None, Tensor | None]:
    """`decayed_scores` where all channels have one decay, `[..., n, 1]`, or none: then all products are 1 (None)."""
    count = columns[0].shape[-2]
    between = until = left = None
    if decay is not None:
        between, until = decays(decay.squeeze(-1))
        until, left = until.unsqueeze(-1), between[..., -1, :].unsqueeze(-1)
    found, written = [], (columns[0] if len(columns) == 1 else torch.cat(list(columns), -2)).mT
    for row in rows:
        products = matmul(row.value, written, matmul_dtype).split(count, -1)
        if between is not None:
            reaches = F.pad(between[..., :-1, :], (0, 0, 1, 0)) if row.before else between
            products = [x * reaches for x in products]
        found.append([x.tril(-1) for x in products])
    return found, until, left


def _joined(blocks: Tensor, corner: Tensor) -> Tensor:
    """`[[A, 0], [corner, B]]` of consecutive blocks A and B: `[..., 2m, h, h]`, `[..., m, h, h]` to `[..., m, 2h,
    2h]`."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(first, (0, first.shape[-1])), torch.cat([corner, second], -1)], -2)
