"""What the kernels of `ttt_linear` share: one mini-batch forward, and the two steps back through it.

Everything is transposed: features are rows of a tile, tokens are columns. With b = 16 tokens a product `x @ W` would
fill a quarter of the 64 rows of Hopper's matrix instruction; `Wᵀ xᵀ` fills them, and the carried S = Wᵀ `[out, in]` is
at once the accumulator of its update and, rounded, the left operand of the next product, so it never leaves the
registers.

S is centred over its output features at the start: LN does not see the mean, and G, hence every update, has mean 0. The
mean of W0 is set aside and added to what is stored. Rounded updates leave a small mean m in Z, which LN must subtract:
x that has it gives G a mean, and m grows with every mini-batch (in 16 bits to the size of Z within 500 tokens). As m is
small, all sums over features come from one pass over Z without cancelling:
with a = γ(k − v + β), h = γ², x = (z − m)·r the gradient of the inner loss with respect to x is g = a + hx, and

    m, mean z², mean hz, mean az, mean hz²   give   r, m1 = mean g and m2 = mean gx,   G = r (g − m1 − m2 x).

U = −ηG is rounded to the type of the inputs once; the update of S and the mixing of outputs use that, and it is all
that the backward pass needs of G: the update of S, τ_{b−1} U k, is undone with the operand it was made of.

Precision: S, Z, G and all statistics are fp32. The operands of every product (S, k, q, U, the mixing matrix, and the
cotangents in their places) are rounded to the type of the inputs; products accumulate in fp32; fp32 inputs are
multiplied as `tuning.FP32_PRODUCTS` says.
"""

# mypy: disable-error-code="no-untyped-def"
# (arguments of a kernel are pointers, numbers or None; Triton types them)

import triton
import triton.language as tl


@triton.jit
def add2(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def add3(a1, a2, a3, b1, b2, b3):
    return a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add4(a1, a2, a3, a4, b1, b2, b3, b4):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def add5(a1, a2, a3, a4, a5, b1, b2, b3, b4, b5):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def add6(a1, a2, a3, a4, a5, a6, b1, b2, b3, b4, b5, b6):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6


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


@triton.jit
def piece_bounds(piece, length, SIZE: tl.constexpr, SEGMENT: tl.constexpr):
    """Mini-batches [first, stop) of a piece of the backward pass: a segment, or the open mini-batch after them."""
    whole = length // SIZE
    segments = tl.cdiv(whole, SEGMENT)
    is_open = piece == segments
    first = tl.where(is_open, whole, piece * SEGMENT)
    stop = tl.where(is_open, tl.cdiv(length, SIZE), tl.minimum(piece * SEGMENT + SEGMENT, whole))
    return first, stop, is_open


@triton.jit
def affine(scale_ptr, shift_ptr, h, features, inside, D: tl.constexpr):
    """γ `[d, 1]`, β `[d]` of a head, γ² and its mean."""
    gamma = tl.load(scale_ptr + h * D + features, mask=inside, other=0).to(tl.float32)[:, None]
    square = gamma * gamma
    mean_square = tl.sum(tl.sum(square, axis=1), axis=0) / D
    beta = tl.load(shift_ptr + h * D + features, mask=inside, other=0).to(tl.float32)
    return gamma, beta, square, mean_square


@triton.jit
def token_steps(tau_ptr, h, tau_h, tokens, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """τ `[b]` and τ_{b−1}."""
    tau = tl.full([COLUMNS], 1.0, tl.float32)
    tau_last = 1.0
    if tau_ptr is not None:
        tau = tl.load(tau_ptr + h * tau_h + tokens, mask=tokens < SIZE, other=0).to(tl.float32)
        tau_last = tl.load(tau_ptr + h * tau_h + SIZE - 1).to(tl.float32)
    return tau, tau_last


@triton.jit
def load_anchor(pointer, features, mask, D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr):
    """A stored S, or its cotangent, and below it the bias as a tile of equal columns; zero where `mask` is not."""
    inside = features < tl.where(mask, D, 0)
    square = inside[:, None] & inside[None, :]
    s = tl.load(pointer + features[:, None] * D + features[None, :], mask=square, other=0)
    # As a tile of equal columns a product updates the bias, and Z and Z̄ accumulate upon it.
    bias = tl.load(pointer + D * D + features, mask=inside, other=0)[:, None] + tl.zeros([DP, COLUMNS], tl.float32)
    return s, bias


@triton.jit
def store_anchor(pointer, s, bias, features, tokens, inside, D: tl.constexpr):
    """The opposite of `load_anchor`."""
    square = inside[:, None] & inside[None, :]
    tl.store(pointer + features[:, None] * D + features[None, :], s, mask=square)
    tl.store(pointer + D * D + features, first_column(bias, tokens), mask=inside)


@triton.jit
def initial_state(
    w_ptr, b_ptr, n, h, w_n, b_n, features, inside, D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr
):
    """S of W0, centred, its mean over output features `[1, d]`, and likewise the bias, as a tile of equal columns."""
    square = inside[:, None] & inside[None, :]
    transposed = features[:, None] + features[None, :] * D  # W[in, out] as S[out, in]
    s = tl.load(w_ptr + n * w_n + h * D * D + transposed, mask=square, other=0).to(tl.float32)
    s_mean = tl.sum(s, axis=0)[None, :] / D
    s = tl.where(square, s - s_mean, 0)
    bias = tl.zeros([DP, COLUMNS], tl.float32)
    bias_mean = 0.0
    if b_ptr is not None:
        bias0 = tl.load(b_ptr + n * b_n + h * D + features, mask=inside, other=0).to(tl.float32)
        bias_mean = tl.sum(bias0, axis=0) / D
        bias += tl.where(inside, bias0 - bias_mean, 0)[:, None]
    return s, s_mean, bias, bias_mean


@triton.jit
def final_state(
    w_end_ptr, b_end_ptr, open_w_ptr, open_b_ptr, k_ptr, k_t, s, s_mean, bias, bias_mean, weighted,
    n, h, length, features, tokens, inside,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the weights at the end, and the open sum of the tokens since: that of the last mini-batch's U."""
    square = inside[:, None] & inside[None, :]
    state = (n * H + h) * D * D + features[:, None] + features[None, :] * D
    vector = (n * H + h) * D + features
    tl.store(w_end_ptr + state, s + s_mean, mask=square)
    tl.store(b_end_ptr + vector, first_column(bias, tokens) + bias_mean, mask=inside)
    update = tl.zeros([DP, DP], tl.float32)
    update_bias = tl.zeros([DP], tl.float32)
    if length % SIZE > 0:
        at = (length // SIZE * SIZE + tokens).to(tl.int64)
        k = load_tile(k_ptr, at, k_t, features, (at < length)[:, None] & inside[None, :])
        update = tl.dot(weighted, k, input_precision=PRECISION)
        if BIAS:
            update_bias = tl.sum(weighted.to(tl.float32), axis=1)
    tl.store(open_w_ptr + state, update, mask=square)
    tl.store(open_b_ptr + vector, update_bias, mask=inside)


@triton.jit
def inner_gradient(z, a, h, mean_h, D: tl.constexpr, EPS: tl.constexpr):
    """For Z and a `[d, b]`, h `[d, 1]`: x, r, g = a + hx, and per token m1 = mean g, m2 = mean gx, mean hx, mean
    hx²."""
    hz = h * z
    z1, zz, hz, az, hzz, a1 = tl.reduce((z, z * z, hz, a * z, hz * z, a), 0, add6)  # one exchange between the warps
    m = z1 / D
    r = tl.rsqrt(zz / D - m * m + EPS)
    x = (z - m[None, :]) * r[None, :]
    hx = (hz / D - m * mean_h) * r
    hxx = ((hzz - 2 * m * hz) / D + m * m * mean_h) * r * r
    return x, r, a + h * x, a1 / D + hx, (az - m * a1) * r / D + hxx, hx, hxx


@triton.jit
def learn(
    s, bias, k, v, eta, gamma, beta, square_gamma, mean_square_gamma, inside,
    D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U = −ηG `[d, b]` of a mini-batch; `s` is rounded."""
    z = tl.dot(s, tl.trans(k), acc=bias, input_precision=PRECISION)
    a = gamma * tl.trans(k.to(tl.float32) - v.to(tl.float32) + beta[None, :])
    x, r, g, m1, m2, _, _ = inner_gradient(z, a, square_gamma, mean_square_gamma, D, EPS)
    weighted = (-eta * r)[None, :] * (g - m1[None, :] - x * m2[None, :])
    if D < DP:
        weighted = tl.where(inside[:, None], weighted, 0)
    return weighted.to(k.dtype)


@triton.jit
def update(s, bias, weighted, step, k, COLUMNS: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """S and the bias after `step` times the sum of a mini-batch's gradients; with −step, those before."""
    commit = (step * weighted.to(tl.float32)).to(k.dtype)
    s = tl.dot(commit, k, acc=s, input_precision=PRECISION)
    if BIAS:
        bias = tl.dot(commit, tl.full([COLUMNS, COLUMNS], 1.0, k.dtype), acc=bias, input_precision=PRECISION)
    return s, bias


@triton.jit
def read(s, bias, q, k, weighted, tau, tokens, BIAS: tl.constexpr, PRECISION: tl.constexpr):
    """Z̄ `[d, b]` of the queries, the products of keys and queries `[s, t]`, and those as they mix U."""
    products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if BIAS:
        products += 1
    products = tl.where(tokens[:, None] <= tokens[None, :], products, 0)
    mixing = (products * tau[None, :]).to(k.dtype)
    z = tl.dot(s, tl.trans(q), acc=bias, input_precision=PRECISION)
    return tl.dot(weighted, mixing, acc=z, input_precision=PRECISION), products, mixing


@triton.jit
def output(z, q, gamma, beta, D: tl.constexpr, EPS: tl.constexpr):
    """o = q + γ norm(z̄) + β `[b, d]`."""
    z1, zz = tl.reduce((z, z * z), 0, add2)
    m = z1 / D
    normal = (z - m[None, :]) * tl.rsqrt(zz / D - m * m + EPS)[None, :]
    return q.to(tl.float32) + tl.trans(gamma * normal) + beta[None, :]


@triton.jit
def through_output(z, d_out, gamma, inside, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """dZ̄ from the cotangent of o `[d, b]`, and norm(z̄)."""
    d_normal = gamma * d_out
    z1, zz, d1, dz1 = tl.reduce((z, z * z, d_normal, d_normal * z), 0, add4)
    m = z1 / D
    r = tl.rsqrt(zz / D - m * m + EPS)
    normal = (z - m[None, :]) * r[None, :]
    d_z = r[None, :] * (d_normal - (d1 / D)[None, :] - normal * ((dz1 - m * d1) * r / D)[None, :])
    if D < DP:
        d_z = tl.where(inside[:, None], d_z, 0)
    return d_z, normal


@triton.jit
def through_gradient(
    y, x, r, a, m1, m2, hx, hxx, eta, square_gamma, mean_square_gamma, inside, D: tl.constexpr, DP: tl.constexpr
):
    """From y = ∂L/∂(ηG) `[d, b]`: dZ, dη, and ∂L/∂g, where g = a + γ²x. `backward.py` has the derivation."""
    hy = square_gamma * y
    y1, yx, ya, hy, hyx = tl.reduce((y, y * x, y * a, hy, hy * x), 0, add5)
    d_eta = r * (ya + hyx - m1 * y1 - m2 * yx)  # y·G
    y1 /= D
    yx /= D
    scaled = r * eta
    d_g = scaled[None, :] * (y - y1[None, :] - x * yx[None, :])
    d_x = square_gamma * d_g - scaled[None, :] * (y * m2[None, :] + (a + square_gamma * x) * yx[None, :])
    dx1 = scaled * (hy / D - y1 * (mean_square_gamma + m2) - yx * (hx + m1))
    dxx = scaled * (hyx / D - y1 * hx - yx * (hxx + 2 * m2)) + eta * d_eta / D
    d_z = r[None, :] * (d_x - dx1[None, :] - x * dxx[None, :])
    if D < DP:
        d_z = tl.where(inside[:, None], d_z, 0)
    return d_z, d_eta, d_g


@triton.jit
def end_cotangents(
    d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, index, is_open, features, inside,
    D: tl.constexpr, DP: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dS, and that of the bias as a tile of equal columns, after the last mini-batch of sequence and head `index`.
    Tokens of an open one see the cotangent of the open sum in place of that of the weights."""
    d_s = tl.zeros([DP, DP], tl.float32)
    d_bias = tl.zeros([DP, COLUMNS], tl.float32)
    if d_w_end_ptr is not None:
        square = inside[:, None] & inside[None, :]
        state = index * D * D + features[:, None] + features[None, :] * D
        vector = index * D + features
        if is_open:
            d_s = tl.load(d_open_w_ptr + state, mask=square, other=0)
            if BIAS:
                d_bias += tl.load(d_open_b_ptr + vector, mask=inside, other=0)[:, None]
        else:
            d_s = tl.load(d_w_end_ptr + state, mask=square, other=0)
            if BIAS:
                d_bias += tl.load(d_b_end_ptr + vector, mask=inside, other=0)[:, None]
    return d_s, d_bias


@triton.jit
def open_cotangents(
    d_s, d_bias, d_w_end_ptr, d_b_end_ptr, d_open_w_ptr, d_open_b_ptr, index, features, inside,
    D: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dS before an open mini-batch, which began with the cotangent of the open sum."""
    square = inside[:, None] & inside[None, :]
    state = index * D * D + features[:, None] + features[None, :] * D
    d_s += tl.load(d_w_end_ptr + state, mask=square, other=0) - tl.load(d_open_w_ptr + state, mask=square, other=0)
    if BIAS:
        vector = index * D + features
        d_bias += (
            tl.load(d_b_end_ptr + vector, mask=inside, other=0) - tl.load(d_open_b_ptr + vector, mask=inside, other=0)
        )[:, None]
    return d_s, d_bias


@triton.jit
def through_products(q, k, d_z, weighted, tau, tokens, PRECISION: tl.constexpr):
    """Cotangents `[s, t]` of the mixing matrix, and of the products of keys and queries, rounded, from dZ̄."""
    d_mixing = tl.dot(tl.trans(weighted), d_z, input_precision=PRECISION)
    d_products = tl.where(tokens[:, None] <= tokens[None, :], d_mixing * tau[None, :], 0)
    return d_mixing, d_products.to(k.dtype)
