# mypy: disable-error-code="no-untyped-def"
"""Forward kernel of TTT-MLP: a program goes through the mini-batches of one (sequence, head), or of a segment of it.

`WALK`, one program per (sequence, head), commits and reads whole mini-batches. It leaves the weights after the last one
and, where a backward pass will follow, those at the start of every segment of `KEEP` mini-batches. Two launches
complete it:
- `TAIL` takes the tokens after the last whole mini-batch, which read but do not commit: it writes their outputs and
  their update;
- `SEGMENT` is part of the backward pass: one program per segment goes through it again and writes the weights before
  every mini-batch. Segments do not wait for one another.

Hidden units are taken in tiles of `FB`; the running weights are in `run_*`, in device memory, in practice in L2, and
pass through the registers once per product with them and mini-batch. (With all units in registers, and products of 16
bits, an H100 computed something else, or read outside its memory: results/gpu.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_mlp.common import (
    dot,
    dot_add,
    dot_over_units,
    gelu,
    gelu_and_slope,
    load_columns,
    load_tile,
    normalize,
    project,
    segment_of,
    sequence_of,
    slot_of,
    store_columns,
    store_tile,
)
from metattt.kernels.ttt_mlp.tuning import Config

WALK, TAIL, SEGMENT = (tl.constexpr(mode) for mode in range(3))


@triton.jit
def inner_gradient(z2, kt, vt, scale, bias, rows, D: tl.constexpr, DP: tl.constexpr):
    """∂/∂z2 of ½‖k + γ·x̂(z2) + β − v‖² for every column, `[DP, tokens]`; and x̂, 1/std, residual, γ·residual,
    mean(γ·residual·x̂)."""
    hat, rstd = normalize(z2, rows, D, DP)
    residual = kt.to(tl.float32) + scale[:, None] * hat + bias[:, None] - vt.to(tl.float32)
    pull = scale[:, None] * residual
    g2, along = project(pull, hat, rows, D, DP)
    return g2 * rstd[None, :], hat, rstd, residual, pull, along


@triton.jit
def read_tile(w1, b1, w2, qt, x, g1, score1):
    """A tile's part of the tokens' reading: gelu(z̄1), x̄2·w2 and x2·x̄2ᵀ. `w1`, `w2`, `x`, `g1`, `score1` are
    operands."""
    zbar1 = dot(w1, qt) + b1[:, None] - dot(g1, score1)
    xbar = gelu(zbar1).to(qt.dtype)
    return dot(tl.trans(w2), xbar), dot_over_units(x, xbar)


@triton.jit(do_not_specialize=["T", "N", "first", "together", "span"])
def forward_kernel(
    q, k, v, eta, tau, scale, bias, o,
    from_w1, from_b1, from_w2, from_b2,
    run_w1, run_b1, run_w2, run_b2,
    keep_w1, keep_b1, keep_w2, keep_b2,
    cu_seqlens, T, N, first, together, span,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b, e_t, e_h, o_b, o_t, o_h,
    H, from_stride, tau_stride,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    MODE: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, TAU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    OP: tl.constexpr = q.dtype.element_ty
    ONE: tl.constexpr = 1.0 if BIAS else 0.0  # the bias as one more input that is always 1 adds 1 to all inner products
    READS: tl.constexpr = MODE != SEGMENT
    KEEPS: tl.constexpr = KEEP > 0
    row = tl.program_id(0)
    n = row // H
    if READS:
        segment = 0
    else:
        n, segment = segment_of(n, cu_seqlens, N, first, together, B, KEEP, PACKED)
    h = (row % H).to(tl.int64)
    batch, start, length, flat = sequence_of(n, cu_seqlens, T, PACKED)
    whole = length // B
    if KEEP:
        slot = slot_of(n, flat, whole, B, KEEP, PACKED)
    if MODE == TAIL:
        lo, hi = whole, whole + (length % B > 0).to(tl.int32)
        at = row.to(tl.int64)
    elif READS:
        lo, hi = whole * 0, whole
        at = n * from_stride + h
    else:
        lo = segment * KEEP
        hi = tl.minimum(lo + KEEP, whole)
        at = (slot + segment) * H + h
    if MODE != WALK:  # noqa: SIM102 (known when compiling; the length is not)
        if hi <= lo:
            return
    run = row.to(tl.int64)

    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    lanes = tl.arange(0, BP)
    causal = lanes[:, None] <= lanes[None, :]
    q += batch * q_b + start * q_t + h * q_h
    k += batch * k_b + start * k_t + h * k_h
    v += batch * v_b + start * v_t + h * v_h
    eta += batch * e_b + start * e_t + h * e_h
    if READS:
        o += batch * o_b + start * o_t + h * o_h
    gamma = tl.load(scale + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    beta = tl.load(bias + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    steps = tl.full([BP], 1.0, tl.float32)
    last = 1.0
    if TAU:
        steps = tl.load(tau + h * tau_stride + lanes, mask=lanes < B, other=0.0)
        last = tl.load(tau + h * tau_stride + B - 1)

    # The weights at the start, to where they run.
    from_w1 += at * F * D
    from_w2 += at * F * D
    run_w1 += run * F * D
    run_w2 += run * F * D
    b1 = tl.zeros([FB], tl.float32)
    b2 = tl.zeros([DP], tl.float32)
    if BIAS:
        from_b1 += at * F
        from_b2 += at * D
        run_b1 += run * F
        run_b2 += run * D
        b2 = tl.load(from_b2 + rows_at, mask=rows, other=0.0).to(tl.float32)
    units = tl.arange(0, FB)
    if MODE == TAIL:  # nothing is committed: the weights are read where they are, `run_*` takes the update
        now_w1, now_b1, now_w2 = from_w1, from_b1, from_w2
    else:
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(from_w1, from_w2, tile + units, rows_at, rows, D, F)
            store_tile(run_w1, run_w2, tile + units, rows_at, rows, w1, w2, D, F)
            if BIAS:
                tl.store(run_b1 + tile + units, tl.load(from_b1 + tile + units))
        tl.debug_barrier()
        now_w1, now_b1, now_w2 = run_w1, run_b1, run_w2

    # Pointers go along: to the first token of the mini-batch that is worked on, that of k to the one that is fetched
    # ahead.
    k += (lo * B).to(tl.int64) * k_t
    v += (lo * B).to(tl.int64) * v_t
    eta += (lo * B).to(tl.int64) * e_t
    if READS:
        q += (lo * B).to(tl.int64) * q_t
        o += (lo * B).to(tl.int64) * o_t
    kt = load_columns(k, k_t, lanes.to(tl.int64), (lanes < B) & (lo * B + lanes < length), rows_at, rows)
    ahead = tl.full([], B, tl.int64)  # times a stride that may be the number 1
    for i in tl.range(lo, hi):
        if KEEPS:
            if MODE == SEGMENT:
                kept = ((row // H).to(tl.int64) * span + i - lo) * H + h
                keeps = True
            else:
                kept = (slot + i // KEEP) * H + h
                keeps = i % KEEP == 0
            if keeps and BIAS:
                tl.store(keep_b2 + kept * D + rows_at, b2, mask=rows)

        # What is not needed at once is on its way while the products below are made; the next keys, during all of it.
        tokens = lanes.to(tl.int64)
        inside = (lanes < B) & (i * B + lanes < length)
        vt = load_columns(v, v_t, tokens, inside, rows_at, rows)
        v += v_t * ahead
        if READS:
            qt = load_columns(q, q_t, tokens, inside, rows_at, rows)
        step = tl.load(eta + tokens * e_t, mask=inside, other=0.0).to(tl.float32)
        k += k_t * ahead
        next_kt = load_columns(k, k_t, tokens, (lanes < B) & (i * B + B + lanes < length), rows_at, rows)
        commit = -step if MODE == TAIL else -step * last
        kc = (commit[:, None] * tl.trans(kt).to(tl.float32)).to(OP)  # k with the step of the commit, fp32 → operand

        # z2 at the keys, over all hidden units, and the gradient there.
        z2 = tl.zeros([DP, BP], tl.float32)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(now_w1, now_w2, tile + units, rows_at, rows, D, F)
            if BIAS:
                b1 = tl.load(now_b1 + tile + units)
            z2 = dot_add(tl.trans(w2.to(OP)), gelu(dot(w1.to(OP), kt) + b1[:, None]).to(OP), z2)
        g2, _hat, _rstd, _residual, _pull, _along = inner_gradient(z2 + b2[:, None], kt, vt, gamma, beta, rows, D, DP)
        og2 = g2.to(OP)
        g2c = tl.trans((g2 * commit[None, :]).to(OP))

        if READS:
            mix = tl.where(causal, step[:, None] * steps[None, :], 0.0)  # [key, query]
            score1 = (mix * (dot(tl.trans(kt), qt) + ONE)).to(OP)

        # g1 of a tile, its part of the reading, its commit.
        zbar2 = tl.zeros([DP, BP], tl.float32)
        inner2 = tl.zeros([BP, BP], tl.float32)
        for tile in tl.range(0, F, FB):
            w1, w2 = load_tile(now_w1, now_w2, tile + units, rows_at, rows, D, F)
            if BIAS:
                b1 = tl.load(now_b1 + tile + units)
            if KEEPS:  # noqa: SIM102 (known when compiling)
                if keeps:
                    store_tile(
                        keep_w1 + kept * F * D, keep_w2 + kept * F * D, tile + units, rows_at, rows, w1, w2, D, F
                    )
                    if BIAS:
                        tl.store(keep_b1 + kept * F + tile + units, b1)
            o1 = w1.to(OP)
            o2 = w2.to(OP)
            x, slope = gelu_and_slope(dot(o1, kt) + b1[:, None])
            x = x.to(OP)
            g1 = dot(o2, og2) * slope
            og1 = g1.to(OP)
            if READS:
                read, inner = read_tile(o1, b1, o2, qt, x, og1, score1)
                zbar2 += read
                inner2 += inner
            if MODE == TAIL:
                w1 = tl.zeros([FB, DP], tl.float32)
                w2 = tl.zeros([FB, DP], tl.float32)
                b1 = tl.zeros([FB], tl.float32)
            w1 = dot_add(og1, kc, w1)
            w2 = dot_add(x, g2c, w2)
            store_tile(run_w1, run_w2, tile + units, rows_at, rows, w1, w2, D, F)
            if BIAS:
                tl.store(run_b1 + tile + units, b1 + tl.sum(g1 * commit[None, :], 1))
        tl.debug_barrier()  # the next mini-batch reads what other threads wrote

        if READS:
            score2 = (mix * (inner2 + ONE)).to(OP)
            zbar2 += b2[:, None] - dot(og2, score2)
            hat, _rstd_bar = normalize(zbar2, rows, D, DP)
            out = qt.to(tl.float32) + gamma[:, None] * hat + beta[:, None]
            store_columns(o, o_t, tokens, inside, rows_at, rows, out)
            q += q_t * ahead
            o += o_t * ahead
        if BIAS:
            if MODE == TAIL:
                b2 = tl.zeros([DP], tl.float32)
            b2 += tl.sum(g2 * commit[None, :], 1)
        eta += e_t * ahead
        kt = next_kt

    if READS and BIAS:
        tl.store(run_b2 + rows_at, b2, mask=rows)


Weights = tuple[Any, ...]  # (w1, b1, w2, b2): tensors; both biases may be None


def padded(d: int, b: int) -> dict[str, int]:
    """Widths as the kernels take them: powers of two for d, at least 16 tokens for a matrix product."""
    return {"D": d, "DP": triton.next_power_of_2(d), "F": 4 * d, "B": b, "BP": max(b, 16)}


def strides(*tensors: Tensor) -> list[int]:
    """Strides of batch, token and head of tensors `[B, T, H, ...]`."""
    return [x.stride(dim) for x in tensors for dim in range(3)]


def empty_weights(like: Weights, rows: tuple[int, ...], *, zero: bool = False) -> Weights:
    """Weights `[*rows, *shape]` in fp32 of the shapes, without the leading dimensions, of `like [..., H, *shape]`."""
    make, shapes = torch.zeros if zero else torch.empty, [None if w is None else w.shape for w in like]
    return tuple(
        None if shape is None else make(*rows, *shape[-dim:], dtype=torch.float32, device=like[0].device)
        for shape, dim in zip(shapes, (2, 1, 2, 1), strict=True)
    )


def sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def slots(q: Tensor, cu_seqlens: Tensor | None, b: int, segment: int) -> int:
    """Places for the weights kept every `segment` mini-batches; whose is which says `slot_of` in `common.py`."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        return batch * triton.cdiv(length // b, segment)
    return length // (b * segment) + sequences(q, cu_seqlens)


class Groups(NamedTuple):
    """Segments that are worked on at the same time, see `group_of` in `common.py`.

    Attributes:
        firsts: where every group begins.
        together: segments of every sequence (packed: places) in a group.
        places: segments of a group in all.
        span: mini-batches of the longest segment.
    """

    firsts: range
    together: int
    places: int
    span: int


def groups(q: Tensor, cu_seqlens: Tensor | None, b: int, segment: int, programs: int) -> Groups:
    """All segments, in groups of about `programs` (segment, head), by the shapes alone: nothing waits for the
    device."""
    batch, length, heads, _ = q.shape
    count = 1 if cu_seqlens is not None else max(batch, 1)
    segments = slots(q, cu_seqlens, b, segment) // count if length >= b else 0
    together = max(1, min(segments, programs // (count * heads)))
    return Groups(range(0, segments, together), together, count * together, min(segment, length // b))


def forward(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, tau: Tensor | None, weights: Weights, scale: Tensor, bias: Tensor,
    cu_seqlens: Tensor | None, b: int, segment: int, launch: Config,
) -> tuple[Tensor, Weights, Weights, Weights | None]:  # fmt: skip
    """Outputs, committed weights, open update, and the weights before every `segment`-th mini-batch (segment 0: none).

    `weights` are `[H, ...]`, for all sequences, or `[N, H, ...]`, contiguous.
    """
    _, length, heads, _ = q.shape
    n = sequences(q, cu_seqlens)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    final = empty_weights(weights, (n, heads))
    update = empty_weights(weights, (n, heads), zero=True)  # of a sequence without a tail no program writes it
    kept = empty_weights(weights, (slots(q, cu_seqlens, b, segment), heads)) if segment else (None,) * 4
    given = (q, k, v, eta, tau, scale, bias, o)
    whole = (cu_seqlens, length, n, 0, 0, 0)
    counts = (*strides(q, k, v, eta, o), heads)
    options = padded(q.shape[-1], b) | options_of(weights, tau, cu_seqlens) | launch_options(launch)
    own = heads if weights[0].dim() == 4 else 0
    forward_kernel[(n * heads,)](
        *given, *weights, *final, *kept, *whole, *counts, own, tau_stride(tau), MODE=WALK.value, KEEP=segment, **options
    )
    if cu_seqlens is not None or length % b:
        states = (*final, *update, *(None,) * 4)
        forward_kernel[(n * heads,)](
            *given, *states, *whole, *counts, heads, tau_stride(tau), MODE=TAIL.value, KEEP=0, **options
        )
    return o, final, update, kept if segment else None


def options_of(weights: Weights, tau: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, bool]:
    return {"BIAS": weights[1] is not None, "TAU": tau is not None, "PACKED": cu_seqlens is not None}


def launch_options(launch: Config) -> dict[str, int]:
    return {"FB": launch.tile, "num_warps": launch.num_warps, "num_stages": launch.num_stages}


def tau_stride(tau: Tensor | None) -> int:
    """Values between the token steps of two heads: 0 if they share them."""
    return 0 if tau is None or tau.shape[0] == 1 else tau.stride(0)
