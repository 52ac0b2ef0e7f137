"""Decay for every input channel of a linear map, `W_t = Diag(a_t) W_{t−1} − η_t G_t`, for many tokens at once.

What token s wrote reaches token t as `Diag(Π_{r=s+1..t} a_r) k_sᵀ`, so `q_t·k_s` becomes
`Σ_c q_tc k_sc Π_{r=s+1..t} a_rc` (`metattt.ops.channel_decays`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.inner.forms.dual import scaled
from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens
from metattt.memory import Memory, newest
from metattt.ops.channel_decays import Rows, decayed_scores
from metattt.ops.chunk import matmul, solve_unit_lower

CHUNK = {"cpu": 32}  # tokens by device, where the rule leaves it open; on a CPU, joining costs more than products
LARGE_CHUNK = 64


def chunk(loop: Parts, tokens: Tokens, memory: Memory, read: str | None) -> tuple[Tensor | None, Memory]:
    """Predictions and the memory after the tokens: the solved form (`metattt.inner.forms.solved`) with channel decays.

    With predictions `F_t = p_t W'_t` (W' is W_{t−1}, before or after its decay as the rule says), what is erased along
    b and written along k, `W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ F_t − k_tᵀ v_t)`:
    `(I + tril(p D b) η) F = p D₀ W₀ + tril(p D k) η v`, where D are the decays from one token to another. All but the
    products with W₀ is done for many chunks together.
    """
    assert loop.learner.linear_map is not None
    assert tokens.gates.decay is not None
    name, rule, matmul_dtype = loop.learner.linear_map[0], loop.rule, loop.matmul_dtype
    read_before = read == "exclusive"
    base, count = memory[newest(memory)][name], tokens.views.k.shape[2]
    pairs = count // tokens.views.q.shape[2]
    size = min(
        count, max(1, (rule.compute_chunk or CHUNK.get(tokens.views.k.device.type, LARGE_CHUNK)) // pairs) * pairs
    )

    def split(x: Tensor, fill: float = 0.0) -> Tensor:
        """`[B, H, T, ·]` to `[B, H, chunks, size, ·]`."""
        return F.pad(x, (0, 0, 0, -count % size), value=fill).unflatten(2, (-1, size))

    gates = tokens.gates
    written = gates.eta if gates.kappa is None else gates.eta * gates.kappa  # there is no momentum here
    step = scaled(written, loop.learner.step_scales.get(name))
    k, v, eta = split(tokens.views.k), split(tokens.views.v), split(step.unsqueeze(-1))
    b = None if tokens.views.erase_direction is None else split(tokens.views.erase_direction)
    erases = loop.plan.linear == "squared"
    constant = loop.plan.outer == "first_order"
    if constant:  # every G = bᵀF − kᵀv is a constant for the outer loop, but its decay is not
        k, v, b = k.detach(), v.detach(), None if b is None else b.detach()
    q = split(tokens.views.q if pairs == 1 else tokens.views.q.repeat_interleave(pairs, 2))
    p = k if tokens.views.erase_key is None else split(tokens.views.erase_key)
    rows = [Rows(p, rule.gradient_at == "previous")] if erases else []
    rows += [] if read is None else [Rows(q, read_before)]
    columns = [k] if b is None or not erases else [k, b]
    scores, until, left = decayed_scores(rows, columns, split(tokens.gates.decay.exp(), 1.0), matmul_dtype)
    reached = [row.decayed(until) for row in rows]
    # The weights lose Σ columnᵀ (η made): made is `fixed + met W₀` for the erased column, and −v for another one.
    fixed, met, labels = -v, None, None
    if erases:
        right = -v if b is None else matmul(scores[0][0], eta * v, matmul_dtype)
        solved = solve_unit_lower(scores[0][-1] * eta.mT, torch.cat([right, reached[0]], -1))
        fixed, met = solved.split([v.shape[-1], k.shape[-1]], -1)
        labels = None if b is None else -eta * v
    asked = seen = None
    if read is not None:  # a query after its token sees what the token wrote, without decay
        asked, both = reached[-1], zip(scores[-1], columns, strict=True)
        seen = torch.cat([x if read_before else x + torch.diag_embed((q * y).sum(-1)) for x, y in both], -1)
    lost = torch.cat([column * left for column in columns], -2).mT
    weight, predictions = base, []
    # Chunk by chunk. (`unbind`, since a slice per chunk would make the backward pass quadratic in their number.)
    given = (eta, fixed, met, labels, until[..., -1:, :].mT, lost, asked, seen)
    by_chunk: list[Iterable[Any]] = [repeat(None) if x is None else x.unbind(2) for x in given]
    for rate, made, through, label, keep, column, query, score in zip(*by_chunk, strict=False):
        made = made if through is None else made + matmul(through, weight, matmul_dtype)
        update = rate * (made.detach() if constant else made)
        update = update if label is None else torch.cat([label, update], -2)
        if query is not None:
            predictions.append(matmul(query, weight, matmul_dtype) - matmul(score, update, matmul_dtype))
        weight = keep * weight - matmul(column, update, matmul_dtype)
    after = {**memory, "weights": {name: weight}}
    if read is None:
        return None, after
    return torch.cat(predictions, 2)[:, :, (0 if read_before else pairs - 1) : count : pairs], after
