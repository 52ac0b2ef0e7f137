"""Decoding with `ttt_linear`: one token for each of many sequences, every sequence at its own place in its mini-batch.

One program per (sequence, head) holds W and the open sum M = −Σ ηkᵀG in registers. The output needs the new M, but only
as

    q M' = q M − η (q·k) G,

so that W and M are read once, M is written once, and W only when the token completes its mini-batch: 12 d² bytes per
token and head in fp32, against O(d) of everything else. The time is that of moving the state.

The new state goes where the caller says: over the old one, or elsewhere at no more traffic than that of a copy.

Precision: sums of products in fp32, whatever the types of state and inputs; nothing is rounded to a smaller type but
what is stored.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

import triton
import triton.language as tl

from metattt.kernels.ttt_linear.tiles import add3


@triton.jit
def normalize(z, inside, D: tl.constexpr, EPS: tl.constexpr):
    """norm(z) `[d]` and the reciprocal of its standard deviation."""
    z = tl.where(inside, z - tl.sum(z, axis=0) / D, 0)
    r = tl.rsqrt(tl.sum(z * z, axis=0) / D + EPS)
    return z * r, r


@triton.jit(do_not_specialize=["place"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, eta_ptr, scale_ptr, shift_ptr, tau_ptr, phase_ptr, place, o_ptr,
    w_ptr, b_ptr, open_w_ptr, open_b_ptr, new_w_ptr, new_b_ptr, new_open_w_ptr, new_open_b_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, eta_b, eta_h, tau_h, o_b, o_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr, BIAS: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    """Program (n, h). tau_ptr None: all steps 1. phase_ptr None: all sequences are at `place`. open_w_ptr None: M = 0.

    new_w_ptr None: no mini-batch is complete; new_open_w_ptr None: all are. COPIES: `new_w` is not where `w` is, and is
    written also for sequences whose mini-batch is still open.
    """
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)  # 64 bits: a token may be a slice of a long sequence, with strides as long
    features = tl.arange(0, DP)
    inside = features < D
    square = inside[:, None] & inside[None, :]
    matrix = (n * H + h) * D * D + features[:, None] * D + features[None, :]  # [in, out]
    vector = (n * H + h) * D + features
    w = tl.load(w_ptr + matrix, mask=square, other=0).to(tl.float32)
    open_w = tl.zeros([DP, DP], tl.float32)
    if open_w_ptr is not None:
        open_w = tl.load(open_w_ptr + matrix, mask=square, other=0).to(tl.float32)
    q = tl.load(q_ptr + n * q_b + h * q_h + features, mask=inside, other=0).to(tl.float32)
    k = tl.load(k_ptr + n * k_b + h * k_h + features, mask=inside, other=0).to(tl.float32)
    v = tl.load(v_ptr + n * v_b + h * v_h + features, mask=inside, other=0).to(tl.float32)
    eta = tl.load(eta_ptr + n * eta_b + h * eta_h).to(tl.float32)
    gamma = tl.load(scale_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    beta = tl.load(shift_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    if phase_ptr is not None:
        place = tl.load(phase_ptr + n).to(tl.int32)
    tau = 1.0
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + h * tau_h + place).to(tl.float32)

    z, out, read = tl.reduce((k[:, None] * w, q[:, None] * w, q[:, None] * open_w), 0, add3)
    product = tl.sum(q * k, axis=0)
    bias = tl.zeros([DP], tl.float32)
    open_b = tl.zeros([DP], tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + vector, mask=inside, other=0).to(tl.float32)
        if open_b_ptr is not None:
            open_b = tl.load(open_b_ptr + vector, mask=inside, other=0).to(tl.float32)
        product += 1

    x, r = normalize(z + bias, inside, D, EPS)
    g = gamma * (k + gamma * x + beta - v)
    grad = r * (g - tl.sum(g, axis=0) / D - x * (tl.sum(g * x, axis=0) / D))
    weighted = tl.where(inside, eta * grad, 0)
    normal, _ = normalize(out + bias + tau * (read + open_b - product * weighted), inside, D, EPS)
    tl.store(o_ptr + n * o_b + h * o_h + features, (q + gamma * normal + beta).to(o_ptr.dtype.element_ty), mask=inside)

    open_w -= k[:, None] * weighted[None, :]
    open_b -= weighted
    tl.debug_barrier()  # several threads have read a bias that one of them writes
    commits = place == SIZE - 1
    if new_w_ptr is not None:
        if commits:  # tau is then that of the last token
            w += tau * open_w
            bias += tau * open_b
            open_w = tl.zeros([DP, DP], tl.float32)
            open_b = tl.zeros([DP], tl.float32)
        if COPIES or commits:
            tl.store(new_w_ptr + matrix, w.to(new_w_ptr.dtype.element_ty), mask=square)
            if BIAS:
                tl.store(new_b_ptr + vector, bias.to(new_b_ptr.dtype.element_ty), mask=inside)
    if new_open_w_ptr is not None:
        tl.store(new_open_w_ptr + matrix, open_w.to(new_open_w_ptr.dtype.element_ty), mask=square)
        if BIAS:
            tl.store(new_open_b_ptr + vector, open_b.to(new_open_b_ptr.dtype.element_ty), mask=inside)
