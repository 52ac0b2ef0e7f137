"""Forward pass of `ttt_linear` where there are few (sequence, head) pairs: the recurrence alone, then all reading at
once.

Per mini-batch only Z, G and the update of S depend on the mini-batch before. `chain_kernel`, one program per (sequence,
head), walks these and leaves U = −ηG and, after every segment of mini-batches, S: the anchors. `read_kernel`, one
program per segment, starts from the anchor at its segment's end, undoes one update after the other, and does queries,
mixing, normalization and the output.

Tiles `[b, d]` of memory per mini-batch: the chain reads k, v and writes U, the reading reads q, k, U and writes o, 7 in
all (the walk: 5), and S once each way in a segment: 8d² / segment bytes. With b = 16, d = 64, 16 bits and segments of
16 these are 14 KB and 2 KB.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

import triton
import triton.language as tl

from metattt.kernels.ttt_linear.tiles import (
    affine,
    final_state,
    initial_state,
    learn,
    load_anchor,
    load_tile,
    output,
    read,
    sequence_bounds,
    store_anchor,
    store_tile,
    token_steps,
    update,
)


@triton.jit(do_not_specialize=["T"])
def chain_kernel(
    k_ptr, v_ptr, eta_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens,
    weighted_ptr, anchor_ptr, w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr,
    T,
    k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, w_n, b_n, tau_h, weighted_b, weighted_t, weighted_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: bias, tau, packing, final state."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    chunks = tl.cdiv(length, SIZE)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    weighted_ptr += row * weighted_b + start * weighted_t + h * weighted_h
    anchor_ptr += (slot * H + h) * (D + 1) * D

    gamma, beta, square_gamma, mean_square_gamma = affine(scale_ptr, shift_ptr, h, features, inside, D)
    _tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    s, s_mean, bias, bias_mean = initial_state(w_ptr, b_ptr, n, h, w_n, b_n, features, inside, D, DP, COLUMNS)
    weighted = tl.zeros([DP, COLUMNS], k_ptr.dtype.element_ty)

    at = tokens.to(tl.int64)
    tile = ((tokens < SIZE) & (at < length))[:, None] & inside[None, :]
    k = load_tile(k_ptr, at, k_t, features, tile)
    v = load_tile(v_ptr, at, v_t, features, tile)
    for segment in range(tl.cdiv(chunks, SEGMENT)):
        for chunk in tl.range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, chunks), num_stages=1):
            at = (chunk * SIZE + tokens).to(tl.int64)
            here = (tokens < SIZE) & (at < length)
            eta = tl.load(eta_ptr + at * eta_t, mask=here, other=0)
            next_at = at + SIZE
            next_tile = ((tokens < SIZE) & (next_at < length))[:, None] & inside[None, :]
            next_k = load_tile(k_ptr, next_at, k_t, features, next_tile)
            next_v = load_tile(v_ptr, next_at, v_t, features, next_tile)

            weighted = learn(
                s.to(k.dtype), bias, k, v, eta, gamma, beta, square_gamma, mean_square_gamma, inside, D, DP, EPS,
                PRECISION,
            )  # fmt: skip
            step = tl.where((chunk + 1) * SIZE <= length, tau_last, 0.0)
            s, bias = update(s, bias, weighted, step, k, COLUMNS, BIAS, PRECISION)
            tile = here[:, None] & inside[None, :]
            store_tile(weighted_ptr, at, weighted_t, features, tile, tl.trans(weighted))
            k, v = next_k, next_v
        store_anchor(anchor_ptr, s, bias, features, tokens, inside, D)
        anchor_ptr += H * (D + 1) * D

    if w_end_ptr is not None:
        final_state(
            w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr, k_ptr, k_t, s, s_mean, bias, bias_mean, weighted,
            n, h, length, features, tokens, inside, H, D, DP, SIZE, BIAS, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def read_kernel(
    q_ptr, k_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, weighted_ptr, anchor_ptr, o_ptr,
    T,
    q_b, q_t, q_h, k_b, k_t, k_h, tau_h, weighted_b, weighted_t, weighted_h, o_b, o_t, o_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program ((n, h), segment); those after the end of a shorter sequence have nothing to do."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    segment = tl.program_id(1)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    first = segment * SEGMENT
    stop = tl.minimum(first + SEGMENT, tl.cdiv(length, SIZE))
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    o_ptr += row * o_b + start * o_t + h * o_h
    weighted_ptr += row * weighted_b + start * weighted_t + h * weighted_h
    anchor_ptr += ((slot + segment) * H + h) * (D + 1) * D

    gamma, beta, _, _ = affine(scale_ptr, shift_ptr, h, features, inside, D)
    tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    s, bias = load_anchor(anchor_ptr, features, first < stop, D, DP, COLUMNS)
    for i in tl.range(0, stop - first, num_stages=1):
        chunk = stop - 1 - i
        at = (chunk * SIZE + tokens).to(tl.int64)
        tile = ((tokens < SIZE) & (at < length))[:, None] & inside[None, :]
        k = load_tile(k_ptr, at, k_t, features, tile)
        q = load_tile(q_ptr, at, q_t, features, tile)
        weighted = tl.trans(load_tile(weighted_ptr, at, weighted_t, features, tile))
        step = tl.where((chunk + 1) * SIZE <= length, tau_last, 0.0)
        s, bias = update(s, bias, weighted, -step, k, COLUMNS, BIAS, PRECISION)
        z, _, _ = read(s.to(k.dtype), bias, q, k, weighted, tau, tokens, BIAS, PRECISION)
        store_tile(o_ptr, at, o_t, features, tile, output(z, q, gamma, beta, D, EPS))
