"""Scores between the tokens of a chunk if every channel has its own decay.

Products of decays may be arbitrarily small, and are never divisors. Blocks of one token are joined to blocks of four
and so on. A row is multiplied by the decays from the first token of its block up to its own, a column by those from its
own to the last one: both products are at most 1, and a decay may be 0 or 1 exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.ops.chunk import decays, matmul

AT_ONCE = 4  # blocks at once: fewer passes over all rows and columns than pairs take


class Rows(NamedTuple):
    """Rows of a score matrix: `value` `[..., n, d]`, and whether row t is read before the decay of its own token."""

    value: Tensor
    before: bool


class Decayed(NamedTuple):
    """Scores by row and column `[..., n, n]`, strictly lower triangular; rows times all decays up to them, and columns
    times all after them, `[..., n, d]`; the product of all decays, `[..., 1, d]`, or None for 1."""

    scores: list[list[Tensor]]
    rows: Sequence[Tensor]
    columns: Sequence[Tensor]
    kept: Tensor | None


def decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor, matmul_dtype: torch.dtype
) -> Decayed:
    """`Σ_c row_tc column_sc Π_r decay_rc` for s < t, with r from s + 1 to t, or to t − 1 for rows that stand before the
    decay of their token.

    Args:
        rows, columns: `[..., n, d]`.
        decay: from 0 to 1, `[..., n, d]`.
        matmul_dtype: type to which the operands of products are rounded.
    """
    count = decay.shape[-2]
    asked = torch.stack([row.value if row.before else row.value * decay for row in rows], -2)
    written, total = torch.stack(list(columns), -2), decay.unsqueeze(-2)
    if missing := (1 << (count - 1).bit_length()) - count:
        empty = (0, 0, 0, 0, 0, missing)
        asked, written, total = F.pad(asked, empty), F.pad(written, empty), F.pad(total, empty, value=1.0)
    size = total.shape[-3]
    found = decay.new_zeros(*total.shape[:-2], len(rows), len(columns))
    while total.shape[-3] > 1:  # `[..., blocks, rows in a block, ·]`
        joined = min(AT_ONCE, total.shape[-3])
        q, k, gate, scores = [x.unflatten(-3, (-1, joined)).unbind(-3) for x in (asked, written, total, found)]
        width, written, total = scores[0].shape[-1], k[0], gate[0]
        reached, lines = [q[0]], [F.pad(scores[0], (0, (joined - 1) * width))]
        for j in range(1, joined):
            line = torch.cat([matmul(q[j], written.mT, matmul_dtype), scores[j]], -1)
            lines.append(F.pad(line, (0, (joined - 1 - j) * width)))
            reached.append(q[j] * total)
            written, total = torch.cat([written * gate[j], k[j]], -2), total * gate[j]
        asked, found = torch.cat(reached, -2), torch.cat(lines, -2)
    grid = found.squeeze(-3).unflatten(-1, (size, -1)).unflatten(-3, (size, -1))[..., :count, :, :count, :]
    reached, left = [x.squeeze(-3).unflatten(-2, (size, -1))[..., :count, :, :].unbind(-2) for x in (asked, written)]
    return Decayed([list(row.unbind(-1)) for row in grid.unbind(-3)], reached, left, total.squeeze(-3))


def evenly_decayed_scores(
    rows: Sequence[Rows], columns: Sequence[Tensor], decay: Tensor | None, matmul_dtype: torch.dtype
) -> Decayed:
    """`decayed_scores` where all channels have one decay, `[..., n, 1]`, or none: then all products are 1."""
    count, found = columns[0].shape[-2], []
    written = (columns[0] if len(columns) == 1 else torch.cat(list(columns), -2)).mT
    products = [matmul(row.value, written, matmul_dtype).split(count, -1) for row in rows]
    if decay is None:
        return Decayed([[x.tril(-1) for x in row] for row in products], [row.value for row in rows], columns, None)
    between, until = decays(decay.squeeze(-1))
    until, left, reached = until.unsqueeze(-1), between[..., -1, :].unsqueeze(-1), []
    for row, scores in zip(rows, products, strict=True):
        reaches = F.pad(between[..., :-1, :], (0, 0, 1, 0)) if row.before else between
        found.append([(x * reaches).tril(-1) for x in scores])
        reached.append(row.value * (F.pad(until[..., :-1, :], (0, 0, 1, 0), value=1.0) if row.before else until))
    return Decayed(found, reached, [column * left for column in columns], until[..., -1:, :])
