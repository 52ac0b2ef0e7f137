"""Online rules of a linear map without momentum, `W_t = Diag(a_t) W_{t−1} − η_t G_t`, many chunks of tokens at once.

The decay a is of every head or of every input channel. What token s wrote reaches token t as
`Diag(Π_{r=s+1..t} a_r) k_sᵀ`, so `q_t·k_s` becomes `Σ_c q_tc k_sc Π_{r=s+1..t} a_rc` (`metattt.ops.channel_decays`; for
one decay a head it is a factor). All but one product a chunk is done for all chunks together.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metattt.inner.parts import Parts
from metattt.inner.tokens import Tokens, scaled
from metattt.memory import Memory, newest
from metattt.ops.channel_decays import Rows, decayed_scores, evenly_decayed_scores
from metattt.ops.chunk import matmul, solve_unit_lower

CHUNK = {"cpu": 32}  # tokens by device, where the rule leaves it open; more take more products, and fewer operations
LARGE_CHUNK = 64


def chunk(
    loop: Parts, tokens: Tokens, memory: Memory, phase: int | Tensor, read: str | None
) -> tuple[Tensor | None, Memory]:
    """See `FORMS`: the triangular system of `metattt.inner.forms.solved`, for such a rule, which has no phase.

    With predictions `F_t = p_t W'_t` (W' is W_{t−1}, before or after its decay as the rule says), what is erased along
    b and written along k, `W_t = Diag(a_t) W_{t−1} − η_t (b_tᵀ F_t − k_tᵀ v_t)`:
    `(I + tril(p D b) η) F = p D₀ W₀ + tril(p D k) η v`, where D are the decays from one token to another.
    """
    rule, matmul_dtype, gates, count = loop.rule, loop.matmul_dtype, tokens.gates, tokens.views.k.shape[2]
    ((name, base),) = memory[newest(memory)].items()
    read_before = read == "exclusive"
    pairs = count // tokens.views.q.shape[2]
    usual = rule.compute_chunk or CHUNK.get(tokens.views.k.device.type, LARGE_CHUNK)
    size = min(count, max(1, usual // pairs) * pairs)

    def split(x: Tensor, fill: float = 0.0) -> Tensor:
        """`[B, H, T, ·]` to `[B, H, chunks, size, ·]`."""
        x = F.pad(x, (0, 0, 0, -count % size), value=fill) if count % size else x
        return x.unflatten(2, (-1, size))

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
    rows.append(Rows(q, read_before))
    columns = [k] if b is None or not erases else [k, b]
    if gates.decay is not None:
        found = decayed_scores(rows, columns, split(gates.decay.exp(), 1.0), matmul_dtype)
    else:
        decay = None if gates.alpha is None else split(gates.alpha.unsqueeze(-1), 1.0)
        found = evenly_decayed_scores(rows, columns, decay, matmul_dtype)
    scores, reached, left, kept = found
    lost = torch.cat(list(left), -2).mT
    # The weights lose Σ columnᵀ (η made): made is `fixed + met W₀` for the erased column, and −v for another one.
    fixed, met, labels = -v, None, None
    if erases:
        right = -v if b is None else matmul(scores[0][0], eta * v, matmul_dtype)
        solved = solve_unit_lower(scores[0][-1] * eta.mT, torch.cat([right, reached[0]], -1))
        fixed, met = solved.split([v.shape[-1], k.shape[-1]], -1)
        labels = None if b is None else -eta * v

    # The weights of chunk after chunk are one product each, since what is made is linear in those before it.
    gone = lost[..., -size:] * eta.mT
    keep = None if kept is None else kept.mT
    less = 0 if labels is None else matmul(lost[..., :size], labels, matmul_dtype)
    change = None if met is None else matmul(gone, met, matmul_dtype)
    starts, weight = _weights(base, keep, change, matmul(gone, fixed, matmul_dtype) + less, matmul_dtype)
    made = fixed if met is None else fixed + matmul(met, starts, matmul_dtype)
    if constant and erases:
        made = made.detach()
        starts, weight = _weights(base, keep, None, matmul(gone, made, matmul_dtype) + less, matmul_dtype)
    memory = {**memory, "weights": {name: weight}}
    if read is None:
        return None, memory
    made = eta * made
    made = made if labels is None else torch.cat([labels, made], -2)
    # A query after its token sees what the token wrote, without decay.
    both = zip(scores[-1], columns, strict=True)
    seen = torch.cat([x if read_before else x + torch.diag_embed((q * y).sum(-1)) for x, y in both], -1)
    y = matmul(reached[-1], starts, matmul_dtype) - matmul(seen, made, matmul_dtype)
    return y.flatten(2, 3)[:, :, (0 if read_before else pairs - 1) : count : pairs], memory


def _weights(
    base: Tensor, keep: Tensor | None, change: Tensor | None, taken: Tensor, matmul_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """W at the start of every chunk, `[B, H, chunks, d_in, d_out]`, and after the last: `W' = keep W − change W −
    taken`."""
    starts, weight = [], base
    given = (keep, None if change is None else change.to(matmul_dtype), taken)
    # `unbind`, since a slice per chunk would make the backward pass quadratic in their number
    by_chunk: list[Iterable[Any]] = [repeat(None) if x is None else x.unbind(2) for x in given]
    for share, erased, less in zip(*by_chunk, strict=False):
        starts.append(weight)
        kept = weight if share is None else share * weight
        less = less if erased is None else less + (erased @ weight.to(matmul_dtype)).to(less.dtype)
        weight = kept - less
    return torch.stack(starts, 2), weight
