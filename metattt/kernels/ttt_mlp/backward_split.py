# mypy: disable-error-code="no-untyped-def"
"""Backward pass of TTT-MLP's whole mini-batches in three kernels, of which only the second waits for itself.

What a mini-batch adds to the cotangents C of the weights after it (names as in `backward.py`) is affine in C:
everything that enters it but C is known before, from the weights and the cotangents of the outputs. So a group of
segments takes

- `reading_kernel`, one program per mini-batch: through the reading, dq, and the coefficients of the recurrence;
- `chain_kernel`, one program per (sequence, head), from the last mini-batch to the first: C itself, which stays in fp32
  registers, and of every mini-batch the cotangents of g₂ and z₁ and the products with C that the third kernel needs;
- `tokens_kernel`, one program per mini-batch: dk, dv, and the rest of those of η, τ and the norm.

With `bend` = (g₂W₂ᵀ)∘gelu''(z₁), and `…'` for what of a cotangent comes from the reading, the chain computes

    moved₁ = C₁k + c₁,  moved₂ = C₂ᵀx₂ + c₂
    dg₁ = dg₁' − ω∘moved₁,  dx₂ = dx₂' − ω∘(C₂g₂),  dg₂ = dg₂' − ω∘moved₂ + W₂ᵀ(dg₁∘gelu'(z₁))
    dz₂ = J(dg₂),  dz₁ = dg₁∘bend + (dx₂ + W₂dz₂)∘gelu'(z₁)
    C₁ += dz̄₁qᵀ + dz₁kᵀ,  C₂ += x̄₂dz̄₂ᵀ + (dg₁∘gelu'(z₁))g₂ᵀ + x₂dz₂ᵀ

The chain keeps C in registers, 8·f·d bytes for f = 4d hidden units: half of a multiprocessor's at d = 64. So that
nothing else is spilled (as compiled: results/gpu/compiled.md) it is given k and q as operands, in a place without
strides of their own, dz₁ waits in device memory for its second part, and what is cheap to have again is loaded again.

Bytes per mini-batch and head between the kernels, operands of w bytes: the chain reads 8·f·b·w (hidden units) + 4·d²·w
(W₂) + d·b·(12 + 4w) + 24·b and writes 2·f·b·w + 4f + 12·d·b, at d = 64, b = 16, w = 2 119 KB and 30 KB; the first
kernel writes
what the other two read. Nothing is added up by two programs: sums over mini-batches are left to torch, in a fixed
order.
"""

from __future__ import annotations

from typing import NamedTuple

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
    gelu_slopes,
    group_of,
    load_columns,
    load_tile,
    normalize,
    project,
    segment_of,
    sequence_of,
    store_columns,
    store_tile,
)
from metattt.kernels.ttt_mlp.forward import inner_gradient

# What stands between the kernels, for every mini-batch of a group. Hidden units, `[f, b]`, in the type of the operands:
HIDDEN = tl.constexpr(8)
X, SLOPE, BEND, DZ1, PULLED, XBAR, DZBAR1, G1 = (tl.constexpr(at) for at in range(HIDDEN.value))
# Columns of tokens, `[d, b]`: in fp32 x̂ and residual of the inner loss, γ²x̂ + γ·residual, cotangents, products with
# C;
COLUMNS = tl.constexpr(7)
HAT, RESIDUAL, TILTED, DG2, DK, MOVED2, ALONG_G1 = (tl.constexpr(at) for at in range(COLUMNS.value))
# as operands, g₂, dz̄₂, and the tokens themselves, so that the chain needs no strides of them;
OPERANDS = tl.constexpr(4)
G2, DZBAR2, K, Q = (tl.constexpr(at) for at in range(OPERANDS.value))
# and values of a token, fp32: the step ω of the commit, 1/std, and means over d that J needs.
VALUES = tl.constexpr(6)
OMEGA, RSTD, ALONG, LEVEL, TILT, BOW = (tl.constexpr(at) for at in range(VALUES.value))


@triton.jit
def place_in(base, at, which: tl.constexpr, of: tl.constexpr, rows_at, lanes, R: tl.constexpr, BP: tl.constexpr):
    """Pointers to a tile `[rows, tokens]` of the mini-batch `at`."""
    return base + (at * of + which) * (R * BP) + rows_at[:, None] * BP + lanes[None, :]


@triton.jit
def value_of(base, at, which: tl.constexpr, lanes, BP: tl.constexpr):
    return base + (at * VALUES + which) * BP + lanes


@triton.jit
def mini_batch_of(
    at, cu_seqlens, T, N, H, first, together, span, B: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr
):
    """Of program `at`, (place·span + its mini-batch)·H + h: sequence, head, mini-batch, and as `sequence_of` says."""
    mini = at // H
    n, segment = segment_of(mini // span, cu_seqlens, N, first, together, B, KEEP, PACKED)
    batch, start, length, _flat = sequence_of(n, cu_seqlens, T, PACKED)
    return (at % H).to(tl.int64), segment * KEEP + mini % span, batch, start, length


@triton.jit(do_not_specialize=["T", "N", "first", "together", "span"])
def reading_kernel(
    q, k, v, eta, tau, scale, bias, do, dq, deta,
    w1_at, b1_at, w2_at, b2_at,
    hidden, columns, operands, values, dnorm, dsteps_at,
    cu_seqlens, T, N, first, together, span,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, e_b, e_t, e_h, o_b, o_t, o_h, dq_b, dq_t, dq_h, de_b, de_t, de_h,
    H, tau_stride,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, TAU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    OP: tl.constexpr = q.dtype.element_ty
    ONE: tl.constexpr = 1.0 if BIAS else 0.0
    row = tl.program_id(0)
    h, i, batch, start, length = mini_batch_of(row, cu_seqlens, T, N, H, first, together, span, B, KEEP, PACKED)
    at = row.to(tl.int64)
    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    lanes = tl.arange(0, BP)
    dnorm += at * 2 * D + rows_at
    if i >= length // B:  # of a segment that is shorter: what is summed is there
        tl.store(dnorm, tl.zeros([DP], tl.float32), mask=rows)
        tl.store(dnorm + D, tl.zeros([DP], tl.float32), mask=rows)
        if TAU:
            tl.store(dsteps_at + at * BP + lanes, tl.zeros([BP], tl.float32))
        return
    causal = lanes[:, None] <= lanes[None, :]  # [key, query]
    q += batch * q_b + start * q_t + h * q_h
    k += batch * k_b + start * k_t + h * k_h
    v += batch * v_b + start * v_t + h * v_h
    eta += batch * e_b + start * e_t + h * e_h
    do += batch * o_b + start * o_t + h * o_h
    dq += batch * dq_b + start * dq_t + h * dq_h
    deta += batch * de_b + start * de_t + h * de_h
    gamma = tl.load(scale + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    beta = tl.load(bias + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    steps = tl.full([BP], 1.0, tl.float32)
    if TAU:
        steps = tl.load(tau + h * tau_stride + lanes, mask=lanes < B, other=0.0)
    w1_at += at * F * D
    w2_at += at * F * D
    b1 = tl.zeros([FB], tl.float32)
    b2 = tl.zeros([DP], tl.float32)
    if BIAS:
        b1_at += at * F
        b2 = tl.load(b2_at + at * D + rows_at, mask=rows, other=0.0)
    inside = lanes < B
    tokens = (i * B + lanes).to(tl.int64)
    qt = load_columns(q, q_t, tokens, inside, rows_at, rows)
    kt = load_columns(k, k_t, tokens, inside, rows_at, rows)
    vt = load_columns(v, v_t, tokens, inside, rows_at, rows)
    step = tl.load(eta + tokens * e_t, mask=inside, other=0.0).to(tl.float32)
    units = tl.arange(0, FB)

    # z2 at the keys and the gradient there, as in the forward pass.
    z2 = tl.zeros([DP, BP], tl.float32)
    for tile in tl.range(0, F, FB, disable_licm=True):
        w1, w2 = load_tile(w1_at, w2_at, tile + units, rows_at, rows, D, F)
        if BIAS:
            b1 = tl.load(b1_at + tile + units)
        z2 = dot_add(tl.trans(w2), gelu(dot(w1, kt) + b1[:, None]).to(OP), z2)
    g2, hat, rstd, residual, pull, along = inner_gradient(z2 + b2[:, None], kt, vt, gamma, beta, rows, D, DP)
    og2 = g2.to(OP)
    tl.store(place_in(columns, at, HAT, COLUMNS, rows_at, lanes, DP, BP), hat)
    tl.store(place_in(columns, at, RESIDUAL, COLUMNS, rows_at, lanes, DP, BP), residual)
    tl.store(place_in(operands, at, G2, OPERANDS, rows_at, lanes, DP, BP), og2)
    tl.store(place_in(operands, at, K, OPERANDS, rows_at, lanes, DP, BP), kt)
    tl.store(place_in(operands, at, Q, OPERANDS, rows_at, lanes, DP, BP), qt)
    square = (gamma * gamma)[:, None]
    tilted = square * hat + pull
    tl.store(place_in(columns, at, TILTED, COLUMNS, rows_at, lanes, DP, BP), tilted)
    last = 1.0
    if TAU:
        last = tl.load(tau + h * tau_stride + B - 1)
    tl.store(value_of(values, at, OMEGA, lanes, BP), step * last)
    tl.store(value_of(values, at, RSTD, lanes, BP), rstd)
    tl.store(value_of(values, at, ALONG, lanes, BP), along)
    tl.store(value_of(values, at, LEVEL, lanes, BP), along + tl.sum(gamma * gamma, 0) / D)
    tl.store(value_of(values, at, TILT, lanes, BP), tl.sum(tilted, 0) / D)
    tl.store(value_of(values, at, BOW, lanes, BP), tl.sum(square * hat * hat, 0) / D + 3 * along)

    # The reading, as in the forward pass.
    mix = tl.where(causal, step[:, None] * steps[None, :], 0.0)
    inner1 = dot(tl.trans(kt), qt) + ONE
    oscore1 = (mix * inner1).to(OP)
    zbar2 = tl.zeros([DP, BP], tl.float32)
    inner2 = tl.zeros([BP, BP], tl.float32)
    for tile in tl.range(0, F, FB, disable_licm=True):
        w1, w2 = load_tile(w1_at, w2_at, tile + units, rows_at, rows, D, F)
        if BIAS:
            b1 = tl.load(b1_at + tile + units)
        x, slope = gelu_and_slope(dot(w1, kt) + b1[:, None])
        g1 = (dot(w2, og2) * slope).to(OP)
        xbar = gelu(dot(w1, qt) + b1[:, None] - dot(g1, oscore1)).to(OP)
        zbar2 = dot_add(tl.trans(w2), xbar, zbar2)
        inner2 += dot_over_units(x.to(OP), xbar)
    inner2 += ONE
    oscore2 = (mix * inner2).to(OP)
    zbar2 += b2[:, None] - dot(og2, oscore2)

    # Through the norm of the output, and the scores of the second layer.
    hat_bar, rstd_bar = normalize(zbar2, rows, D, DP)
    dout = load_columns(do, o_t, tokens, inside, rows_at, rows).to(tl.float32)
    tl.store(dnorm, tl.sum(dout * hat_bar, 1), mask=rows)
    tl.store(dnorm + D, tl.sum(dout, 1), mask=rows)
    dzbar2, _ = project(gamma[:, None] * dout, hat_bar, rows, D, DP)
    odzbar2 = (dzbar2 * rstd_bar[None, :]).to(OP)
    tl.store(place_in(operands, at, DZBAR2, OPERANDS, rows_at, lanes, DP, BP), odzbar2)
    dscore2 = -dot(tl.trans(og2), odzbar2)
    dmix = dscore2 * inner2
    odinner2 = (mix * dscore2).to(OP)
    odinner2t = tl.trans(odinner2)
    oscore1t = tl.trans(oscore1)
    tl.store(place_in(columns, at, DG2, COLUMNS, rows_at, lanes, DP, BP), -dot(odzbar2, tl.trans(oscore2)))

    # The hidden units.
    dqt = tl.zeros([DP, BP], tl.float32)
    dscore1 = tl.zeros([BP, BP], tl.float32)
    for tile in tl.range(0, F, FB, disable_licm=True):
        w1, w2 = load_tile(w1_at, w2_at, tile + units, rows_at, rows, D, F)
        if BIAS:
            b1 = tl.load(b1_at + tile + units)
        z1 = dot(w1, kt) + b1[:, None]
        x = gelu(z1).to(OP)
        slope, curve = gelu_slopes(z1)
        d2 = dot(w2, og2)
        g1 = (d2 * slope).to(OP)
        xbar, slope_bar = gelu_and_slope(dot(w1, qt) + b1[:, None] - dot(g1, oscore1))
        xbar = xbar.to(OP)
        dzbar1 = (dot_add(x, odinner2, dot(w2, odzbar2)) * slope_bar).to(OP)
        dg1 = -dot(dzbar1, oscore1t)
        dx = dot(xbar, odinner2t)
        dqt = dot_add(tl.trans(w1), dzbar1, dqt)
        dscore1 += dot_over_units(g1, dzbar1)
        bend = d2 * curve
        tl.store(place_in(hidden, at, X, HIDDEN, tile + units, lanes, F, BP), x)
        tl.store(place_in(hidden, at, SLOPE, HIDDEN, tile + units, lanes, F, BP), slope.to(OP))
        tl.store(place_in(hidden, at, BEND, HIDDEN, tile + units, lanes, F, BP), bend.to(OP))
        tl.store(place_in(hidden, at, DZ1, HIDDEN, tile + units, lanes, F, BP), (dg1 * bend + dx * slope).to(OP))
        tl.store(place_in(hidden, at, PULLED, HIDDEN, tile + units, lanes, F, BP), (dg1 * slope).to(OP))
        tl.store(place_in(hidden, at, XBAR, HIDDEN, tile + units, lanes, F, BP), xbar)
        tl.store(place_in(hidden, at, DZBAR1, HIDDEN, tile + units, lanes, F, BP), dzbar1)
        tl.store(place_in(hidden, at, G1, HIDDEN, tile + units, lanes, F, BP), g1)
    dscore1 = -dscore1
    dmix = tl.where(causal, dmix + dscore1 * inner1, 0.0)
    odinner1 = (mix * dscore1).to(OP)
    store_columns(dq, dq_t, tokens, inside, rows_at, rows, dot_add(kt, odinner1, dqt) + dout)
    tl.store(place_in(columns, at, DK, COLUMNS, rows_at, lanes, DP, BP), dot(qt, tl.trans(odinner1)))
    tl.store(deta + tokens * de_t, tl.sum(dmix * steps[None, :], 1), mask=inside)
    if TAU:
        tl.store(dsteps_at + at * BP + lanes, tl.sum(dmix * step[:, None], 0))


@triton.jit(do_not_specialize=["T", "first", "together", "span"])
def chain_kernel(
    scale, w2_at, hidden, columns, operands, values, before_b1,
    grad_w1, grad_b1, grad_w2, grad_b2,
    cu_seqlens, T, first, together, span, H,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    OP: tl.constexpr = hidden.dtype.element_ty
    row = tl.program_id(0)
    n = row // H
    h = (row % H).to(tl.int64)
    _batch, _start, length, flat = sequence_of(n, cu_seqlens, T, PACKED)
    lo, hi, home = group_of(n, flat, length // B, first, together, B, KEEP, PACKED)
    if hi <= lo:
        return
    row = row.to(tl.int64)
    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    lanes = tl.arange(0, BP)
    units = tl.arange(0, F)
    scale += h * D
    dw1, dw2 = load_tile(grad_w1 + row * F * D, grad_w2 + row * F * D, units, rows_at, rows, D, F)
    db1 = tl.zeros([F], tl.float32)
    db2 = tl.zeros([DP], tl.float32)
    if BIAS:
        db1 = tl.load(grad_b1 + row * F + units)
        db2 = tl.load(grad_b2 + row * D + rows_at, mask=rows, other=0.0)

    c1 = dw1.to(OP)  # carried along: operands that are, the compiler keeps in shared memory, others in registers
    c2 = dw2.to(OP)
    for i in tl.range(hi - 1, lo - 1, -1, disable_licm=True):
        z = i >> 31  # 0, but not to the compiler: what is loaded from `at + z` is loaded again, not kept
        at = ((home + i // KEEP).to(tl.int64) * span + i % KEEP) * H + h
        omega = tl.load(value_of(values, at, OMEGA, lanes, BP))
        kt = tl.load(place_in(operands, at, K, OPERANDS, rows_at, lanes, DP, BP))
        og2 = tl.load(place_in(operands, at, G2, OPERANDS, rows_at, lanes, DP, BP))
        x = tl.load(place_in(hidden, at, X, HIDDEN, units, lanes, F, BP))
        slope = tl.load(place_in(hidden, at, SLOPE, HIDDEN, units, lanes, F, BP)).to(tl.float32)
        w2 = tl.load(w2_at + at * F * D + units[:, None] * D + rows_at[None, :], mask=rows[None, :], other=0.0)
        if BIAS:
            tl.store(before_b1 + at * F + units, db1)

        # Products with C, and what is added to it before dz2 is known.
        moved2 = dot(tl.trans(c2), x) + db2[:, None]
        tl.store(place_in(columns, at, MOVED2, COLUMNS, rows_at, lanes, DP, BP), moved2)
        moved1 = omega[None, :] * (dot(c1, kt) + db1[:, None])
        opulled = (
            tl.load(place_in(hidden, at, PULLED, HIDDEN, units, lanes, F, BP)).to(tl.float32) - moved1 * slope
        ).to(OP)
        place = place_in(columns, at, DG2, COLUMNS, rows_at, lanes, DP, BP)
        dg2 = dot_add(tl.trans(w2), opulled, tl.load(place) - omega[None, :] * moved2)
        dw2 = dot_add(opulled, tl.trans(og2), dw2)
        bend = tl.load(place_in(hidden, at, BEND, HIDDEN, units, lanes, F, BP)).to(tl.float32)
        hidden_place = place_in(hidden, at, DZ1, HIDDEN, units, lanes, F, BP)
        tl.store(hidden_place, (tl.load(hidden_place).to(tl.float32) - moved1 * bend).to(OP))
        g1 = tl.load(place_in(hidden, at, G1, HIDDEN, units, lanes, F, BP))
        tl.store(place_in(columns, at, ALONG_G1, COLUMNS, rows_at, lanes, DP, BP), dot(tl.trans(c1), g1))

        # Through the norm, see step 4 of `backward_kernel`: everything there is linear in dg2, so that its sums over d
        # do not wait for one another.
        tl.store(place, dg2)
        gamma = tl.load(scale + rows_at, mask=rows, other=0.0).to(tl.float32)
        square = (gamma * gamma)[:, None]
        hat = tl.load(place_in(columns, at, HAT, COLUMNS, rows_at, lanes, DP, BP))
        tilted = tl.load(place_in(columns, at, TILTED, COLUMNS, rows_at, lanes, DP, BP))
        rstd = tl.load(value_of(values, at, RSTD, lanes, BP))
        u = dg2 * rstd[None, :]
        su = tl.sum(u, 0)
        ssu = tl.sum(square * u, 0)
        suh = tl.sum(u * hat, 0)
        sut = tl.sum(u * tilted, 0)
        along = tl.load(value_of(values, at, ALONG, lanes, BP))
        su /= D
        suh /= D
        tilt = tl.load(value_of(values, at, TILT, lanes, BP))
        shift = ssu / D - tl.load(value_of(values, at, LEVEL, lanes, BP)) * su - tilt * suh
        swing = sut / D - tl.load(value_of(values, at, BOW, lanes, BP)) * suh - tilt * su
        dz2 = (square - along[None, :]) * u - square * su[None, :] - tilted * suh[None, :]
        dz2 = (dz2 - shift[None, :] - hat * swing[None, :]) * rstd[None, :]
        if DP != D:
            dz2 = tl.where(rows[:, None], dz2, 0.0)
        odz2 = dz2.to(OP)

        # The reading's part of what is added to C, then the rest of the hidden units' cotangent and of C.
        odzbar1 = tl.load(place_in(hidden, at, DZBAR1, HIDDEN, units, lanes, F, BP))
        qt = tl.load(place_in(operands, at, Q, OPERANDS, rows_at, lanes, DP, BP))
        dw1 = dot_add(odzbar1, tl.trans(qt), dw1)
        odzbar2 = tl.load(place_in(operands, at, DZBAR2, OPERANDS, rows_at, lanes, DP, BP))
        xbar = tl.load(place_in(hidden, at, XBAR, HIDDEN, units, lanes, F, BP))
        dw2 = dot_add(xbar, tl.trans(odzbar2), dw2)
        if BIAS:
            db1 += tl.sum(odzbar1.to(tl.float32), 1)
        slope = tl.load(place_in(hidden, at, SLOPE, HIDDEN, units, lanes, F, BP)).to(tl.float32)
        kt = tl.load(place_in(operands, at, K, OPERANDS, rows_at, lanes, DP, BP))
        omega = tl.load(value_of(values, at + z, OMEGA, lanes, BP))
        og2 = (og2.to(tl.float32) * -omega[None, :]).to(OP)
        tl.debug_barrier()  # other threads may have written what this one reads
        hidden_place = place_in(hidden, at + z, DZ1, HIDDEN, units, lanes, F, BP)
        dz1 = tl.load(hidden_place).to(tl.float32) + dot_add(c2, og2, dot(w2, odz2)) * slope
        odz1 = dz1.to(OP)
        tl.store(hidden_place, odz1)
        dw1 = dot_add(odz1, tl.trans(kt), dw1)
        dw2 = dot_add(x, tl.trans(odz2), dw2)
        c1 = dw1.to(OP)
        c2 = dw2.to(OP)
        if BIAS:
            db1 += tl.sum(dz1, 1)
            db2 += tl.sum(dz2 + odzbar2.to(tl.float32), 1)

    row = (tl.program_id(0) + (length >> 31)).to(tl.int64)  # again: addresses are not kept over the loop
    store_tile(grad_w1 + row * F * D, grad_w2 + row * F * D, units, rows_at, rows, dw1, dw2, D, F)
    if BIAS:
        tl.store(grad_b1 + row * F + units, db1)
        tl.store(grad_b2 + row * D + rows_at, db2, mask=rows)


@triton.jit(do_not_specialize=["T", "N", "first", "together", "span"])
def tokens_kernel(
    k, eta, tau, scale, dk, dv, deta, w1_at, hidden, columns, values, before_b1, dnorm, dsteps_at,
    cu_seqlens, T, N, first, together, span,
    k_b, k_t, k_h, e_b, e_t, e_h, dk_b, dk_t, dk_h, dv_b, dv_t, dv_h, de_b, de_t, de_h, H, tau_stride,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BP: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, TAU: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    h, i, batch, start, length = mini_batch_of(row, cu_seqlens, T, N, H, first, together, span, B, KEEP, PACKED)
    if i >= length // B:
        return
    at = row.to(tl.int64)
    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    lanes = tl.arange(0, BP)
    units = tl.arange(0, FB)
    inside = lanes < B
    tokens = (i * B + lanes).to(tl.int64)
    k += batch * k_b + start * k_t + h * k_h
    eta += batch * e_b + start * e_t + h * e_h
    dk += batch * dk_b + start * dk_t + h * dk_h
    dv += batch * dv_b + start * dv_t + h * dv_h
    deta += batch * de_b + start * de_t + h * de_h + tokens * de_t
    gamma = tl.load(scale + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    step = tl.load(eta + tokens * e_t, mask=inside, other=0.0).to(tl.float32)
    last = 1.0
    if TAU:
        last = tl.load(tau + h * tau_stride + B - 1)
    mask = rows[:, None] & inside[None, :]
    kt = tl.load(k + tokens[None, :] * k_t + rows_at[:, None], mask=mask, other=0.0).to(tl.float32)

    # The keys' part that every hidden unit has, and that of the commit's step in the bias of the first layer.
    dkt = tl.load(place_in(columns, at, DK, COLUMNS, rows_at, lanes, DP, BP))
    domega = tl.zeros([BP], tl.float32)
    for tile in tl.range(0, F, FB, disable_licm=True):
        w1 = tl.load(w1_at + at * F * D + rows_at[None, :] * F + (tile + units)[:, None], mask=rows[None, :], other=0.0)
        dkt = dot_add(tl.trans(w1), tl.load(place_in(hidden, at, DZ1, HIDDEN, tile + units, lanes, F, BP)), dkt)
        if BIAS:
            g1 = tl.load(place_in(hidden, at, G1, HIDDEN, tile + units, lanes, F, BP)).to(tl.float32)
            domega -= tl.sum(tl.load(before_b1 + at * F + tile + units)[:, None] * g1, 0)

    hat = tl.load(place_in(columns, at, HAT, COLUMNS, rows_at, lanes, DP, BP))
    residual = tl.load(place_in(columns, at, RESIDUAL, COLUMNS, rows_at, lanes, DP, BP))
    rstd = tl.load(value_of(values, at, RSTD, lanes, BP))
    u = tl.load(place_in(columns, at, DG2, COLUMNS, rows_at, lanes, DP, BP)) * rstd[None, :]
    dpull, _ = project(u, hat, rows, D, DP)
    dresidual = gamma[:, None] * dpull
    store_columns(dv, dv_t, tokens, inside, rows_at, rows, -dresidual)
    dnorm += at * 2 * D + rows_at
    dgamma = tl.sum(dpull * residual + dresidual * hat, 1)
    tl.store(dnorm, tl.load(dnorm, mask=rows) + dgamma, mask=rows)
    tl.store(dnorm + D, tl.load(dnorm + D, mask=rows) + tl.sum(dresidual, 1), mask=rows)

    along_g1 = tl.load(place_in(columns, at, ALONG_G1, COLUMNS, rows_at, lanes, DP, BP))
    moved2 = tl.load(place_in(columns, at, MOVED2, COLUMNS, rows_at, lanes, DP, BP))
    g2, _ = project(gamma[:, None] * residual, hat, rows, D, DP)
    domega -= tl.sum(g2 * rstd[None, :] * moved2 + kt * along_g1, 0)
    dkt += dresidual - (step * last)[None, :] * along_g1
    store_columns(dk, dk_t, tokens, inside, rows_at, rows, dkt)
    tl.store(deta, tl.load(deta, mask=inside) + domega * last, mask=inside)
    if TAU:
        dsteps_at += at * BP + lanes
        dlast = tl.sum(domega * step, 0)
        tl.store(dsteps_at, tl.load(dsteps_at) + tl.where(lanes == B - 1, dlast, 0.0))


class Between(NamedTuple):
    """What stands between the kernels for the mini-batches of a group, M = places · mini-batches of a segment · heads.

    Attributes:
        hidden: `[M, 8, f, b]`, operands.
        columns: `[M, 7, d, b]`, fp32.
        operands: `[M, 4, d, b]`.
        values: `[M, 6, b]`, fp32.
        before_b1: `[M, f]`, fp32, or None without bias: cotangents of b1 after every mini-batch.
        norm: `[M / heads, heads, 2, d]`, fp32: its part of the cotangents of norm scale and bias.
        steps: `[M / heads, heads, b]`, fp32, or None without τ: its part of the cotangent of τ.
    """

    hidden: Tensor
    columns: Tensor
    operands: Tensor
    values: Tensor
    before_b1: Tensor | None
    norm: Tensor
    steps: Tensor | None


def between(q: Tensor, count: int, widths: dict[str, int], bias: bool, tau: bool) -> Between:
    """Memory for `count` mini-batches of every head of q."""
    heads, d, f, padded_d, lanes = q.shape[2], widths["D"], widths["F"], widths["DP"], widths["BP"]

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    m = count * heads
    return Between(
        make(m, HIDDEN.value, f, lanes, dtype=q.dtype),
        make(m, COLUMNS.value, padded_d, lanes),
        make(m, OPERANDS.value, padded_d, lanes, dtype=q.dtype),
        make(m, VALUES.value, lanes),
        make(m, f) if bias else None,
        make(count, heads, 2, d),
        make(count, heads, lanes) if tau else None,
    )
