"""Forward pass of `ttt_linear`: one program per (sequence, head) walks the mini-batches with the fast weights in
registers.

`tiles.py` has the layout, the notation and the precision. The walk reads q, k, v and writes o, and U where a backward
pass will follow: 4 or 5 tiles `[b, d]` per mini-batch.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.naive import EPS
from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.tiles import (
    affine,
    final_state,
    initial_state,
    learn,
    load_tile,
    output,
    read,
    sequence_bounds,
    store_anchor,
    store_tile,
    token_steps,
    update,
)
from metattt.kernels.ttt_linear.tuning import padded


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, eta_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens,
    o_ptr, weighted_ptr, anchor_ptr, w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr,
    T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, w_n, b_n, tau_h, o_b, o_t, o_h, weighted_b,
    weighted_t, weighted_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: bias, tau, packing, what the backward pass needs,
    final state."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)  # (H·T·d may exceed 2³¹)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    chunks = tl.cdiv(length, SIZE)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    o_ptr += row * o_b + start * o_t + h * o_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    if weighted_ptr is not None:
        weighted_ptr += row * weighted_b + start * weighted_t + h * weighted_h
        anchor_ptr += (slot * H + h) * (D + 1) * D

    gamma, beta, square_gamma, mean_square_gamma = affine(scale_ptr, shift_ptr, h, features, inside, D)
    tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    s, s_mean, bias, bias_mean = initial_state(w_ptr, b_ptr, n, h, w_n, b_n, features, inside, D, DP, COLUMNS)
    weighted = tl.zeros([DP, COLUMNS], k_ptr.dtype.element_ty)

    # Each mini-batch is loaded into registers while the one before it is computed; η is needed late, and loaded then.
    at = tokens.to(tl.int64)
    tile = ((tokens < SIZE) & (at < length))[:, None] & inside[None, :]
    k = load_tile(k_ptr, at, k_t, features, tile)
    q = load_tile(q_ptr, at, q_t, features, tile)
    v = load_tile(v_ptr, at, v_t, features, tile)

    for segment in tl.range(tl.cdiv(chunks, SEGMENT), disable_licm=True):
        for chunk in tl.range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, chunks), num_stages=1):
            at = (chunk * SIZE + tokens).to(tl.int64)
            here = (tokens < SIZE) & (at < length)
            tile = here[:, None] & inside[None, :]
            eta = tl.load(eta_ptr + at * eta_t, mask=here, other=0)
            next_at = at + SIZE
            next_tile = ((tokens < SIZE) & (next_at < length))[:, None] & inside[None, :]
            next_k = load_tile(k_ptr, next_at, k_t, features, next_tile)
            next_q = load_tile(q_ptr, next_at, q_t, features, next_tile)
            next_v = load_tile(v_ptr, next_at, v_t, features, next_tile)

            s_operand = s.to(k.dtype)
            weighted = learn(
                s_operand, bias, k, v, eta, gamma, beta, square_gamma, mean_square_gamma, inside, D, DP, EPS, PRECISION
            )
            z, _, _ = read(s_operand, bias, q, k, weighted, tau, tokens, BIAS, PRECISION)
            step = tl.where((chunk + 1) * SIZE <= length, tau_last, 0.0)
            s, bias = update(s, bias, weighted, step, k, COLUMNS, BIAS, PRECISION)
            store_tile(o_ptr, at, o_t, features, tile, output(z, q, gamma, beta, D, EPS))
            if weighted_ptr is not None:
                store_tile(weighted_ptr, at, weighted_t, features, tile, tl.trans(weighted))
            k, q, v = next_k, next_q, next_v
        if weighted_ptr is not None:
            store_anchor(anchor_ptr, s, bias, features, tokens, inside, D)
            anchor_ptr += H * (D + 1) * D

    if w_end_ptr is not None:
        final_state(
            w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr, k_ptr, k_t, s, s_mean, bias, bias_mean, weighted,
            n, h, length, features, tokens, inside, H, D, DP, SIZE, BIAS, PRECISION,
        )  # fmt: skip


class Forward(NamedTuple):
    """What the kernels write. Tensors that were not asked for are empty.

    Attributes:
        o: like q.
        w, b, update_w, update_b: final state in fp32, `[N, H, d, d]` and `[N, H, d]`.
        weighted: `[B, T, H, d]` like k: U = −ηG as it was rounded for the products.
        anchors: `[slots, H, d + 1, d]` fp32: S and below it the bias, centred, after every `segment` mini-batches and
            at the end.
    """

    o: Tensor
    w: Tensor
    b: Tensor
    update_w: Tensor
    update_b: Tensor
    weighted: Tensor
    anchors: Tensor


def slots(batch: int, tokens: int, sequences: int, size: int, segment: int) -> int:
    """Number of stored fast weights: see `tiles.sequence_bounds`."""
    return batch * tokens // (size * segment) + sequences


def allocate(q: Tensor, k: Tensor, sequences: int, size: int, segment: int, save: bool, final: bool) -> Forward:
    """Uninitialized outputs: shapes, types and strides in one place, for the launch and for fake tensors."""
    batch, tokens, heads, width = q.shape
    states = sequences if final else 0
    matrices = [q.new_empty(states, heads, width, width, dtype=torch.float32) for _ in range(2)]
    vectors = [q.new_empty(states, heads, width, dtype=torch.float32) for _ in range(2)]
    stored = slots(batch, tokens, sequences, size, segment) if save else 0
    return Forward(
        torch.empty_like(q, memory_format=torch.contiguous_format),
        w=matrices[0],
        b=vectors[0],
        update_w=matrices[1],
        update_b=vectors[1],
        weighted=torch.empty_like(k, memory_format=torch.contiguous_format) if save else k.new_empty(0),
        anchors=q.new_empty(stored, heads, width + 1, width, dtype=torch.float32),
    )


def launch_forward(
    out: Forward, q: Tensor, k: Tensor, v: Tensor, eta: Tensor, w: Tensor, b: Tensor | None, scale: Tensor,
    shift: Tensor,
    tau: Tensor | None, cu_seqlens: Tensor | None, size: int, segment: int,
) -> None:  # fmt: skip
    """Runs the kernels into `out` of `allocate`, whose empty tensors say what not to write.

    w is `[H, d, d]` for all sequences or `[N, H, d, d]`, b likewise; all weights and tau are contiguous.
    """
    batch, tokens, heads, width = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    save, final = len(out.anchors) > 0, len(out.w) > 0
    between = (out.weighted, out.anchors) if save else (None, None)
    weighted_strides = out.weighted.stride()[:3] if save else (0, 0, 0)
    end = (out.w, out.b, out.update_w, out.update_b) if final else (None,) * 4
    state_strides = (
        w.stride(0) if w.ndim == 4 else 0,
        b.stride(0) if b is not None and b.ndim == 3 else 0,
        tau.stride(0) if tau is not None and len(tau) > 1 else 0,
    )
    sizes = {
        "H": heads, "D": width, "DP": padded(width), "SIZE": size, "COLUMNS": padded(size), "SEGMENT": segment,
        "BIAS": b is not None, "EPS": EPS, "PRECISION": tuning.FP32_PRODUCTS,
    }  # fmt: skip
    forward_kernel[(sequences * heads,)](
        q, k, v, eta, w, b, scale, shift, tau, cu_seqlens, out.o, *between, *end, tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), *state_strides, *out.o.stride()[:3],
        *weighted_strides,
        **sizes, **tuning.launch("forward", width, size, k.itemsize)._asdict(),
    )  # fmt: skip
