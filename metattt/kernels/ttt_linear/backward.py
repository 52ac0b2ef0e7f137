"""Backward pass of `ttt_linear`: one program per (sequence, head) walks the mini-batches from the last to the first.

Layout and notation are those of the forward pass (features are rows, tokens are columns, S = Wᵀ centred); dS = ∂L/∂S is
carried beside S.

**No recomputed segment.** W before a mini-batch is W after it plus the update, and the forward pass stored the update's
operand τ_{b−1}ηG exactly as the tensor cores took it. So one product undoes the update, at the price of reading one
more `[b, d]` tile, where recomputation would walk every mini-batch twice. Rounding drifts only within a segment: S is
loaded anew from the stored anchors at each.

**Through the gradient of the inner loss.** With x = norm(Z), g = γ(k − v + β) + γ²x and G = r(g − mean g − x mean gx),
a cotangent A of G gives

    dg = r (A − mean A − x mean Ax)                            (the projection in G is symmetric)
    dx = γ² dg − r (A mean gx + g mean Ax)
    dZ = r (dx − mean dx − x (mean dx·x + mean A·G))           (the last term is ∂G/∂r)

and mean dx, mean dx·x expand into means that are known once Z and A are, so all sums over features of A come from one
pass.

Precision: as in the forward pass. S, dS, dZ, dZ̄ and all statistics are fp32; the operands of every product (S, dS, k,
    q, ηG, dZ, dZ̄,
the mixing matrix and its cotangent) are rounded to the type of the inputs; products accumulate in fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.forward import add3, add5, inner_gradient, load_tile, sequence_bounds, store_tile
from metattt.kernels.ttt_linear.naive import EPS
from metattt.kernels.ttt_linear.tuning import padded


@triton.jit(do_not_specialize=["T"])
def backward_kernel(
    d_o_ptr, d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr,
    q_ptr, k_ptr, v_ptr, eta_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens, commit_ptr, anchor_ptr,
    d_q_ptr, d_k_ptr, d_v_ptr, d_eta_ptr, d_w_ptr, d_b_ptr, d_scale_ptr, d_shift_ptr, d_tau_ptr,
    T,
    d_o_b, d_o_t, d_o_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, tau_h, commit_b, commit_t, commit_h,
    d_q_b, d_q_t, d_q_h, d_k_b, d_k_t, d_k_h, d_v_b, d_v_t, d_v_h, d_eta_b, d_eta_t, d_eta_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: tau, packing, cotangents of the final state,
    bias."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    whole = length // SIZE
    open_tokens = length % SIZE

    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    square = inside[:, None] & inside[None, :]
    d_o_ptr += row * d_o_b + start * d_o_t + h * d_o_h
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    commit_ptr += row * commit_b + start * commit_t + h * commit_h
    d_q_ptr += row * d_q_b + start * d_q_t + h * d_q_h
    d_k_ptr += row * d_k_b + start * d_k_t + h * d_k_h
    d_v_ptr += row * d_v_b + start * d_v_t + h * d_v_h
    d_eta_ptr += row * d_eta_b + start * d_eta_t + h * d_eta_h
    anchor_ptr += (slot * H + h) * (D + 1) * D

    gamma = tl.load(scale_ptr + h * D + features, mask=inside, other=0).to(tl.float32)[:, None]
    beta = tl.load(shift_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    square_gamma = gamma * gamma
    mean_square_gamma = tl.sum(tl.sum(square_gamma, axis=1), axis=0) / D
    causal = tokens[:, None] <= tokens[None, :]  # [s, t]
    tau = tl.full([COLUMNS], 1.0, tl.float32)
    tau_last = 1.0
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + h * tau_h + tokens, mask=tokens < SIZE, other=0).to(tl.float32)
        tau_last = tl.load(tau_ptr + h * tau_h + SIZE - 1).to(tl.float32)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    ones = tl.full([COLUMNS, COLUMNS], 1.0, operand)

    state = (n * H + h) * D * D + features[:, None] + features[None, :] * D  # W[in, out] as S[out, in]
    vector = (n * H + h) * D + features
    d_s = tl.zeros([DP, DP], tl.float32)
    d_bias = tl.zeros([DP], tl.float32)
    d_gamma = tl.zeros([DP], tl.float32)
    d_beta = tl.zeros([DP], tl.float32)
    d_tau = tl.zeros([COLUMNS], tl.float32)
    d_tau_last = tl.zeros([DP], tl.float32)
    if d_w_end_ptr is not None:
        if open_tokens > 0:  # the last tokens see the cotangent of the open sum in place of that of the weights
            d_s = tl.load(d_open_w_ptr + state, mask=square, other=0)
            if d_b_ptr is not None:
                d_bias = tl.load(d_open_b_ptr + vector, mask=inside, other=0)
        else:
            d_s = tl.load(d_w_end_ptr + state, mask=square, other=0)
            if d_b_ptr is not None:
                d_bias = tl.load(d_b_end_ptr + vector, mask=inside, other=0)

    # Each mini-batch is loaded into registers while the one after it is computed. All but the first loaded are whole.
    chunks = tl.cdiv(length, SIZE)
    at = ((chunks - 1) * SIZE + tokens).to(tl.int64)
    here = (tokens < SIZE) & (at >= 0) & (at < length)
    tile = here[:, None] & inside[None, :]
    k = load_tile(k_ptr, at, k_t, features, tile)
    commit = load_tile(commit_ptr, at, commit_t, features, tile)
    q = load_tile(q_ptr, at, q_t, features, tile)
    v = load_tile(v_ptr, at, v_t, features, tile)
    d_o = load_tile(d_o_ptr, at, d_o_t, features, tile)
    eta = tl.load(eta_ptr + at * eta_t, mask=here, other=0)

    segments = tl.cdiv(whole, SEGMENT)
    for back in range(tl.where(open_tokens > 0, segments + 1, segments)):
        # The open mini-batch is a segment of its own; W at its start is the last anchor.
        is_open = (open_tokens > 0) & (back == 0)
        segment = tl.where(open_tokens > 0, segments, segments - 1) - back
        first = tl.where(is_open, whole, segment * SEGMENT)
        stop = tl.where(is_open, whole + 1, tl.minimum(segment * SEGMENT + SEGMENT, whole))
        step = tl.where(is_open, 1.0, tau_last)
        anchor = anchor_ptr + ((stop - 1) // SEGMENT).to(tl.int64) * H * (D + 1) * D + features
        s = tl.load(anchor[None, :] + features[:, None] * D, mask=square, other=0)
        # The bias is a tile of equal columns: as such it is undone by a product, and enters Z and Z̄ as their
        # accumulator.
        bias = tl.load(anchor + D * D, mask=inside, other=0)[:, None] + tl.zeros([DP, COLUMNS], tl.float32)

        for i in tl.range(0, stop - first, num_stages=1):
            at = ((stop - 1 - i) * SIZE + tokens).to(tl.int64)
            here = (tokens < SIZE) & (at < length)
            tile = here[:, None] & inside[None, :]
            next_at = at - SIZE
            next_here = (tokens < SIZE) & (next_at >= 0)
            next_tile = next_here[:, None] & inside[None, :]
            next_k = load_tile(k_ptr, next_at, k_t, features, next_tile)
            next_commit = load_tile(commit_ptr, next_at, commit_t, features, next_tile)
            next_q = load_tile(q_ptr, next_at, q_t, features, next_tile)
            next_v = load_tile(v_ptr, next_at, v_t, features, next_tile)
            next_d_o = load_tile(d_o_ptr, next_at, d_o_t, features, next_tile)
            next_eta = tl.load(eta_ptr + next_at * eta_t, mask=next_here, other=0)

            # W before this mini-batch, and the forward pass again.
            undo = tl.trans(-commit)
            s = tl.dot(undo, k, acc=s, input_precision=PRECISION)
            if d_b_ptr is not None:
                bias = tl.dot(undo, ones, acc=bias, input_precision=PRECISION)
            s_operand = s.to(operand)
            z = tl.dot(s_operand, tl.trans(k), acc=bias, input_precision=PRECISION)
            c = tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
            x, r, g, m1, m2, hx, hxx = inner_gradient(z, gamma * c, square_gamma, D, EPS)
            grad = r[None, :] * (g - m1[None, :] - x * m2[None, :])
            if D < DP:
                grad = tl.where(inside[:, None], grad, 0)
            weighted = -eta[None, :] * grad
            weighted_operand = weighted.to(operand)
            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [s, t]
            if d_b_ptr is not None:
                products += 1
            products = tl.where(causal, products, 0)
            mixing = (products * tau[None, :]).to(operand)
            z = tl.dot(s_operand, tl.trans(q), acc=bias, input_precision=PRECISION)
            z = tl.dot(weighted_operand, mixing, acc=z, input_precision=PRECISION)

            # Through the normalization of the output: dZ̄, and what follows from it.
            d_out = tl.trans(d_o.to(tl.float32))
            d_normal = gamma * d_out
            zz, d1, dz1 = tl.reduce((z * z, d_normal, d_normal * z), 0, add3)
            r_out = tl.rsqrt(zz / D + EPS)
            normal = z * r_out[None, :]
            d_z = r_out[None, :] * (d_normal - (d1 / D)[None, :] - normal * (dz1 * r_out / D)[None, :])
            if D < DP:
                d_z = tl.where(inside[:, None], d_z, 0)
            d_gamma += tl.sum(d_out * normal, axis=1)
            d_beta += tl.sum(d_out, axis=1)
            d_z_operand = d_z.to(operand)
            d_mixing = tl.dot(tl.trans(weighted_operand), d_z_operand, input_precision=PRECISION)  # [s, t]
            d_products = tl.where(causal, d_mixing * tau[None, :], 0).to(operand)

            # y = ∂L/∂(ηG): from this mini-batch's outputs, and from its update of W, whose part of dK is due too.
            d_s_operand = d_s.to(operand)
            d_commit = tl.dot(d_s_operand, tl.trans(k), input_precision=PRECISION)
            if d_b_ptr is not None:
                d_commit += d_bias[:, None]
            if d_tau_ptr is not None:
                d_tau += tl.sum(products * d_mixing, axis=0)
                d_tau_last += tl.where(is_open, 0.0, tl.sum(weighted * d_commit, axis=1))
            y = -step * d_commit - tl.dot(d_z_operand, tl.trans(mixing), input_precision=PRECISION)
            d_k = tl.dot(tl.trans(d_s_operand), (step * weighted).to(operand), input_precision=PRECISION)
            d_k = tl.dot(tl.trans(q), tl.trans(d_products), acc=d_k, input_precision=PRECISION)
            d_s = tl.dot(d_z_operand, q, acc=d_s, input_precision=PRECISION)
            if d_b_ptr is not None:
                d_bias += tl.sum(d_z, axis=1)

            # Through the gradient of the inner loss; A = η y.
            hy = square_gamma * y
            y1, yx, yg, hy, hyx = tl.reduce((y, y * x, y * grad, hy, hy * x), 0, add5)
            tl.store(d_eta_ptr + at * d_eta_t, yg, mask=here)
            y1 /= D
            yx /= D
            scaled = r * eta
            d_g = scaled[None, :] * (y - y1[None, :] - x * yx[None, :])
            d_e = gamma * d_g
            d_gamma += tl.sum(d_g * (c + 2 * gamma * x), axis=1)
            d_beta += tl.sum(d_e, axis=1)
            store_tile(d_v_ptr, at, d_v_t, features, tile, tl.trans(-d_e))
            d_x = gamma * d_e - scaled[None, :] * (y * m2[None, :] + gamma * (c + gamma * x) * yx[None, :])
            dx1 = scaled * (hy / D - y1 * (mean_square_gamma + m2) - yx * (hx + m1))
            dxx = scaled * (hyx / D - y1 * hx - yx * (hxx + 2 * m2)) + eta * yg / D
            d_inner = r[None, :] * (d_x - dx1[None, :] - x * dxx[None, :])
            if D < DP:
                d_inner = tl.where(inside[:, None], d_inner, 0)
            d_inner_operand = d_inner.to(operand)

            # Cotangents of the queries and keys.
            s_transposed = tl.trans(s_operand)
            d_q = tl.dot(s_transposed, d_z_operand, input_precision=PRECISION)
            d_q = tl.dot(tl.trans(k), d_products, acc=d_q, input_precision=PRECISION)
            d_q = tl.trans(d_q) + d_o.to(tl.float32)
            store_tile(d_q_ptr, at, d_q_t, features, tile, d_q)
            d_k = tl.dot(s_transposed, d_inner_operand, acc=d_k + d_e, input_precision=PRECISION)
            store_tile(d_k_ptr, at, d_k_t, features, tile, tl.trans(d_k))
            d_s = tl.dot(d_inner_operand, k, acc=d_s, input_precision=PRECISION)
            if d_b_ptr is not None:
                d_bias += tl.sum(d_inner, axis=1)
            k, commit, q, v, d_o, eta = next_k, next_commit, next_q, next_v, next_d_o, next_eta

        if d_w_end_ptr is not None:  # noqa: SIM102 (decided when compiling; the next one in the run)
            if is_open:
                d_s += tl.load(d_w_end_ptr + state, mask=square, other=0) - tl.load(
                    d_open_w_ptr + state, mask=square, other=0
                )
                if d_b_ptr is not None:
                    d_bias += tl.load(d_b_end_ptr + vector, mask=inside, other=0) - tl.load(
                        d_open_b_ptr + vector, mask=inside, other=0
                    )

    tl.store(d_w_ptr + state, d_s, mask=square)
    if d_b_ptr is not None:
        tl.store(d_b_ptr + vector, d_bias, mask=inside)
    tl.store(d_scale_ptr + vector, d_gamma, mask=inside)
    tl.store(d_shift_ptr + vector, d_beta, mask=inside)
    if d_tau_ptr is not None:
        d_tau += tl.where(tokens == SIZE - 1, tl.sum(d_tau_last, axis=0), 0)
        tl.store(d_tau_ptr + (n * H + h) * SIZE + tokens, d_tau, mask=tokens < SIZE)


class Backward(NamedTuple):
    """What the kernel writes; the parts of weights are one per sequence, summed by the caller where sequences share
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
    return Backward(
        q=torch.empty_like(q),
        k=torch.empty_like(k),
        v=torch.empty_like(v),
        eta=torch.empty_like(eta),
        w=q.new_empty(sequences, heads, width, width, dtype=torch.float32),
        b=q.new_empty(sequences if bias else 0, heads, width, dtype=torch.float32),
        scale=q.new_empty(sequences, heads, width, dtype=torch.float32),
        shift=q.new_empty(sequences, heads, width, dtype=torch.float32),
        tau=q.new_empty(sequences if tau else 0, heads, size, dtype=torch.float32),
    )


def launch_backward(
    out: Backward,
    d_o: Tensor,
    d_state: tuple[Tensor, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    cu_seqlens: Tensor | None,
    commits: Tensor,
    anchors: Tensor,
    size: int,
) -> Backward:
    """Runs the kernel into `out` of `allocate`. `d_state`: contiguous fp32 cotangents of w, b, update_w and
    update_b."""
    batch, tokens, heads, width = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    backward_kernel[(sequences * heads,)](
        d_o, *((None,) * 4 if d_state is None else d_state),
        q, k, v, eta, scale, shift, tau, cu_seqlens, commits, anchors,
        out.q, out.k, out.v, out.eta, out.w, out.b if out.b.numel() else None, out.scale, out.shift, out.tau if out.tau.numel() else None,
        tokens,
        *d_o.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(),
        tau.stride(0) if tau is not None and len(tau) > 1 else 0, *commits.stride()[:3],
        *out.q.stride()[:3], *out.k.stride()[:3], *out.v.stride()[:3], *out.eta.stride(),
        H=heads, D=width, DP=padded(width), SIZE=size, COLUMNS=padded(size),
        SEGMENT=tuning.SEGMENT, EPS=EPS, PRECISION=tuning.FP32_PRODUCTS,
        **tuning.backward_launch(padded(width), padded(size))._asdict(),
    )  # fmt: skip
    return out
