"""The kernels of the backward pass of `ttt_linear`: the recurrence alone, between what comes before it and what comes
after it, both parallel over pieces of the sequences.

From the last mini-batch to the first only dS, y and dZ, the cotangent of Z through the gradient of the inner loss, are
a recurrence. In three launches (`backward.py` has the notation):

1. `outputs_kernel`, one program per (sequence, head) and piece: undoes the updates of its piece, and from S recomputes
   Z and Z̄. Leaves what the recurrence needs that does not depend on dS: x, five numbers a token, dZ̄, and the part of
   y that comes from the outputs (in the memory of dv, which is written last).
2. `chain_kernel`, one program per (sequence, head): y, dη, dZ, dS. Leaves y, dZ, and dS after every piece.
3. `inputs_kernel`, one program per (sequence, head) and piece: undoes the updates again, takes dS along from the stored
   one, and adds up dq, dk, dv and its part of dγ, dβ, dτ. Parts are summed in a fixed order: no atomics.

Tiles `[b, d]` of memory per mini-batch: 5 read and 3 written, 6 and 2, 9 and 3: 28 in all, 56 KB with b =
16, d = 64 and 16 bits, 16 KB of them on the serial path; S is read twice in a piece, dS written and read: 16d² /
segment bytes, 4 KB with segments of 16.

Precision: as `tiles.py` says; x, dZ̄, y and dZ are rounded to the type of the inputs where they are stored.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_linear.tiles import (
    add2,
    affine,
    end_cotangents,
    first_column,
    inner_gradient,
    load_anchor,
    load_tile,
    open_cotangents,
    piece_bounds,
    read,
    sequence_bounds,
    store_anchor,
    store_tile,
    through_gradient,
    through_output,
    through_products,
    token_steps,
    update,
)


class Between(NamedTuple):
    """What one launch leaves for another; tokens of a head lie together.

    Attributes:
        x: norm(Z) `[B, H, T, d]` in the type of the inputs.
        stats: r, m1, m2, mean hx, mean hx² `[5, B, H, T]` fp32.
        d_read: dZ̄ like x.
        y: like x.
        d_inner: dZ like x.
        d_anchors: `[slots + N, H, d + 1, d]` fp32: dS and below it that of the bias, after every piece.
        scale, shift: parts of dγ, dβ `[2, pieces, N, H, d]` fp32, of outputs and of inner gradients.
        tau: likewise of dτ `[2, pieces, N, H, b]`; empty without tau.
    """

    x: Tensor
    stats: Tensor
    d_read: Tensor
    y: Tensor
    d_inner: Tensor
    d_anchors: Tensor
    scale: Tensor
    shift: Tensor
    tau: Tensor


def allocate(k: Tensor, sequences: int, size: int, pieces: int, slots: int, tau: bool) -> Between:
    """Uninitialized; k `[B, T, H, d]`, `slots` those of the anchors of S."""
    batch, tokens, heads, width = k.shape
    tiles = [k.new_empty(batch, heads, tokens, width) for _ in range(4)]
    parts = [k.new_empty(2, pieces, sequences, heads, width, dtype=torch.float32) for _ in range(2)]
    return Between(
        x=tiles[0],
        stats=k.new_empty(5, batch, heads, tokens, dtype=torch.float32),
        d_read=tiles[1],
        y=tiles[2],
        d_inner=tiles[3],
        d_anchors=k.new_empty(slots + sequences, heads, width + 1, width, dtype=torch.float32),
        scale=parts[0],
        shift=parts[1],
        tau=k.new_empty(2, pieces if tau else 0, sequences, heads, size, dtype=torch.float32),
    )


@triton.jit(do_not_specialize=["T"])
def outputs_kernel(
    d_o_ptr, q_ptr, k_ptr, v_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, weighted_ptr, anchor_ptr,
    x_ptr, stats_ptr, d_read_ptr, y_ptr, d_scale_ptr, d_shift_ptr, d_tau_ptr,
    T, plane,
    d_o_b, d_o_t, d_o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, tau_h, weighted_b, weighted_t, weighted_h, y_b,
    y_t, y_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program ((n, h), piece). Pieces after the last of a shorter sequence are empty, and their parts zero."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    piece = tl.program_id(1)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    first, stop, is_open = piece_bounds(piece, length, SIZE, SEGMENT)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    d_o_ptr += row * d_o_b + start * d_o_t + h * d_o_h
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    weighted_ptr += row * weighted_b + start * weighted_t + h * weighted_h
    y_ptr += row * y_b + start * y_t + h * y_h
    position = (row * H + h) * T + start
    x_ptr += position * D
    d_read_ptr += position * D
    stats_ptr += position

    gamma, beta, square_gamma, mean_square_gamma = affine(scale_ptr, shift_ptr, h, features, inside, D)
    tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    step = tl.where(is_open, 0.0, tau_last)
    anchor_ptr += ((slot + (stop - 1) // SEGMENT) * H + h) * (D + 1) * D
    s, bias = load_anchor(anchor_ptr, features, first < stop, D, DP, COLUMNS)
    d_gamma = tl.zeros([DP], tl.float32)
    d_beta = tl.zeros([DP], tl.float32)
    d_tau = tl.zeros([COLUMNS], tl.float32)
    for i in tl.range(0, stop - first, num_stages=1):
        at = ((stop - 1 - i) * SIZE + tokens).to(tl.int64)
        here = (tokens < SIZE) & (at < length)
        tile = here[:, None] & inside[None, :]
        k = load_tile(k_ptr, at, k_t, features, tile)
        u = tl.trans(load_tile(weighted_ptr, at, weighted_t, features, tile))
        q = load_tile(q_ptr, at, q_t, features, tile)
        v = load_tile(v_ptr, at, v_t, features, tile)
        d_out = tl.trans(load_tile(d_o_ptr, at, d_o_t, features, tile).to(tl.float32))

        s, bias = update(s, bias, u, -step, k, COLUMNS, BIAS, PRECISION)
        s_operand = s.to(k.dtype)
        z = tl.dot(s_operand, tl.trans(k), acc=bias, input_precision=PRECISION)
        a = gamma * tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
        x, r, _, m1, m2, hx, hxx = inner_gradient(z, a, square_gamma, mean_square_gamma, D, EPS)
        store_tile(x_ptr, at, D, features, tile, tl.trans(x))
        tl.store(stats_ptr + at, r, mask=here)
        tl.store(stats_ptr + plane + at, m1, mask=here)
        tl.store(stats_ptr + 2 * plane + at, m2, mask=here)
        tl.store(stats_ptr + 3 * plane + at, hx, mask=here)
        tl.store(stats_ptr + 4 * plane + at, hxx, mask=here)

        z, products, mixing = read(s_operand, bias, q, k, u, tau, tokens, BIAS, PRECISION)
        d_read, normal = through_output(z, d_out, gamma, inside, D, DP, EPS)
        d_gamma += tl.sum(d_out * normal, axis=1)
        d_beta += tl.sum(d_out, axis=1)
        d_read = d_read.to(k.dtype)
        store_tile(d_read_ptr, at, D, features, tile, tl.trans(d_read))
        if d_tau_ptr is not None:
            d_mixing, _ = through_products(q, k, d_read, u, tau, tokens, PRECISION)
            d_tau += tl.sum(products * d_mixing, axis=0)
        y = -tl.dot(d_read, tl.trans(mixing), input_precision=PRECISION)
        store_tile(y_ptr, at, y_t, features, tile, tl.trans(y))

    part = (piece * (tl.num_programs(0) // H) + n) * H + h
    tl.store(d_scale_ptr + part * D + features, d_gamma, mask=inside)
    tl.store(d_shift_ptr + part * D + features, d_beta, mask=inside)
    if d_tau_ptr is not None:
        tl.store(d_tau_ptr + part * SIZE + tokens, d_tau, mask=tokens < SIZE)


@triton.jit(do_not_specialize=["T"])
def chain_kernel(
    d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr,
    q_ptr, k_ptr, v_ptr, eta_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, x_ptr, stats_ptr, d_read_ptr, y_out_ptr,
    y_ptr, d_inner_ptr, d_anchor_ptr, d_eta_ptr, d_w_ptr, d_b_ptr,
    T, plane,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, tau_h, y_out_b, y_out_t, y_out_h, d_eta_b,
    d_eta_t, d_eta_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: tau, packing, cotangents of the final state."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    d_eta_ptr += row * d_eta_b + start * d_eta_t + h * d_eta_h
    y_out_ptr += row * y_out_b + start * y_out_t + h * y_out_h
    position = (row * H + h) * T + start
    x_ptr += position * D
    d_read_ptr += position * D
    y_ptr += position * D
    d_inner_ptr += position * D
    stats_ptr += position

    gamma, beta, square_gamma, mean_square_gamma = affine(scale_ptr, shift_ptr, h, features, inside, D)
    _tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    d_s, d_bias = end_cotangents(
        d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, n * H + h, length % SIZE > 0, features, inside, D, DP,
        COLUMNS, BIAS
    )  # fmt: skip

    at = ((tl.cdiv(length, SIZE) - 1) * SIZE + tokens).to(tl.int64)
    tile = ((tokens < SIZE) & (at >= 0) & (at < length))[:, None] & inside[None, :]
    k = load_tile(k_ptr, at, k_t, features, tile)
    q = load_tile(q_ptr, at, q_t, features, tile)
    v = load_tile(v_ptr, at, v_t, features, tile)
    x = load_tile(x_ptr, at, D, features, tile)
    d_read = load_tile(d_read_ptr, at, D, features, tile)
    y_out = load_tile(y_out_ptr, at, y_out_t, features, tile)

    pieces = tl.cdiv(length // SIZE, SEGMENT) + tl.where(length % SIZE > 0, 1, 0)
    for back in range(pieces):
        piece = pieces - 1 - back
        first, stop, is_open = piece_bounds(piece, length, SIZE, SEGMENT)
        step = tl.where(is_open, 1.0, tau_last)
        anchor = d_anchor_ptr + ((slot + n + piece) * H + h) * (D + 1) * D
        store_anchor(anchor, d_s, d_bias, features, tokens, inside, D)
        for i in tl.range(0, stop - first, num_stages=1):
            at = ((stop - 1 - i) * SIZE + tokens).to(tl.int64)
            here = (tokens < SIZE) & (at < length)
            tile = here[:, None] & inside[None, :]
            eta = tl.load(eta_ptr + at * eta_t, mask=here, other=0)
            r = tl.load(stats_ptr + at, mask=here, other=0)
            m1 = tl.load(stats_ptr + plane + at, mask=here, other=0)
            m2 = tl.load(stats_ptr + 2 * plane + at, mask=here, other=0)
            hx = tl.load(stats_ptr + 3 * plane + at, mask=here, other=0)
            hxx = tl.load(stats_ptr + 4 * plane + at, mask=here, other=0)
            next_at = at - SIZE
            next_tile = ((tokens < SIZE) & (next_at >= 0))[:, None] & inside[None, :]
            next_k = load_tile(k_ptr, next_at, k_t, features, next_tile)
            next_q = load_tile(q_ptr, next_at, q_t, features, next_tile)
            next_v = load_tile(v_ptr, next_at, v_t, features, next_tile)
            next_x = load_tile(x_ptr, next_at, D, features, next_tile)
            next_d_read = load_tile(d_read_ptr, next_at, D, features, next_tile)
            next_y_out = load_tile(y_out_ptr, next_at, y_out_t, features, next_tile)

            d_update = tl.dot(d_s.to(k.dtype), tl.trans(k), acc=d_bias, input_precision=PRECISION)
            d_s, d_bias = update(d_s, d_bias, tl.trans(d_read), 1.0, q, COLUMNS, BIAS, PRECISION)
            y = tl.trans(y_out.to(tl.float32)) - step * d_update
            normal = tl.trans(x.to(tl.float32))
            a = gamma * tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
            d_inner, d_eta, _ = through_gradient(
                y, normal, r, a, m1, m2, hx, hxx, eta, square_gamma, mean_square_gamma, inside, D, DP
            )
            d_inner = d_inner.to(k.dtype)
            d_s, d_bias = update(d_s, d_bias, d_inner, 1.0, k, COLUMNS, BIAS, PRECISION)
            tl.store(d_eta_ptr + at * d_eta_t, d_eta, mask=here)
            store_tile(y_ptr, at, D, features, tile, tl.trans(y))
            store_tile(d_inner_ptr, at, D, features, tile, tl.trans(d_inner))
            k, q, v, x, d_read, y_out = next_k, next_q, next_v, next_x, next_d_read, next_y_out

        if d_w_end_ptr is not None:  # noqa: SIM102 (decided when compiling; the next one in the run)
            if is_open:
                d_s, d_bias = open_cotangents(
                    d_s, d_bias, d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, n * H + h, features, inside, D,
                    BIAS
                )  # fmt: skip

    square = inside[:, None] & inside[None, :]
    tl.store(d_w_ptr + (n * H + h) * D * D + features[:, None] + features[None, :] * D, d_s, mask=square)
    if BIAS:
        tl.store(d_b_ptr + (n * H + h) * D + features, first_column(d_bias, tokens), mask=inside)


@triton.jit(do_not_specialize=["T"])
def inputs_kernel(
    d_o_ptr, q_ptr, k_ptr, v_ptr, eta_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, weighted_ptr, anchor_ptr,
    x_ptr, stats_ptr, d_read_ptr, y_ptr, d_inner_ptr, d_anchor_ptr,
    d_q_ptr, d_k_ptr, d_v_ptr, d_scale_ptr, d_shift_ptr, d_tau_ptr,
    T,
    d_o_b, d_o_t, d_o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, tau_h, weighted_b,
    weighted_t, weighted_h,
    d_q_b, d_q_t, d_q_h, d_k_b, d_k_t, d_k_h, d_v_b, d_v_t, d_v_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program ((n, h), piece). Pieces after the last of a shorter sequence are empty, and their parts zero."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    piece = tl.program_id(1)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    first, stop, is_open = piece_bounds(piece, length, SIZE, SEGMENT)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    d_o_ptr += row * d_o_b + start * d_o_t + h * d_o_h
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    weighted_ptr += row * weighted_b + start * weighted_t + h * weighted_h
    d_q_ptr += row * d_q_b + start * d_q_t + h * d_q_h
    d_k_ptr += row * d_k_b + start * d_k_t + h * d_k_h
    d_v_ptr += row * d_v_b + start * d_v_t + h * d_v_h
    position = (row * H + h) * T + start
    x_ptr += position * D
    d_read_ptr += position * D
    y_ptr += position * D
    d_inner_ptr += position * D
    stats_ptr += position

    gamma, beta, _square, _mean = affine(scale_ptr, shift_ptr, h, features, inside, D)
    tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    step = tl.where(is_open, 0.0, tau_last)
    anchor_ptr += ((slot + (stop - 1) // SEGMENT) * H + h) * (D + 1) * D
    s, bias = load_anchor(anchor_ptr, features, first < stop, D, DP, COLUMNS)  # (nothing here is read with the bias)
    d_anchor_ptr += ((slot + n + piece) * H + h) * (D + 1) * D
    d_s, d_bias = load_anchor(d_anchor_ptr, features, first < stop, D, DP, COLUMNS)
    TRACKED: tl.constexpr = BIAS and d_tau_ptr is not None
    d_gamma = tl.zeros([DP], tl.float32)
    d_beta = tl.zeros([DP], tl.float32)
    d_tau_last = tl.zeros([COLUMNS], tl.float32)
    for i in tl.range(0, stop - first, num_stages=1):
        at = ((stop - 1 - i) * SIZE + tokens).to(tl.int64)
        here = (tokens < SIZE) & (at < length)
        tile = here[:, None] & inside[None, :]
        k = load_tile(k_ptr, at, k_t, features, tile)
        q = load_tile(q_ptr, at, q_t, features, tile)
        u = tl.trans(load_tile(weighted_ptr, at, weighted_t, features, tile))
        d_read = tl.trans(load_tile(d_read_ptr, at, D, features, tile))
        d_inner = tl.trans(load_tile(d_inner_ptr, at, D, features, tile))
        s, bias = update(s, bias, u, -step, k, COLUMNS, False, PRECISION)
        s_transposed = tl.trans(s.to(k.dtype))

        # Queries, and the keys that were mixed and committed.
        _, d_products = through_products(q, k, d_read, u, tau, tokens, PRECISION)
        d_q = tl.dot(s_transposed, d_read, input_precision=PRECISION)
        d_q = tl.dot(tl.trans(k), d_products, acc=d_q, input_precision=PRECISION)
        d_o = load_tile(d_o_ptr, at, d_o_t, features, tile)
        store_tile(d_q_ptr, at, d_q_t, features, tile, tl.trans(d_q) + d_o.to(tl.float32))
        d_k = tl.dot(tl.trans(d_s.to(k.dtype)), u, input_precision=PRECISION)  # of the update, a step of 1
        if d_tau_ptr is not None:
            d_step = d_k * tl.trans(k.to(tl.float32))
            if BIAS:
                d_step += u.to(tl.float32) * d_bias
            d_tau_last += tl.where(is_open, 0.0, tl.sum(d_step, axis=0))
        d_k = tl.where(is_open, 1.0, tau_last) * d_k
        d_k = tl.dot(tl.trans(q), tl.trans(d_products), acc=d_k, input_precision=PRECISION)
        d_k = tl.dot(s_transposed, d_inner, acc=d_k, input_precision=PRECISION)
        d_s, d_bias = update(d_s, d_bias, d_read, 1.0, q, COLUMNS, TRACKED, PRECISION)
        d_s, d_bias = update(d_s, d_bias, d_inner, 1.0, k, COLUMNS, TRACKED, PRECISION)

        # The target k − v + β of the inner loss.
        x = tl.trans(load_tile(x_ptr, at, D, features, tile).to(tl.float32))
        y = tl.trans(load_tile(y_ptr, at, D, features, tile).to(tl.float32))
        v = load_tile(v_ptr, at, v_t, features, tile)
        scaled = tl.load(stats_ptr + at, mask=here, other=0) * tl.load(eta_ptr + at * eta_t, mask=here, other=0)
        y1, yx = tl.reduce((y, y * x), 0, add2)
        d_g = scaled[None, :] * (y - (y1 / D)[None, :] - x * (yx / D)[None, :])
        d_e = gamma * d_g
        c = tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
        d_gamma += tl.sum(d_g * (c + 2 * gamma * x), axis=1)
        d_beta += tl.sum(d_e, axis=1)
        store_tile(d_v_ptr, at, d_v_t, features, tile, tl.trans(-d_e))
        store_tile(d_k_ptr, at, d_k_t, features, tile, tl.trans(d_k + d_e))

    part = (piece * (tl.num_programs(0) // H) + n) * H + h
    tl.store(d_scale_ptr + part * D + features, d_gamma, mask=inside)
    tl.store(d_shift_ptr + part * D + features, d_beta, mask=inside)
    if d_tau_ptr is not None:
        d_tau = tl.where(tokens == SIZE - 1, tl.sum(d_tau_last, axis=0), 0)
        tl.store(d_tau_ptr + part * SIZE + tokens, d_tau, mask=tokens < SIZE)
