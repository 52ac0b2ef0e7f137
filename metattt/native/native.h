// What the kernels of whole mini-batches share: small matrix products, tiles of tokens. (native_norm.h: layer norm with
// its transpose.)
//
// A mini-batch of B tokens of width D is a tile [B][D]; B and D are constants of the compilation (multiples of 16), so that every product
// below has its own unrolled inner loop. All arithmetic is fp32.

#pragma once

#include "native_vector.h"

constexpr int D = WIDTH, B = TOKENS;

// -- what Python passes, field by field as in native_scan.py ----------------------------------------------------------

struct Call {
    int64_t heads, count, group;  // heads H; mini-batches per sequence; mini-batches per group
    View k, v, q, eta, y, dy, dk, dv, dq, deta;
    const float* tau;  // token steps [heads or 1, B]
    int64_t tau_head;
    const float *scale, *shift;  // affine of the norm, [H, D]
    const float* start[4];       // weights, every one [learners, ...]
    float* after[4];
    float* kept;  // state of a learner at the start of each group, [learners, groups, state]; null: not wanted
    const float* dafter[4];
    float* dstart[4];
    float *dscale, *dshift, *dtau;  // [learners, D or B]
    const bool* begins;             // [sequences, count]: a document begins with a mini-batch; null: none does
    const float* origin[4];         // weights that it begins with, every one [heads, ...]
    float* dorigin[4];              // [learners, ...]

    bool begin(int64_t learner, int64_t i) const { return begins && begins[learner / heads * count + i]; }
};

// x where i <= t, else 0, for the elements i = first, first + 1, ...
static inline Vector lower(Vector x, int first, int t) {
    Integers index;
    for (int i = 0; i < VL; ++i) index[i] = first + i;
    return index <= t ? x : Vector{};
}

static inline Vector upper(Vector x, int t, int first) {  // where i >= t
    Integers index;
    for (int i = 0; i < VL; ++i) index[i] = first + i;
    return index >= t ? x : Vector{};
}

// -- matrix products --------------------------------------------------------------------------------------------------

template <int Row, int Col>
struct Matrix {  // element (i, j) at data[i * Row + j * Col]
    float* data;
};
template <int Row>
static inline Matrix<Row, 1> rows(const float* data) {
    return {const_cast<float*>(data)};
}
template <int Row>
static inline Matrix<1, Row> columns(const float* data) {  // the transpose of rows<Row>(data)
    return {const_cast<float*>(data)};
}
struct Zero {};
struct Column {  // element (i, j) at data[i]
    const float* data;
};

enum Sign { PLUS, MINUS };
enum Shape { FULL, LOWER, UPPER };  // of the left operand

// R x V·VL elements of C = From ± A B, in registers: elements of A are broadcast, B is read in vectors.
template <int R, int V, Sign S, class From, int CR, int FR, int AR, int AC, int BR>
static inline __attribute__((always_inline)) void block(float* c, const float* from, const float* a, const float* b, int first, int last) {
    Vector sum[R][V];
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            if (std::is_same_v<From, Zero>) sum[r][v] = Vector{};
            else if (std::is_same_v<From, Column>) sum[r][v] = splat(from[r]);
            else sum[r][v] = load(from + r * FR + v * VL);
        }
#pragma GCC unroll 1
    for (int k = first; k < last; ++k) {
        Vector right[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) right[v] = load(b + k * BR + v * VL);
#pragma GCC unroll 32
        for (int r = 0; r < R; ++r) {
            const Vector left = splat(a[r * AR + k * AC]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                if (S == PLUS) sum[r][v] += left * right[v];
                else sum[r][v] -= left * right[v];
            }
        }
    }
#pragma GCC unroll 32
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * CR + v * VL, sum[r][v]);
}

template <int Row>
constexpr int row_of(Matrix<Row, 1>) {
    return Row;
}
constexpr int row_of(Zero) { return 0; }
constexpr int row_of(Column) { return 0; }

// C = From ± A B for C [M][N], A [M][K]. A triangular A is read up to, or from, its diagonal.
template <int M, int N, int K, Sign S = PLUS, Shape P = FULL, class From, int CR, int AR, int AC, int BR>
static __attribute__((noinline)) void product(Matrix<CR, 1> c, From from, Matrix<AR, AC> a, Matrix<BR, 1> b) {
    constexpr int FR = row_of(From{});
    constexpr int V = N % (2 * VL) == 0 ? 2 : 1;
    constexpr int most = REGISTERS == 32 ? 16 / V : 8 / V;
    constexpr int R = M % most == 0 ? most : 4;
    static_assert(M % R == 0 && N % (V * VL) == 0);
    for (int n = 0; n < N; n += V * VL)
        for (int m = 0; m < M; m += R) {
            const int first = P == UPPER ? m : 0, last = P == LOWER ? m + R : K;
            const float* start = nullptr;
            if constexpr (std::is_same_v<From, Column>) start = from.data + m;
            else if constexpr (!std::is_same_v<From, Zero>) start = from.data + m * FR + n;
            block<R, V, S, From, CR, FR, AR, AC, BR>(c.data + m * CR + n, start, a.data + m * AR, b.data + n, first, last);
        }
}

// -- transposes, sums of rows -----------------------------------------------------------------------------------------

// to [C][R] = (from [R][C])ᵀ
template <int R, int C, int ToRow, int FromRow>
static __attribute__((noinline)) void transpose(Matrix<ToRow, 1> to, Matrix<FromRow, 1> from) {
    for (int r = 0; r < R; r += VL)
        for (int c = 0; c < C; c += VL) {
            Vector x[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) x[i] = load(from.data + (r + i) * FromRow + c);
            transpose_block(x);
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) store(to.data + (c + i) * ToRow + r, x[i]);
        }
}

// to = from − x factors for x [R][C], or from + the sums of its rows if there are no factors.
template <int R, int C>
static inline void add_row_sums(float* to, const float* from, const float* x, const float* factors) {
    for (int r = 0; r < R; r += VL) {
        Vector sums[VL];
        for (int i = 0; i < VL; ++i) {
            Vector sum = {};
            for (int c = 0; c < C; c += VL) sum += factors ? -load(factors + c) * load(x + (r + i) * C + c) : load(x + (r + i) * C + c);
            sums[i] = sum;
        }
        store(to + r, BIAS ? load(from + r) + totals(sums) : load(from + r));
    }
}

// -- tiles of tokens --------------------------------------------------------------------------------------------------

static inline void load_tile(float* tile, const View& view, int64_t batch, int64_t head, int64_t first) {
    const float* from = view.at(batch, head, first);
    for (int t = 0; t < B; ++t)
        for (int j = 0; j < D; j += VL) store(tile + t * D + j, load(from + t * view.token + j));
}

// What goes to the rows of the view is tile [B][D] + (part [D][Row])ᵀ.
template <int Row>
static __attribute__((noinline)) void add_transposed_tile(
    const View& view, int64_t batch, int64_t head, int64_t first, const float* tile, const float* part) {
    float* to = view.at(batch, head, first);
    for (int t = 0; t < B; t += VL)
        for (int j = 0; j < D; j += VL) {
            Vector x[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) x[i] = load(part + (j + i) * Row + t);
            transpose_block(x);
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) store(to + (t + i) * view.token + j, x[i] + load(tile + (t + i) * D + j));
        }
}

// Writes tile + other (null: nothing) to the rows of the view.
static inline void add_tile(const View& view, int64_t batch, int64_t head, int64_t first, const float* tile, const float* other) {
    float* to = view.at(batch, head, first);
    for (int t = 0; t < B; ++t)
        for (int j = 0; j < D; j += VL) {
            const Vector x = load(tile + t * D + j);
            store(to + t * view.token + j, other ? x + load(other + t * D + j) : x);
        }
}
