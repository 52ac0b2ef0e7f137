"""Log-linear attention: a linear attention whose past is kept in buckets that double in size."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metattt.errors import MetaTTTError
from metattt.learners.chunks import Chunk, chunks
from metattt.learners.non_parametric import NonParametric
from metattt.modules import exact
from metattt.ops.chunk import solve_unit_lower
from metattt.registry import register
from metattt.setting import setting
from metattt.state import Context, DataGates, Tensors
from metattt.tasks.base import Views


class ChunkMap(NamedTuple):
    """The effect of a chunk of tokens on a linear memory S, `[B, H, ...]`: `o_t = to_past_t S_0 + Σ_s to_tokens_ts
    v_s`, and `S_c = onward S_0 + Σ_s kept_sᵀ v_s` after it."""

    to_tokens: Tensor  # [B, H, c, c]
    to_past: Tensor  # [B, H, c, d]
    kept: Tensor  # [B, H, c, d]
    onward: Tensor  # [B, H, d, d]


@register(group="learner", name="log_linear")
class LogLinear(NonParametric, takes=("residual", "norm")):
    """`o_t = Σ_ℓ λ_t^ℓ q_t S_t^ℓ`: S^ℓ is the memory of the tokens in bucket ℓ alone (arXiv 2506.04761).

    Token s is in bucket `ℓ(t, s)` of token t: the number of bits of `t xor s`, positions in the document counted from 0
    (a Fenwick tree). Bucket 0 is the token itself, and for every bit ℓ − 1 that is set in t there is one of 2^(ℓ−1)
    tokens. With n levels the last holds all tokens that would be in it or in a later one: up to 2^(n−1) tokens this is
    the published model, and beyond them the far past shares one λ. The state is the memories of the n − 1 levels above
    0, d² numbers each; λ (`levels`), write and keep gates come from the rule. Without `levels` there are two levels
    with λ = 1: plain linear attention.

    Every memory has the same transitions, and token t writes to level 0:

    | update | |
    |---|---|
    | `sum` | `S_t = keep_t S_{t−1} + write_t k_tᵀ v_t` (Mamba-2) |
    | `delta` | `S_t = keep_t (I − write_t k_tᵀ k_t) S_{t−1} + write_t k_tᵀ v_t` (Gated DeltaNet) |

    Args:
        update: how a token changes the memories.
        chunk: tokens computed together; changes memory and speed, never a result.

    Raises:
        MetaTTTError: at a call, the state of a layer with other levels.
    """

    gates = frozenset({"write", "keep", "levels"})

    learn_init = False
    update: Literal["sum", "delta"] = setting(default="sum")
    chunk: int = setting(default=64)

    def equations(self) -> list[str]:
        value = self._in_symbols("Σ_ℓ λ_t^ℓ q_t S_t^ℓ")
        moved = "S_{t−1}" if self.update == "sum" else "(I − write_t k_tᵀ k_t) S_{t−1}"
        return [
            f"f(q_t) = {value}, S^ℓ of the tokens s for which t xor s has ℓ binary digits (0 has none)",
            f"S_t = keep_t {moved} + write_t k_tᵀ v_t in every level, the token itself in level 0",
        ]

    def scan(self, views: Views, state: Tensors, ctx: Context, gates: DataGates) -> tuple[Tensor, Tensors]:
        """Predictions `[B, H, T, d]`, and `levels` `[B, H, n − 1, d, d_v]`, the memories of levels 1, 2, …"""
        batch, heads, _, width = views.k.shape
        count = 2 if gates.levels is None else gates.levels.shape[-1]
        shape = (batch, heads, count - 1, width, views.v.shape[-1])
        with exact(views.k.device.type):
            memories = state["levels"] if state else gates.write.new_zeros(shape)
            if memories.shape != shape:
                raise MetaTTTError(
                    f"the state is from another layer: it holds {memories.shape[2] + 1} levels, this one has "
                    f"optimizer.levels={0 if gates.levels is None else count}"
                )
            ys = []
            for part in chunks(views, ctx, gates, self.chunk):
                linear = delta_rule(part) if self.update == "delta" else decayed_sum(part)
                ys.append(_read(part, linear, memories))
                memories = _carried(part, linear, memories)
            y = self._wrapped(views.q, torch.cat(ys, dim=2))
        return y, {"levels": memories}


def decayed_sum(part: Chunk) -> ChunkMap:
    """`S_t = keep_t S_{t−1} + write_t k_tᵀ v_t`."""
    mix, kept = part.mix, part.kept.unsqueeze(-1)
    onward = torch.eye(part.k.shape[-1], dtype=mix.dtype, device=mix.device) * kept[..., -1:, :]
    return ChunkMap((part.q @ part.k.mT) * mix, kept * part.q, mix[..., -1, :, None] * part.k, onward)


def delta_rule(part: Chunk) -> ChunkMap:
    """`S_t = keep_t S_{t−1} + k_tᵀ e_t`, `e_t = write_t (v_t − keep_t k_t S_{t−1})`.

    The errors solve `(I + T) e = write ∘ (v − kept ∘ k S_0)` with `T_ts = write_t decay_ts k_t·k_s`, s < t.
    """
    k, decay, kept = part.k, part.decay, part.kept.unsqueeze(-1)
    write = part.write.expand(k.shape[:3])
    solved = solve_unit_lower(write.unsqueeze(-1) * decay * (k @ k.mT), torch.diag_embed(write))
    from_past = solved @ (kept * k)  # e = solved v − from_past S_0
    score, end = (part.q @ k.mT) * decay, decay[..., -1, :, None] * k
    onward = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) * kept[..., -1:, :] - end.mT @ from_past
    return ChunkMap(score @ solved, kept * part.q - score @ from_past, solved.mT @ end, onward)


def level(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Bits of `a xor b`, at most `count − 1`: the bucket of position a in which position b is, and the reverse."""
    powers = 2 ** torch.arange(count - 1, device=a.device)
    return ((a ^ b).unsqueeze(-1) >= powers).sum(-1)


def _read(part: Chunk, linear: ChunkMap, memories: Tensor) -> Tensor:
    """`Σ_ℓ λ_t^ℓ q_t S_t^ℓ` of a chunk's tokens, `[B, H, c, d]`."""
    to_tokens, past = linear.to_tokens, linear.to_past.unsqueeze(2)  # [B, H, 1, c, d]
    if part.levels is not None:
        count, at = part.levels.shape[-1], part.positions
        among = level(at.unsqueeze(-1), at.unsqueeze(-2), count)  # [B, c, c]
        to_tokens = to_tokens * _picked(part.levels, among)
        past = past * _picked(part.levels, _moved(at, at[:, :1], count)).mT.unsqueeze(-1)
    past = past.transpose(2, 3).flatten(3)  # [B, H, c, (n − 1) d]
    return to_tokens @ part.v + past @ memories.flatten(2, 3)


def _carried(part: Chunk, linear: ChunkMap, memories: Tensor) -> Tensor:
    """The memories `[B, H, n − 1, d, d]` after a chunk: of the buckets of the token that would follow."""
    count = memories.shape[2] + 1
    places = torch.arange(1, count, device=memories.device)
    after = part.after.unsqueeze(-1)
    tokens = level(part.positions, after, count).unsqueeze(1) == places.unsqueeze(-1)  # [B, n − 1, c]
    old = _moved(after, part.positions[:, :1], count) == places.unsqueeze(-1)  # [B, n − 1, n − 1]
    moved = old.unsqueeze(1).to(memories.dtype) @ (linear.onward.unsqueeze(2) @ memories).flatten(3)
    written = (tokens[:, None, :, :, None] * linear.kept.unsqueeze(2)).mT @ part.v.unsqueeze(2)
    return moved.view_as(memories) + written


def _moved(at: Tensor, start: Tensor, count: int) -> Tensor:
    """Which buckets of positions `at` `[B, c]` the buckets 1, 2, … of an earlier position `start` `[B, 1]` are in:
    `[B, c, n − 1]`.

    They are in the same as long as no bit above theirs has changed; else in that of the highest changed bit.
    """
    return torch.maximum(torch.arange(1, count, device=at.device), level(at, start, count).unsqueeze(-1))


def _picked(levels: Tensor, index: Tensor) -> Tensor:
    """λ `[B, H, c, n]` of the levels `index` `[B, c, m]`: `[B, H, c, m]`."""
    return levels.gather(3, index.unsqueeze(1).expand(-1, levels.shape[1], -1, -1))
