"""Forward pass of `ttt_linear`: one program per (sequence, head) walks the mini-batches with the fast weights in
registers.

Everything is transposed: features are rows of a tile, tokens are columns. With b = 16 tokens a product `x @ W` would
fill a quarter of the 64 rows of Hopper's matrix instruction; `Wᵀ xᵀ` fills them, and the carried S = Wᵀ `[out, in]` is
at once the accumulator of its update and, rounded, the left operand of the next product, so it never leaves the
registers.

S is kept centred over its output features. LN does not see the mean, and G, hence every update, has mean 0: the mean of
W0 is set aside at the start and added to what is stored. So LN needs no mean, and all its sums over features come from
one pass over Z:
with a = γ(k − v + β), h = γ², x = z·r the gradient of the inner loss with respect to x is a + hx, and

    mean z², mean hz, mean az, mean hz²   give   r, m1 = mean(a + hx) and m2 = mean((a + hx) x),   G = r (a + hx − m1 −
    m2 x).

Precision: S, Z, G and all statistics are fp32. The operands of every product (S, k, q, ηG, the mixing matrix) are
    rounded to the
type of the inputs; products accumulate in fp32; fp32 inputs are multiplied as `tuning.FP32_PRODUCTS` says, by default
in IEEE fp32.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from metattt.kernels.ttt_linear import tuning
from metattt.kernels.ttt_linear.naive import EPS
from metattt.kernels.ttt_linear.tuning import padded


@triton.jit
def add3(a1, a2, a3, b1, b2, b3):
    return a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add5(a1, a2, a3, a4, a5, b1, b2, b3, b4, b5):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def inner_gradient(z, a, h, D: tl.constexpr, EPS: tl.constexpr):
    """For Z and a `[d, b]`, h `[d, 1]`: x, r, g = a + hx, and per token m1 = mean g, m2 = mean gx, mean hx, mean
    hx²."""
    hz = h * z
    zz, hz, az, hzz, a1 = tl.reduce((z * z, hz, a * z, hz * z, a), 0, add5)  # one exchange between the warps
    r = tl.rsqrt(zz / D + EPS)
    x = z * r[None, :]
    hx = hz * r / D
    hxx = hzz * r * r / D
    return x, r, a + h * x, a1 / D + hx, az * r / D + hxx, hx, hxx


@triton.jit
def load_tile(pointer, at, stride, features, mask):
    """`[tokens, features]` of the tokens `at`."""
    return tl.load(pointer + at[:, None] * stride + features[None, :], mask=mask, other=0)


@triton.jit
def store_tile(pointer, at, stride, features, mask, x):
    """The opposite of `load_tile`, in the type of the memory."""
    tl.store(pointer + at[:, None] * stride + features[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def first_column(x, columns):
    """x[:, 0] of a tile whose columns are numbered `columns`."""
    return tl.sum(tl.where(columns[None, :] == 0, x, 0), axis=1)


@triton.jit
def sequence_bounds(cu_seqlens, n, T, SIZE: tl.constexpr, SEGMENT: tl.constexpr):
    """First token and length of sequence n, its row of the batch, and the first of its slots for stored fast weights.

    A sequence of L tokens has at most L // (SIZE·SEGMENT) + 1 slots, so that the slots of all sequences are disjoint.
    """
    if cu_seqlens is None:
        row = n
        start = n * 0
        length = T
        slot = n * T // (SIZE * SEGMENT) + n
    else:
        row = n * 0
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - start).to(tl.int32)
        slot = start // (SIZE * SEGMENT) + n
    return row, start, length, slot


@triton.jit(do_not_specialize=["T"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, eta_ptr, w_ptr, b_ptr, scale_ptr, shift_ptr, tau_ptr, cu_seqlens,
    o_ptr, commit_ptr, anchor_ptr, w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr,
    T,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, eta_b, eta_t, eta_h, w_n, b_n, tau_h, o_b, o_t, o_h, commit_b, commit_t, commit_h,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, SEGMENT: tl.constexpr,
    EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (n, h). Pointers that are None switch their part off: bias, tau, packing, what the backward pass needs,
    final state."""
    n = (tl.program_id(0) // H).to(tl.int64)
    h = tl.program_id(0) % H
    row, start, length, slot = sequence_bounds(cu_seqlens, n, T, SIZE, SEGMENT)
    chunks = tl.cdiv(length, SIZE)

    features = tl.arange(0, DP)
    tokens = tl.arange(0, COLUMNS)
    inside = features < D
    square = inside[:, None] & inside[None, :]
    q_ptr += row * q_b + start * q_t + h * q_h
    k_ptr += row * k_b + start * k_t + h * k_h
    v_ptr += row * v_b + start * v_t + h * v_h
    o_ptr += row * o_b + start * o_t + h * o_h
    eta_ptr += row * eta_b + start * eta_t + h * eta_h
    if commit_ptr is not None:
        commit_ptr += row * commit_b + start * commit_t + h * commit_h
        anchor_ptr += (slot * H + h) * (D + 1) * D

    gamma = tl.load(scale_ptr + h * D + features, mask=inside, other=0).to(tl.float32)[:, None]
    beta = tl.load(shift_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    square_gamma = gamma * gamma
    transposed = features[:, None] + features[None, :] * D  # W[in, out] as S[out, in]
    s = tl.load(w_ptr + n * w_n + h * D * D + transposed, mask=square, other=0).to(tl.float32)
    s_mean = tl.sum(s, axis=0)[None, :] / D
    s = tl.where(square, s - s_mean, 0)
    bias = tl.zeros(
        [DP, COLUMNS], tl.float32
    )  # of equal columns: as such a product updates it, and Z and Z̄ accumulate upon it
    bias_mean = 0.0
    if b_ptr is not None:
        bias0 = tl.load(b_ptr + n * b_n + h * D + features, mask=inside, other=0).to(tl.float32)
        bias_mean = tl.sum(bias0, axis=0) / D
        bias += tl.where(inside, bias0 - bias_mean, 0)[:, None]

    causal = tokens[:, None] <= tokens[None, :]  # [s, t]
    tau = tl.full([COLUMNS], 1.0, tl.float32)
    tau_last = 1.0
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + h * tau_h + tokens, mask=tokens < SIZE, other=0).to(tl.float32)
        tau_last = tl.load(tau_ptr + h * tau_h + SIZE - 1).to(tl.float32)
    mixing = tl.where(causal, tau[None, :], 0.0)
    operand: tl.constexpr = k_ptr.dtype.element_ty
    ones = tl.full([COLUMNS, COLUMNS], 1.0, operand)
    weighted = tl.zeros([DP, COLUMNS], tl.float32)  # −ηG of the last mini-batch

    # Each mini-batch is loaded into registers while the one before it is computed.
    here = (tokens < SIZE) & (tokens < length)
    tile = here[:, None] & inside[None, :]
    at = tokens.to(tl.int64)
    k = load_tile(k_ptr, at, k_t, features, tile)
    q = load_tile(q_ptr, at, q_t, features, tile)
    v = load_tile(v_ptr, at, v_t, features, tile)
    eta = tl.load(eta_ptr + at * eta_t, mask=here, other=0)

    for segment in range(tl.cdiv(chunks, SEGMENT)):
        for chunk in tl.range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, chunks), num_stages=1):
            at = (chunk * SIZE + tokens).to(tl.int64)
            tile = ((tokens < SIZE) & (at < length))[:, None] & inside[None, :]
            next_at = at + SIZE
            next_here = (tokens < SIZE) & (next_at < length)
            next_tile = next_here[:, None] & inside[None, :]
            next_k = load_tile(k_ptr, next_at, k_t, features, next_tile)
            next_q = load_tile(q_ptr, next_at, q_t, features, next_tile)
            next_v = load_tile(v_ptr, next_at, v_t, features, next_tile)
            next_eta = tl.load(eta_ptr + next_at * eta_t, mask=next_here, other=0)

            s_operand = s.to(operand)
            z = tl.dot(s_operand, tl.trans(k), acc=bias, input_precision=PRECISION)
            a = gamma * tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
            x, r, g, m1, m2, _, _ = inner_gradient(z, a, square_gamma, D, EPS)
            weighted = (-eta * r)[None, :] * (g - m1[None, :] - x * m2[None, :])
            if D < DP:
                weighted = tl.where(inside[:, None], weighted, 0)
            commit = (tl.where((chunk + 1) * SIZE <= length, tau_last, 0.0) * weighted).to(operand)

            products = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [s, t]
            if b_ptr is not None:
                products += 1
            z = tl.dot(s_operand, tl.trans(q), acc=bias, input_precision=PRECISION)
            z = tl.dot(weighted.to(operand), (products * mixing).to(operand), acc=z, input_precision=PRECISION)
            s = tl.dot(commit, k, acc=s, input_precision=PRECISION)
            if b_ptr is not None:
                bias = tl.dot(commit, ones, acc=bias, input_precision=PRECISION)

            normal = z * tl.rsqrt(tl.sum(z * z, axis=0) / D + EPS)[None, :]
            out = q.to(tl.float32) + tl.trans(gamma * normal) + beta[None, :]
            store_tile(o_ptr, at, o_t, features, tile, out)
            if commit_ptr is not None:
                store_tile(commit_ptr, at, commit_t, features, tile, tl.trans(commit))
            k, q, v, eta = next_k, next_q, next_v, next_eta
        if commit_ptr is not None:
            tl.store(anchor_ptr + features[:, None] * D + features[None, :], s, mask=square)
            tl.store(anchor_ptr + D * D + features, first_column(bias, tokens), mask=inside)
            anchor_ptr += H * (D + 1) * D

    if w_end_ptr is not None:
        tl.store(w_end_ptr + (n * H + h) * D * D + transposed, s + s_mean, mask=square)
        tl.store(b_end_ptr + (n * H + h) * D + features, first_column(bias, tokens) + bias_mean, mask=inside)
        update = tl.zeros([DP, DP], tl.float32)
        update_bias = tl.zeros([DP], tl.float32)
        if length % SIZE > 0:
            at = ((chunks - 1) * SIZE + tokens).to(tl.int64)
            k = load_tile(k_ptr, at, k_t, features, (at < length)[:, None] & inside[None, :])
            update = tl.dot(weighted.to(operand), k, input_precision=PRECISION)
            if b_ptr is not None:
                update_bias = tl.sum(weighted, axis=1)
        tl.store(open_w_ptr + (n * H + h) * D * D + transposed, update, mask=square)
        tl.store(open_b_ptr + (n * H + h) * D + features, update_bias, mask=inside)


class Forward(NamedTuple):
    """What the kernel writes. Tensors that were not asked for are empty.

    Attributes:
        o: like q.
        w, b, update_w, update_b: final state in fp32, `[N, H, d, d]` and `[N, H, d]`.
        commits: `[B, T, H, d]` like k: −τ_{b−1} η G as it was rounded for the update of W (0 in an open mini-batch).
        anchors: `[slots, H, d + 1, d]` fp32: S and below it the bias, centred, after every `SEGMENT` mini-batches and
            at the end.
    """

    o: Tensor
    w: Tensor
    b: Tensor
    update_w: Tensor
    update_b: Tensor
    commits: Tensor
    anchors: Tensor


def slots(batch: int, tokens: int, sequences: int, size: int) -> int:
    """Number of stored fast weights: see `sequence_bounds`."""
    return batch * tokens // (size * tuning.SEGMENT) + sequences


def allocate(q: Tensor, k: Tensor, sequences: int, size: int, save: bool, final: bool) -> Forward:
    """Uninitialized outputs: shapes, types and strides in one place, for the launch and for fake tensors."""
    batch, tokens, heads, width = q.shape
    states = sequences if final else 0
    matrices = [q.new_empty(states, heads, width, width, dtype=torch.float32) for _ in range(2)]
    vectors = [q.new_empty(states, heads, width, dtype=torch.float32) for _ in range(2)]
    return Forward(
        torch.empty_like(q),
        w=matrices[0],
        b=vectors[0],
        update_w=matrices[1],
        update_b=vectors[1],
        commits=torch.empty_like(k) if save else k.new_empty(0),
        anchors=q.new_empty(
            slots(batch, tokens, sequences, size) if save else 0, heads, width + 1, width, dtype=torch.float32
        ),
    )


def launch_forward(
    out: Forward,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eta: Tensor,
    w: Tensor,
    b: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    tau: Tensor | None,
    cu_seqlens: Tensor | None,
    size: int,
) -> Forward:
    """Runs the kernel into `out` of `allocate`, whose empty tensors say what not to write.

    w is `[H, d, d]` for all sequences or `[N, H, d, d]`, b likewise; all weights and tau are contiguous.
    """
    batch, tokens, heads, width = q.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    save, final = len(out.anchors) > 0, len(out.w) > 0
    forward_kernel[(sequences * heads,)](
        q, k, v, eta, w, b, scale, shift, tau, cu_seqlens,
        out.o, *((out.commits, out.anchors) if save else (None, None)),
        *((out.w, out.b, out.update_w, out.update_b) if final else (None, None, None, None)),
        tokens,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *eta.stride(), w.stride(0) if w.ndim == 4 else 0,
        b.stride(0) if b is not None and b.ndim == 3 else 0, tau.stride(0) if tau is not None and len(tau) > 1 else 0,
        *out.o.stride()[:3], *(out.commits.stride()[:3] if save else (0, 0, 0)),
        H=heads, D=width, DP=padded(width), SIZE=size, COLUMNS=padded(size),
        SEGMENT=tuning.SEGMENT, EPS=EPS, PRECISION=tuning.FP32_PRODUCTS,
        **tuning.forward_launch(padded(width), padded(size))._asdict(),
    )  # fmt: skip
    return out
