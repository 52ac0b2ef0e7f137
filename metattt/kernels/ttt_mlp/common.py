# mypy: disable-error-code="no-untyped-def"
"""Device functions that the forward, backward and decode kernels of TTT-MLP share.

Everything on chip is transposed: a token is a column, so that the products with the weights have the hidden units (or
d) as their M dimension and the 16 tokens of a mini-batch as N, which fills the 64-row matrix instruction. Both layers
are held with the hidden units as rows, `w1ᵀ [f, d]` and `w2 [f, d]`: an update is then an accumulation in place,
`w1ᵀ += g1ᵀ·k`, and a tile of hidden units is a tile of rows.

Precision: all operands of matrix products have the type of q, k, v; all products accumulate in fp32; the weights, their
updates, the statistics of the norm, GELU and everything elementwise are fp32. Products of fp32 operands are three TF32
products of split operands (`PRECISION`), not IEEE ones.
"""

import triton
import triton.language as tl

# Products of fp32 operands: three TF32 products of split operands on the matrix units, with about fp32's accuracy.
# "ieee", exact ones without the matrix units, spill and take minutes to compile. It has no effect on operands of two
# bytes.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, acc):
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def dot_over_units(a, b):
    """aᵀ·b, `[tokens, tokens]`, of operands `[units, tokens]`: every warp takes 16 units, so that none holds all of
    them."""
    slices: tl.constexpr = a.shape[0] // 16
    a = tl.trans(tl.reshape(a, [slices, 16, a.shape[1]]), 0, 2, 1)
    b = tl.reshape(b, [slices, 16, b.shape[1]])
    return tl.sum(dot(a, b), 0)


@triton.jit
def gelu(z):
    """tanh-GELU: ½z(1 + tanh u) = z·σ(2u), u = √(2/π)(z + 0.044715 z³)."""
    return z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))


@triton.jit
def gelu_and_slope(z):
    s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    return z * s, s + z * s * (1.0 - s) * inner


@triton.jit
def gelu_slopes(z):
    """First and second derivative of GELU. Beyond ±16, where `bell` is 0, z is 16: z⁵ is infinite from 1e8 on, and 0
    times that no number."""
    z = tl.where(z > 16.0, 16.0, tl.where(z < -16.0, -16.0, z))
    s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    inner = 1.5957691216057308 * (1.0 + 0.134145 * z * z)  # derivative of 2u; that of `inner` is 0.42810903 z
    bell = s * (1.0 - s)
    return s + z * bell * inner, bell * (2.0 * inner + z * ((1.0 - 2.0 * s) * inner * inner + 0.42810902975834614 * z))


@triton.jit
def normalize(z, rows, D: tl.constexpr, DP: tl.constexpr):
    """x̂ and 1/√(var + ε) of every column of `z [DP, tokens]`, whose padding below row D is zero, and stays zero."""
    z -= (tl.sum(z, 0) / D)[None, :]
    if DP != D:
        z = tl.where(rows[:, None], z, 0.0)
    rstd = tl.rsqrt(tl.sum(z * z, 0) / D + 1e-6)
    return z * rstd[None, :], rstd


@triton.jit
def project(a, hat, rows, D: tl.constexpr, DP: tl.constexpr):
    """a − mean(a) − x̂·mean(a∘x̂), the Jacobian of the norm times its standard deviation (it is symmetric); and
    mean(a∘x̂)."""
    along = tl.sum(a * hat, 0) / D
    a = a - (tl.sum(a, 0) / D)[None, :] - hat * along[None, :]
    if DP != D:
        a = tl.where(rows[:, None], a, 0.0)
    return a, along


@triton.jit
def load_columns(base, stride, tokens, inside, rows_at, rows):
    """Tokens as columns, `[DP, tokens]`; zeros outside."""
    return tl.load(base + tokens[None, :] * stride + rows_at[:, None], mask=rows[:, None] & inside[None, :], other=0.0)


@triton.jit
def store_columns(base, stride, tokens, inside, rows_at, rows, x):
    tl.store(base + tokens[None, :] * stride + rows_at[:, None], x, mask=rows[:, None] & inside[None, :])


# A tile of hidden units `units` of one (sequence, head), from memory laid out as the state is: w1 [d, f], w2 [f, d].


@triton.jit
def w1_pointers(w1, units, rows_at, F: tl.constexpr):
    return w1 + rows_at[None, :] * F + units[:, None]


@triton.jit
def w2_pointers(w2, units, rows_at, D: tl.constexpr):
    return w2 + units[:, None] * D + rows_at[None, :]


@triton.jit
def load_tile(w1, w2, units, rows_at, rows, D: tl.constexpr, F: tl.constexpr):
    """w1ᵀ and w2 of a tile, `[units, DP]` each, in the type in which they are stored."""
    inside = rows[None, :]
    t1 = tl.load(w1_pointers(w1, units, rows_at, F), mask=inside, other=0.0)
    t2 = tl.load(w2_pointers(w2, units, rows_at, D), mask=inside, other=0.0)
    return t1, t2


@triton.jit
def store_tile(w1, w2, units, rows_at, rows, t1, t2, D: tl.constexpr, F: tl.constexpr):
    inside = rows[None, :]
    tl.store(w1_pointers(w1, units, rows_at, F), t1, mask=inside)
    tl.store(w2_pointers(w2, units, rows_at, D), t2, mask=inside)


# Where a program is. Sequence n of the call has segments of KEEP whole mini-batches; all kept weights have one place
# per segment, those of a sequence side by side: from n·(segments of a sequence) on, or, where documents are packed into
# one row, from m // (b·KEEP) + n on for the document that begins at token m, which is enough for any lengths without
# reading them (`slots` in `forward.py`). Segments are worked on in groups: `together` of every sequence from its
# segment `first` on, or, packed, the `together` places from `first` on.


@triton.jit
def sequence_of(n, cu_seqlens, T, PACKED: tl.constexpr):
    """Of sequence n: the row of the batch, its first token there, its number of tokens, and its first token of all."""
    if PACKED:
        start = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - tl.load(cu_seqlens + n)).to(tl.int32)
        return (n * 0).to(tl.int64), start, length, start
    return n.to(tl.int64), (n * 0).to(tl.int64), (n * 0 + T).to(tl.int32), n.to(tl.int64) * T


@triton.jit
def slot_of(n, flat, whole, B: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr):
    """Place of the first segment of sequence n among all kept weights."""
    return flat // (B * KEEP) + n if PACKED else n.to(tl.int64) * ((whole + KEEP - 1) // KEEP)


@triton.jit
def segment_of(place, cu_seqlens, N, first, together, B: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr):
    """Sequence and segment of it at a place of a group. Packed, the document is the last that begins at or before
    it."""
    if PACKED:
        slot = first + place
        n = place * 0 - 1
        for at in range(0, N, 128):
            documents = at + tl.arange(0, 128)
            starts = tl.load(cu_seqlens + documents, mask=documents < N, other=0).to(tl.int64)
            begun = (documents < N) & (starts // (B * KEEP) + documents <= slot)
            n += tl.sum(begun.to(tl.int32), 0)
        return n, slot - (tl.load(cu_seqlens + n).to(tl.int64) // (B * KEEP)).to(tl.int32) - n
    return place // together, first + place % together


@triton.jit
def group_of(n, flat, whole, first, together, B: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr):
    """Mini-batches `lo` to `hi` of sequence n that are in a group, and the place there that its first segment would
    have."""
    if PACKED:
        place = (flat // (B * KEEP)).to(tl.int32) + n - first
        lo = tl.maximum(-place, 0) * KEEP
        hi = tl.maximum(together - place, 0) * KEEP
    else:
        place = n * together - first
        lo = first * KEEP
        hi = lo + together * KEEP
    return whole * 0 + lo, tl.minimum(hi, whole), place
