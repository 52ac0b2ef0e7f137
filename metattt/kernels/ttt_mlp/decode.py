# mypy: disable-error-code="no-untyped-def"
"""Decode kernel of TTT-MLP: one token of one (sequence, head) per program, each at its own place in its mini-batch.

Decoding is bound by the bytes of the state: per token it reads W and the open update U, writes U, and writes W once per
mini-batch. There are two walks over the hidden units, as z2 needs all of them before any gradient is known; the second
finds W in L2, so device memory sees every byte once. Everything is a product with a vector, computed elementwise in
fp32: there is no matrix instruction to fill.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_mlp.common import gelu, gelu_and_slope, load_tile, normalize, store_tile
from metattt.kernels.ttt_mlp.forward import Weights, inner_gradient, launch_options, tau_stride
from metattt.kernels.ttt_mlp.tuning import Config


@triton.jit
def decode_kernel(
    q, k, v, eta, tau, phase, scale, bias, o,
    w1, b1, w2, b2, u1, c1, u2, c2,  # committed weights; the open update: of w1, b1, w2, b2
    q_b, q_h, k_b, k_h, v_b, v_h, e_b, e_h, o_b, o_h,
    H, tau_stride,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FB: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
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
    place = tl.load(phase + n)
    step = tl.load(eta + n * e_b + h * e_h).to(tl.float32)
    read = tl.load(tau + h * tau_stride + place)
    commits = place == B - 1
    w1 += row * F * D
    w2 += row * F * D
    u1 += row * F * D
    u2 += row * F * D
    units = tl.arange(0, FB)
    bias1 = tl.zeros([FB], tl.float32)
    bias2 = tl.zeros([DP], tl.float32)
    open2 = tl.zeros([DP], tl.float32)
    if BIAS:
        b1 += row * F
        c1 += row * F
        b2 += row * D + rows_at
        c2 += row * D + rows_at
        bias2 = tl.load(b2, mask=rows, other=0.0).to(tl.float32)
        open2 = tl.load(c2, mask=rows, other=0.0).to(tl.float32)

    sums = tl.zeros([FB, DP], tl.float32)
    for tile in range(0, F, FB):
        t1, t2 = load_tile(w1, w2, tile + units, rows_at, rows, D, F)
        if BIAS:
            bias1 = tl.load(b1 + tile + units).to(tl.float32)
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
        s1, s2 = load_tile(u1, u2, tile + units, rows_at, rows, D, F)
        t1 = t1.to(tl.float32)
        t2 = t2.to(tl.float32)
        if BIAS:
            bias1 = tl.load(b1 + tile + units).to(tl.float32)
        x, slope = gelu_and_slope(tl.sum(t1 * kt[None, :], 1) + bias1)
        moved1 = tl.sum(t2 * moved2[None, :], 1) * slope  # −η·g1
        s1 = s1.to(tl.float32) + moved1[:, None] * kt[None, :]
        s2 = s2.to(tl.float32) + x[:, None] * moved2[None, :]
        t1 += (
            read * s1
        )  # the weights with which this token reads; after the last token of a mini-batch, those that are committed
        t2 += read * s2
        if BIAS:
            open1 = tl.load(c1 + tile + units).to(tl.float32) + moved1
            bias1 += read * open1
            tl.store(c1 + tile + units, tl.where(commits, 0.0, open1))
            if commits:
                tl.store(b1 + tile + units, bias1)
        xbar = gelu(tl.sum(t1 * qt[None, :], 1) + bias1)
        sums += t2 * xbar[:, None]
        store_tile(u1, u2, tile + units, rows_at, rows, tl.where(commits, 0.0, s1), tl.where(commits, 0.0, s2), D, F)
        if commits:
            store_tile(w1, w2, tile + units, rows_at, rows, t1, t2, D, F)
    zbar2 = tl.sum(sums, 0)
    if BIAS:
        open2 += moved2
        bias2 += read * open2
        zbar2 += bias2
        tl.store(c2, tl.where(commits, 0.0, open2), mask=rows)
        if commits:
            tl.store(b2, bias2, mask=rows)
    hat, _rstd_bar = normalize(zbar2[:, None], rows, D, DP)
    out = qt + gamma * tl.sum(hat, 1) + beta
    tl.store(o + n * o_b + h * o_h + rows_at, out, mask=rows)


def decode(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, weights: Weights, update: Weights, scale: Tensor, bias: Tensor, tau: Tensor,
    phase: Tensor, launch: Config,
) -> Tensor:  # fmt: skip
    """Outputs `[B, H, d]`; `weights` and `update`, contiguous, are changed in place."""
    batch, heads, d = q.shape
    o = torch.empty_like(q)
    steps = [x.stride(dim) for x in (q, k, v, eta, o) for dim in range(2)]
    decode_kernel[(batch * heads,)](
        q, k, v, eta, tau, phase, scale, bias, o, *weights, *update, *steps, heads, tau_stride(tau),
        D=d, DP=triton.next_power_of_2(d), F=4 * d, B=tau.shape[1], BIAS=weights[1] is not None, **launch_options(launch),
    )  # fmt: skip
    return o
