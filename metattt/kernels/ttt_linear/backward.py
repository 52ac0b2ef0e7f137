"""Backward pass of `ttt_linear`: one program per (sequence, head) walks the mini-batches from the last to the first
(`backward_kernel`), or only their recurrence, between two launches that are parallel over segments (`backward_chain`).

Layout, notation and precision are those of `tiles.py`; dS = ∂L/∂S is carried beside S. The walk reads q, k, v, dO and
U and writes dq, dk and dv: 8 tiles `[b, d]` per mini-batch (k and dO twice, the second time from the cache).

**No recomputed segment.** W before a mini-batch is W after it less the update, and the forward pass stored U, the
update's operand. So one product undoes the update, at the price of reading one more `[b, d]` tile, where recomputation
would walk every mini-batch twice. Rounding drifts only within a segment: S is loaded anew from the stored anchors at
each.

**Registers.** S and dS take a quarter of them, so the walk is in two steps with little in common: through the output,
which needs no inner gradient, since U is stored; then through the inner gradient. Nothing is loaded ahead: where walks
are taken, other programs hide the loads. With d = 64, b = 16 and 16 bits nothing is left on the stack by Triton 3.6 and
3.9 (`results/gpu/compiled.md`); what is computed or loaded anew below rather than kept was chosen by that.

**Through the gradient of the inner loss.** With x = norm(Z), g = γ(k − v + β) + γ²x and G = r(g − mean g − x mean gx),
a cotangent A of G gives

    dg = r (A − mean A − x mean Ax)                            (the projection in G is symmetric)
    dx = γ² dg − r (A mean gx + g mean Ax)
    dZ = r (dx − mean dx − x (mean dx·x + mean A·G))           (the last term is ∂G/∂r)

and mean dx, mean dx·x expand into means that are known once Z and A are, so all sums over features of A come from one
pass. A = η y, where y = ∂L/∂(ηG) = −τ_{b−1} dS k − dZ̄ mixingᵀ, of the update and of the outputs.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_linear import backward_chain, tuning
from metattt.kernels.ttt_linear.naive import EPS
from metattt.kernels.ttt_linear.tiles import (
    affine,
    end_cotangents,
    inner_gradient,
    load_anchor,
    load_tile,
    open_cotangents,
    piece_bounds,
    read,
    sequence_bounds,
    store_tile,
    through_gradient,
    through_output,
    through_products,
    token_steps,
    update,
)
from metattt.kernels.ttt_linear.tuning import padded


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    d_o_ptr, d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr,
    q_ptr, k_ptr, v_ptr, eta_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, weighted_ptr, anchor_ptr,
    d_q_ptr, d_k_ptr, d_v_ptr, d_eta_ptr, d_w_ptr, d_b_ptr, d_scale_ptr, d_shift_ptr, d_tau_ptr,
    T,
    d_o_b, d_o_t, d_o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, tau_h, weighted_b,
    weighted_t, weighted_h,
    d_q_b, d_q_t, d_q_h, d_k_b, d_k_t, d_k_h, d_v_b, d_v_t, d_v_h, d_eta_b, d_eta_t, d_eta_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BIAS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: tau, packing, cotangents of the final state,
    bias."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)  # (H·T·d may exceed 2³¹)
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    d_k_ptr += row * d_k_b + start * d_k_t + h * d_k_h
    d_eta_ptr += row * d_eta_b + start * d_eta_t + h * d_eta_h

    gamma, beta, square_gamma, mean_square_gamma = affine(scale_ptr, shift_ptr, h, features, inside, D)
    _tau, tau_last = token_steps(tau_ptr, h, tau_h, tokens, SIZE, COLUMNS)
    vector = (n * H + h) * D + features
    d_gamma = tl.zeros([DP], tl.float32)
    d_beta = tl.zeros([DP], tl.float32)
    d_tau = tl.zeros([COLUMNS], tl.float32)
    d_tau_last = tl.zeros([DP], tl.float32)
    d_s, d_bias = end_cotangents(
        d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, n * H + h, length % SIZE > 0, features, inside, D, DP,
        COLUMNS, BIAS
    )  # fmt: skip

    pieces = tl.cdiv(length // SIZE, SEGMENT) + tl.where(length % SIZE > 0, 1, 0)
    for piece in tl.range(pieces - 1, -1, -1, disable_licm=True):
        first, stop, is_open = piece_bounds(piece, length, SIZE, SEGMENT)
        step = tl.where(is_open, 0.0, tau_last)
        anchor = anchor_ptr + ((slot + (stop - 1) // SEGMENT) * H + h) * (D + 1) * D
        s, bias = load_anchor(anchor, features, first < stop, D, DP, COLUMNS)

        for mini_batch in tl.range(stop - 1, first - 1, -1, num_stages=1, disable_licm=True):
            # 0, which the compiler does not know. It would keep what does not change in a loop in registers, and others
            # on the stack: where tensors begin, τ, and S rounded.
            zero = mini_batch >> 30
            row_again, h_again = row + zero, h + zero
            d_o_at = d_o_ptr + row_again * d_o_b + start * d_o_t + h_again * d_o_h
            q_at = q_ptr + row_again * q_b + start * q_t + h_again * q_h
            k_at = k_ptr + row_again * k_b + start * k_t + h_again * k_h
            v_at = v_ptr + row_again * v_b + start * v_t + h_again * v_h
            eta_at = eta_ptr + row_again * eta_b + start * eta_t + h_again * eta_h
            weighted_at = weighted_ptr + row_again * weighted_b + start * weighted_t + h_again * weighted_h
            d_q_at = d_q_ptr + row_again * d_q_b + start * d_q_t + h_again * d_q_h
            d_v_at = d_v_ptr + row_again * d_v_b + start * d_v_t + h_again * d_v_h
            at = (mini_batch * SIZE + tokens).to(tl.int64)
            here = (tokens < SIZE) & (at < length)
            tile = here[:, None] & inside[None, :]
            k = load_tile(k_at, at, k_t, features, tile)
            weighted = load_tile(weighted_at, at, weighted_t, features, tile)
            q = load_tile(q_at, at, q_t, features, tile)
            v = load_tile(v_at, at, v_t, features, tile)
            d_o = load_tile(d_o_at, at, d_o_t, features, tile)

            tau, _last = token_steps(tau_ptr, h_again, tau_h, tokens, SIZE, COLUMNS)

            # W before this mini-batch.
            u = tl.trans(weighted)
            s, bias = update(s, bias, u, -step, k, COLUMNS, BIAS, PRECISION)
            s_operand = s.to(k.dtype)

            # Through the normalization of the output: dZ̄, and what follows from it.
            z, products, mixing = read(s_operand, bias, q, k, u, tau, tokens, BIAS, PRECISION)
            d_out = tl.trans(d_o.to(tl.float32))
            d_read, normal = through_output(z, d_out, gamma, inside, D, DP, EPS)
            d_gamma += tl.sum(d_out * normal, axis=1)
            d_beta += tl.sum(d_out, axis=1)
            d_read = d_read.to(k.dtype)
            d_mixing, d_products = through_products(q, k, d_read, u, tau, tokens, PRECISION)
            if d_tau_ptr is not None:
                d_tau += tl.sum(products * d_mixing, axis=0)
            d_q = tl.dot(tl.trans(s_operand), d_read, input_precision=PRECISION)
            d_q = tl.dot(tl.trans(k), d_products, acc=d_q, input_precision=PRECISION)
            d_o = load_tile(d_o_at, at, d_o_t, features, tile)
            store_tile(d_q_at, at, d_q_t, features, tile, tl.trans(d_q) + d_o.to(tl.float32))

            # y, of this mini-batch's outputs and of its update of W, whose part of dK is due too.
            d_s_operand = d_s.to(k.dtype)
            d_update = tl.dot(d_s_operand, tl.trans(k), acc=d_bias, input_precision=PRECISION)
            if d_tau_ptr is not None:
                d_tau_last += tl.where(is_open, 0.0, tl.sum(u.to(tl.float32) * d_update, axis=1))
            update_step = tl.where(is_open, 1.0, tau_last)
            y = -update_step * d_update - tl.dot(d_read, tl.trans(mixing), input_precision=PRECISION)
            d_k = update_step * tl.dot(tl.trans(d_s_operand), u, input_precision=PRECISION)
            d_k = tl.dot(tl.trans(q), tl.trans(d_products), acc=d_k, input_precision=PRECISION)
            d_s, d_bias = update(d_s, d_bias, d_read, 1.0, q, COLUMNS, BIAS, PRECISION)

            # The inner gradient again, and through it. (What is loaded twice need not be kept, k here as dO above.)
            k = load_tile(k_at, at, k_t, features, tile)
            z = tl.dot(s_operand, tl.trans(k), acc=bias, input_precision=PRECISION)
            c = tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
            x, r, _g, m1, m2, hx, hxx = inner_gradient(z, gamma * c, square_gamma, mean_square_gamma, D, EPS)
            eta = tl.load(eta_at + at * eta_t, mask=here, other=0)
            d_inner, d_eta, d_g = through_gradient(
                y, x, r, gamma * c, m1, m2, hx, hxx, eta, square_gamma, mean_square_gamma, inside, D, DP
            )
            tl.store(d_eta_ptr + at * d_eta_t, d_eta, mask=here)
            d_e = gamma * d_g
            d_gamma += tl.sum(d_g * (c + 2 * gamma * x), axis=1)
            d_beta += tl.sum(d_e, axis=1)
            store_tile(d_v_at, at, d_v_t, features, tile, tl.trans(-d_e))
            d_inner = d_inner.to(k.dtype)

            # The rest of dK and dS.
            s_operand = (s + zero.to(tl.float32)).to(k.dtype)
            d_k = tl.dot(tl.trans(s_operand), d_inner, acc=d_k + d_e, input_precision=PRECISION)
            store_tile(d_k_ptr, at, d_k_t, features, tile, tl.trans(d_k))
            d_s, d_bias = update(d_s, d_bias, d_inner, 1.0, k, COLUMNS, BIAS, PRECISION)

        if d_w_end_ptr is not None:  # noqa: SIM102 (decided when compiling; the next one in the run)
            if is_open:
                d_s, d_bias = open_cotangents(
                    d_s, d_bias, d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, n * H + h, features, inside, D,
                    BIAS
                )  # fmt: skip

    square = inside[:, None] & inside[None, :]
    tl.store(d_w_ptr + (n * H + h) * D * D + features[:, None] + features[None, :] * D, d_s, mask=square)
    if BIAS:
        tl.store(d_b_ptr + vector, tl.sum(d_bias, axis=1) / COLUMNS, mask=inside)
    tl.store(d_scale_ptr + vector, d_gamma, mask=inside)
    tl.store(d_shift_ptr + vector, d_beta, mask=inside)
    if d_tau_ptr is not None:
        d_tau += tl.where(tokens == SIZE - 1, tl.sum(d_tau_last, axis=0), 0)
        tl.store(d_tau_ptr + (n * H + h) * SIZE + tokens, d_tau, mask=tokens < SIZE)


class Backward(NamedTuple):
    """What the kernels write; the parts of weights are one per sequence, summed by the caller where sequences share
    weights.

    Attributes:
        q, k, v, eta: like the inputs.
        w, b, scale, shift: fp32 `[N, H, d, d]`, `[N, H, d]`; b empty without bias.
        tau: fp32 `[N, H, b]`; empty without tau.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    w: Tensor
    b: Tensor
    scale: Tensor
    shift: Tensor
    tau: Tensor


def allocate(
    q: Tensor, k: Tensor, v: Tensor, eta: Tensor, sequences: int, bias: bool, tau: bool, size: int
) -> Backward:
    """Uninitialized gradients: shapes, types and strides in one place, for the launch and for fake tensors."""
    heads, width = q.shape[2:]
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return Backward(
        q=d_q,
        k=d_k,
        v=d_v,
        eta=torch.empty_like(eta.mT, memory_format=torch.contiguous_format).mT,
        w=q.new_empty(sequences, heads, width, width, dtype=torch.float32),
        b=q.new_empty(sequences if bias else 0, heads, width, dtype=torch.float32),
        scale=q.new_empty(sequences, heads, width, dtype=torch.float32),
        shift=q.new_empty(sequences, heads, width, dtype=torch.float32),
        tau=q.new_empty(sequences if tau else 0, heads, size, dtype=torch.float32),
    )


def launch_backward(
    out: Backward, d_o: Tensor, d_state: tuple[Tensor, ...] | None, q: Tensor, k: Tensor, v: Tensor, eta: Tensor,
    scale: Tensor, shift: Tensor, tau: Tensor | None, cu_seqlens: Tensor | None, weighted: Tensor, anchors: Tensor,
    size: int, segment: int,
) -> Backward:  # fmt: skip
    """Runs the kernels into `out` of `allocate`. `d_state`: contiguous fp32 cotangents of w, b, update_w and update_b;
    `segment`: mini-batches between anchors."""
    batch, tokens, heads, width = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    call = tuning.Call.of(k, size, sequences)
    end = (None,) * 4 if d_state is None else d_state
    d_b = out.b if out.b.numel() else None
    d_tau = None if tau is None else out.tau
    tau_stride = tau.stride(0) if tau is not None and len(tau) > 1 else 0
    sizes = {
        "H": heads, "D": width, "DP": padded(width), "SIZE": size, "COLUMNS": padded(size), "SEGMENT": segment,
        "BIAS": d_b is not None, "EPS": EPS, "PRECISION": tuning.FP32_PRODUCTS,
    }  # fmt: skip
    programs = sequences * heads
    if call.form("backward", segment) == "walk":
        backward_kernel[(programs,)](
            d_o, *end, q, k, v, eta, scale, shift, tau, cu_seqlens, weighted, anchors,
            out.q, out.k, out.v, out.eta, out.w, d_b, out.scale, out.shift, d_tau, tokens,
            *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), tau_stride,
            *weighted.stride()[:3],
            *out.q.stride()[:3], *out.k.stride()[:3], *out.v.stride()[:3], *out.eta.stride(),
            **sizes, **call.launch("backward walk")._asdict(),
        )  # fmt: skip
        return out
    pieces = triton.cdiv(tokens // size, segment) + 1  # the last for an open mini-batch, of any sequence
    between = backward_chain.allocate(k, sequences, size, pieces, len(anchors), tau is not None)
    x, stats, d_read, y, d_inner, d_anchors, d_scale, d_shift, d_taus = between
    plane = stats.stride(0)
    d_tau_parts = (None, None) if tau is None else d_taus
    backward_chain.outputs_kernel[(programs, pieces)](
        d_o, q, k, v, scale, shift, tau, cu_seqlens, weighted, anchors, x, stats, d_read, out.v, d_scale[0],
        d_shift[0], d_tau_parts[0],
        tokens, plane,
        *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], tau_stride, *weighted.stride()[:3],
        *out.v.stride()[:3],
        **sizes, **call.launch("backward outputs")._asdict(),
    )  # fmt: skip
    backward_chain.chain_kernel[(programs,)](
        *end, q, k, v, eta, scale, shift, tau, cu_seqlens, x, stats, d_read, out.v,
        y, d_inner, d_anchors, out.eta, out.w, d_b, tokens, plane,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), tau_stride, *out.v.stride()[:3],
        *out.eta.stride(),
        **sizes, **call.launch("backward chain")._asdict(),
    )  # fmt: skip
    backward_chain.inputs_kernel[(programs, pieces)](
        d_o, q, k, v, eta, scale, shift, tau, cu_seqlens, weighted, anchors, x, stats, d_read, y, d_inner, d_anchors,
        out.q, out.k, out.v, d_scale[1], d_shift[1], d_tau_parts[1], tokens,
        *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), tau_stride,
        *weighted.stride()[:3],
        *out.q.stride()[:3], *out.k.stride()[:3], *out.v.stride()[:3],
        **sizes, **call.launch("backward inputs")._asdict(),
    )  # fmt: skip
    # Parts of all programs, in an order that is always the same.
    torch.sum(d_scale, (0, 1), out=out.scale)
    torch.sum(d_shift, (0, 1), out=out.shift)
    if d_tau is not None:
        torch.sum(d_taus, (0, 1), out=d_tau)
    return out
