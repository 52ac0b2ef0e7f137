# mypy: disable-error-code="no-untyped-def"
"""Decode kernel of TTT-MLP: one token of one (sequence, head) per program, each at its own place in its mini-batch.

Decoding is bound by the bytes of the state: per token it reads W and the open update U, writes U, and writes W once per
mini-batch. There are two walks over the hidden units, as z2 needs all of them before any gradient is known; the second
finds W in L2, so device memory sees every byte once. Everything is a product with a vector, computed elementwise in
fp32: there is no matrix instruction to fill.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metattt.kernels.ttt_mlp.common import gelu, gelu_and_slope, load_tile, normalize, store_tile
from metattt.kernels.ttt_mlp.forward import inner_gradient


@triton.jit(do_not_specialize=["place"])
def decode_kernel(
    q, k, v, eta, scale, bias, tau, phase, place, o,
    w1, b1, w2, b2, u1, c1, u2, c2,  # committed weights; the open update: of w1, b1, w2, b2
    new_w1, new_b1, new_w2, new_b2, new_u1, new_c1, new_u2, new_c2,
    q_b, q_h, k_b, k_h, v_b, v_h, e_b, e_h, tau_h, o_b, o_h,
    H, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Program (n, h). tau None: all steps 1. phase None: all sequences are at `place`. u1 None: the update is zero.

    new_w1 None: no mini-batch is complete; new_u1 None: all are. COPIES: the new weights are not where the old ones
    are, and are written also for sequences whose mini-batch is still open.
    """
    row = tl.program_id(0).to(tl.int64)
    n = row // H
    h = row % H
    rows_at = tl.arange(0, DP)
    rows = rows_at < D
    # Columns of one token, [DP, 1], as the functions of the other kernels take them.
    kt = tl.load(k + n * k_b + h * k_h + rows_at, mask=rows, other=0.0).to(tl.float32)
    qt = tl.load(q + n * q_b + h * q_h + rows_at, mask=rows, other=0.0).to(tl.float32)
    vt = tl.load(v + n * v_b + h * v_h + rows_at, mask=rows, other=0.0).to(tl.float32)
    gamma = tl.load(scale + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    beta = tl.load(bias + h * D + rows_at, mask=rows, other=0.0).to(tl.float32)
    if phase is not None:
        place = tl.load(phase + n).to(tl.int32)
    step = tl.load(eta + n * e_b + h * e_h).to(tl.float32)
    read = 1.0
    if tau is not None:
        read = tl.load(tau + h * tau_h + place).to(tl.float32)
    commits = place == B - 1
    w1 += row * F * D
    w2 += row * F * D
    if u1 is not None:
        u1 += row * F * D
        u2 += row * F * D
    if new_w1 is not None:
        new_w1 += row * F * D
        new_w2 += row * F * D
    if new_u1 is not None:
        new_u1 += row * F * D
        new_u2 += row * F * D
    units = tl.arange(0, FB)
    bias1 = tl.zeros([FB], tl.float32)
    bias2 = tl.zeros([DP], tl.float32)
    open2 = tl.zeros([DP], tl.float32)
    if BIAS:
        bias2 = tl.load(b2 + row * D + rows_at, mask=rows, other=0.0).to(tl.float32)
        if u1 is not None:
            open2 = tl.load(c2 + row * D + rows_at, mask=rows, other=0.0).to(tl.float32)

    sums = tl.zeros([FB, DP], tl.float32)
    for tile in range(0, F, FB):
        t1, t2 = load_tile(w1, w2, tile + units, rows_at, rows, D, F)
        if BIAS:
            bias1 = tl.load(b1 + row * F + tile + units).to(tl.float32)
        x = gelu(tl.sum(t1.to(tl.float32) * kt[None, :], 1) + bias1)
        sums += t2.to(tl.float32) * x[:, None]
    z2 = tl.sum(sums, 0) + bias2
    g2, _hat, _rstd, _residual, _pull, _along = inner_gradient(
        z2[:, None], kt[:, None], vt[:, None], gamma, beta, rows, D, DP
    )
    moved2 = -step * tl.sum(g2, 1)  # [DP]: of the one token

    sums = tl.zeros([FB, DP], tl.float32)
    for tile in range(0, F, FB):
        t1, t2 = load_tile(w1, w2, tile + units, rows_at, rows, D, F)
        t1 = t1.to(tl.float32)
        t2 = t2.to(tl.float32)
        s1 = tl.zeros([FB, DP], tl.float32)
        s2 = tl.zeros([FB, DP], tl.float32)
        open1 = tl.zeros([FB], tl.float32)
        if u1 is not None:
            l1, l2 = load_tile(u1, u2, tile + units, rows_at, rows, D, F)
            s1 = l1.to(tl.float32)
            s2 = l2.to(tl.float32)
        if BIAS:
            bias1 = tl.load(b1 + row * F + tile + units).to(tl.float32)
            if u1 is not None:
                open1 = tl.load(c1 + row * F + tile + units).to(tl.float32)
            tl.debug_barrier()  # several threads have read what one of them writes below
        x, slope = gelu_and_slope(tl.sum(t1 * kt[None, :], 1) + bias1)
        moved1 = tl.sum(t2 * moved2[None, :], 1) * slope  # −η·g1
        s1 += moved1[:, None] * kt[None, :]
        s2 += x[:, None] * moved2[None, :]
        open1 += moved1
        # the weights with which this token reads; after the last token of a mini-batch, those that are committed
        r1 = t1 + read * s1
        r2 = t2 + read * s2
        reads1 = bias1
        if BIAS:
            reads1 += read * open1
        xbar = gelu(tl.sum(r1 * qt[None, :], 1) + reads1)
        sums += r2 * xbar[:, None]
        if new_u1 is not None:
            kept1 = tl.where(commits, 0.0, s1)
            kept2 = tl.where(commits, 0.0, s2)
            store_tile(new_u1, new_u2, tile + units, rows_at, rows, kept1, kept2, D, F)
            if BIAS:
                tl.store(new_c1 + row * F + tile + units, tl.where(commits, 0.0, open1))
        if new_w1 is not None:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if COPIES or commits:
                after1 = tl.where(commits, r1, t1)
                after2 = tl.where(commits, r2, t2)
                store_tile(new_w1, new_w2, tile + units, rows_at, rows, after1, after2, D, F)
                if BIAS:
                    tl.store(new_b1 + row * F + tile + units, tl.where(commits, reads1, bias1))
    zbar2 = tl.sum(sums, 0) + bias2
    if BIAS:
        open2 += moved2
        zbar2 += read * open2
        tl.debug_barrier()
        if new_u1 is not None:
            tl.store(new_c2 + row * D + rows_at, tl.where(commits, 0.0, open2), mask=rows)
        if new_w1 is not None:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if COPIES or commits:
                tl.store(new_b2 + row * D + rows_at, tl.where(commits, bias2 + read * open2, bias2), mask=rows)
    hat, _rstd_bar = normalize(zbar2[:, None], rows, D, DP)
    out = qt + gamma * tl.sum(hat, 1) + beta
    tl.store(o + n * o_b + h * o_h + rows_at, out.to(o.dtype.element_ty), mask=rows)
