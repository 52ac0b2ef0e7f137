"""Decoding with `ttt_linear`: one token for each of many sequences, every sequence at its own place in its mini-batch.

One program per (sequence, head) holds W and the open sum M = −Σ ηkᵀG in registers. The output needs the new M, but only
as

    q M' = q M − η (q·k) G,

so that W and M are read once, M is written once, and W only when the token completes its mini-batch: 12 d² bytes per
token and head in fp32, against O(d) of everything else. The time is that of moving the state.

Precision: sums of products in fp32, whatever the types of state and inputs; nothing is rounded to a smaller type but
    what is stored.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_linear.naive import EPS
from metattt.kernels.ttt_linear.tiles import add3
from metattt.kernels.ttt_linear.tuning import decode_launch, padded


@triton.jit
def normalize(z, inside, D: tl.constexpr, EPS: tl.constexpr):
    """norm(z) `[d]` and the reciprocal of its standard deviation."""
    z = tl.where(inside, z - tl.sum(z, axis=0) / D, 0)
    r = tl.rsqrt(tl.sum(z * z, axis=0) / D + EPS)
    return z * r, r


@triton.jit
def decode_kernel(
    q_ptr, k_ptr, v_ptr, eta_ptr, w_ptr, b_ptr, open_w_ptr, open_b_ptr, scale_ptr, shift_ptr, tau_ptr, phase_ptr, o_ptr,
    q_b, q_h, k_b, k_h, v_b, v_h, eta_b, eta_h, tau_h, o_b, o_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Without bias b_ptr is None; tau_ptr None: all steps 1."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)  # (a stride over heads may be T·d)
    features = tl.arange(0, DP)
    inside = features < D
    square = inside[:, None] & inside[None, :]
    matrix = (n * H + h) * D * D + features[:, None] * D + features[None, :]  # [in, out]
    vector = (n * H + h) * D + features
    w = tl.load(w_ptr + matrix, mask=square, other=0).to(tl.float32)
    open_w = tl.load(open_w_ptr + matrix, mask=square, other=0).to(tl.float32)
    q = tl.load(q_ptr + n * q_b + h * q_h + features, mask=inside, other=0).to(tl.float32)
    k = tl.load(k_ptr + n * k_b + h * k_h + features, mask=inside, other=0).to(tl.float32)
    v = tl.load(v_ptr + n * v_b + h * v_h + features, mask=inside, other=0).to(tl.float32)
    eta = tl.load(eta_ptr + n * eta_b + h * eta_h).to(tl.float32)
    gamma = tl.load(scale_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    beta = tl.load(shift_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    phase = tl.load(phase_ptr + n).to(tl.int32)
    tau = 1.0
    tau_last = 1.0
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + h * tau_h + phase).to(tl.float32)
        tau_last = tl.load(tau_ptr + h * tau_h + SIZE - 1).to(tl.float32)

    z, out, read = tl.reduce((k[:, None] * w, q[:, None] * w, q[:, None] * open_w), 0, add3)
    product = tl.sum(q * k, axis=0)
    bias = tl.zeros([DP], tl.float32)
    open_b = tl.zeros([DP], tl.float32)
    if b_ptr is not None:
        bias = tl.load(b_ptr + vector, mask=inside, other=0).to(tl.float32)
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
    if phase == SIZE - 1:
        tl.store(w_ptr + matrix, (w + tau_last * open_w).to(w_ptr.dtype.element_ty), mask=square)
        if b_ptr is not None:
            tl.store(b_ptr + vector, (bias + tau_last * open_b).to(b_ptr.dtype.element_ty), mask=inside)
        open_w = tl.zeros([DP, DP], tl.float32)
        open_b = tl.zeros([DP], tl.float32)
    tl.store(open_w_ptr + matrix, open_w.to(open_w_ptr.dtype.element_ty), mask=square)
    if b_ptr is not None:
        tl.store(open_b_ptr + vector, open_b.to(open_b_ptr.dtype.element_ty), mask=inside)


def launch_decode(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    update_w: Tensor,
    update_b: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    phase: Tensor,
    size: int,
) -> Tensor:
    """Runs the kernel into o `[B, H, d]`; the state, the affine parameters, tau and phase are contiguous."""
    batch, heads, width = q.shape
    decode_kernel[(batch * heads,)](
        q, k, v, eta, w, b, update_w, update_b, scale, shift, tau, phase, o,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *eta.stride(), tau.stride(0) if tau is not None and len(tau) > 1 else 0,
        *o.stride()[:2],
        H=heads, D=width, DP=padded(width), SIZE=size, EPS=EPS, **decode_launch(padded(width))._asdict(),
    )  # fmt: skip
    return o
