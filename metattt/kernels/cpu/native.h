// What the native kernels share: vectors, small matrix products, tiles of tokens. (native_norm.h: layer norm with its transpose.)
//
// A mini-batch of B tokens of width D is a tile [B][D]; B and D are constants of the compilation (multiples of 16), so that every product
// below has its own unrolled inner loop. All arithmetic is fp32.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

constexpr int D = WIDTH, B = TOKENS;

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats per vector
constexpr int REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VL = 8;
constexpr int REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VL = 4;
constexpr int REGISTERS = 32;
#else
constexpr int VL = 4;
constexpr int REGISTERS = 16;
#endif

typedef float Vector __attribute__((vector_size(4 * VL)));
typedef int32_t Integers __attribute__((vector_size(4 * VL)));
typedef float Unaligned __attribute__((vector_size(4 * VL), aligned(4), may_alias));

static inline Vector load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
static inline void store(float* at, Vector x) { *reinterpret_cast<Unaligned*>(at) = x; }
static inline Vector splat(float x) { return x - Vector{}; }

// -- what Python passes, field by field as in native_scan.py ------------------------------------------------------------------------

struct View {  // of a tensor [batch, head, token] or [batch, head, token, D] with contiguous D; strides in floats
    float* data;
    int64_t batch, head, token;
    float* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

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

static inline float total(Vector x) {
    float sum = 0;
    for (int i = 0; i < VL; ++i) sum += x[i];
    return sum;
}

// -- matrix products ------------------------------------------------------------------------------------------------------------------

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

// -- shuffles -------------------------------------------------------------------------------------------------------------------------

template <int Offset, int... I>
static inline Vector zip(Vector a, Vector b, std::integer_sequence<int, I...>) {  // a0 b0 a1 b1 ... from element Offset on
    return __builtin_shufflevector(a, b, (Offset + I / 2 + (I % 2) * VL)...);
}
template <int Offset, int... I>
static inline Vector every_second(Vector a, Vector b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (Offset + 2 * I)...);
}
using Lanes = std::make_integer_sequence<int, VL>;

// VL x VL elements in registers.
static inline __attribute__((always_inline)) void transpose_block(Vector (&x)[VL]) {
#pragma GCC unroll 8
    for (int width = 1; width < VL; width *= 2) {
        Vector y[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL / 2; ++i) {
            y[2 * i] = zip<0>(x[i], x[i + VL / 2], Lanes{});
            y[2 * i + 1] = zip<VL / 2>(x[i], x[i + VL / 2], Lanes{});
        }
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i) x[i] = y[i];
    }
}

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

// The sums over the lanes of VL vectors, as one vector.
static inline __attribute__((always_inline)) Vector totals(Vector (&x)[VL]) {
#pragma GCC unroll 8
    for (int n = VL / 2; n > 0; n /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i)
            x[i] = every_second<0>(x[2 * i], x[2 * i + 1], Lanes{}) + every_second<1>(x[2 * i], x[2 * i + 1], Lanes{});
    return x[0];
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

static inline Vector inverse_root(Vector x) {
    Vector y;
    for (int i = 0; i < VL; ++i) y[i] = 1.0f / sqrtf(x[i]);
    return y;
}

// x becomes eˣ to about 1e-7, at least 2⁻¹²⁶ and at most 2¹²⁶: 2ⁿ 2ᶠ with x = (n + f) ln 2, |f| <= ½. N vectors, step by step together.
template <int N>
static inline __attribute__((always_inline)) void exponential(Vector (&x)[N]) {
    constexpr float round = 12582912.0f;  // 1.5 · 2²³: after adding it the low bits hold the nearest integer
    constexpr float series[] = {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f,
                                2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
    Vector n[N], p[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        x[i] *= 1.4426950408889634f;
        x[i] = x[i] < 126.0f ? x[i] : splat(126.0f);
        x[i] = x[i] > -126.0f ? x[i] : splat(-126.0f);
        n[i] = x[i] + round;
        x[i] -= n[i] - round;
        p[i] = splat(1.535336188319500e-4f);
    }
#pragma GCC unroll 8
    for (float c : series)
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) p[i] = p[i] * x[i] + c;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
        const Integers power = reinterpret_cast<Integers>(n[i]) << 23;
        x[i] = reinterpret_cast<Vector>(reinterpret_cast<Integers>(p[i]) + power);
    }
}

// -- tiles of tokens ------------------------------------------------------------------------------------------------------------------

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

// -- memory ---------------------------------------------------------------------------------------------------------------------------

// An array of T, aligned for vectors, not initialised.
template <class T>
struct Scratch {
    T* data;
    explicit Scratch(int64_t n) : data(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64))) {
        if (!data) throw std::bad_alloc();
    }
    ~Scratch() { std::free(data); }
    Scratch(const Scratch&) = delete;
    T& operator[](int64_t i) { return data[i]; }
};
