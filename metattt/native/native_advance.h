// Tokens of an open mini-batch, one after the other, for one learner (sequence x head) after the other: what decoding
// consists of.
//
// A learner holds the weights W of its last commit and M = −Σ η_s G_s of the tokens since, both in the layout of PyTorch.
// Gradients are taken at W; token t is read with W + τ_t M, which is nowhere in memory. A kernel says how one token is
// taken and includes native_advance_walk.h. WIDTH is a constant of the compilation, the size of a mini-batch is not.

#pragma once

#include "native_vector.h"

constexpr int D = WIDTH;
static_assert(D % VL == 0 && sizeof(void*) == 8);

struct Advance {  // field by field as in native_advance.py: every one 8 bytes
    int64_t heads, count, size, phase;  // heads H; tokens n; tokens b of a mini-batch; place of the first token in it
    const int64_t* phases;  // [batch], in place of `phase`; null: the same for all sequences
    View k, v, q, eta, y;
    const float* tau;  // token steps [heads or 1, size]; null: all 1
    int64_t tau_head;
    const float *scale, *shift;  // affine of the norm, [H, D]
    const float* weights[4];     // W, every one [learners, ...]
    float* committed[4];         // where W goes, maybe the same memory; null: no mini-batch is completed
    const float* update[4];      // M; null: zero
    float* updated[4];           // where M goes, maybe the same memory; null: nobody wants it
};

struct Token {
    const float *k, *v, *q;
    float eta, tau;
    const float *scale, *shift;
    float* y;
};

// -- products of a row with a matrix ----------------------------------------------------------------------------------

constexpr int columns_at_once(int columns, int most) {
    while (columns % (most * VL)) most /= 2;
    return most;
}

// out_n = from + x_n W for N rows x_n [R] at once, W [R][C]. `from` null: zero.
template <int R, int C, int N>
static __attribute__((noinline)) void multiply(
    const float* w, const float* const (&x)[N], const float* from, float* const (&out)[N]) {
    constexpr int V = columns_at_once(C, REGISTERS / 4 / N);
    for (int c = 0; c < C; c += V * VL) {
        Vector sum[N][V];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) sum[n][i] = from ? load(from + c + i * VL) : Vector{};
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const Vector row = load(w + r * C + c + i * VL);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n) sum[n][i] += x[n][r] * row;
            }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) store(out[n] + c + i * VL, sum[n][i]);
    }
}

// out [R] = W g, for W [R][C].
template <int R, int C>
static __attribute__((noinline)) void multiply_transposed(const float* w, const float* g, float* out) {
    for (int r = 0; r < R; r += VL) {
        Vector sums[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i) sums[i] = Vector{};
        for (int c = 0; c < C; c += VL) {
            const Vector right = load(g + c);
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) sums[i] += load(w + (r + i) * C + c) * right;
        }
        store(out + r, totals(sums));
    }
}

// M [R][C] goes on to M' = M − left gᵀ, and out = from + τ x M'. A commit also writes W' = W + τ M'. One pass over memory.
template <int R, int C, bool Commit>
static __attribute__((noinline)) void learn(
    const float* m, float* to, const float* w, float* committed, float tau, const float* left, const float* g, const float* x,
    const float* from, float* out) {
    constexpr int V = columns_at_once(C, REGISTERS / 4);
    for (int c = 0; c < C; c += V * VL) {
        Vector sum[V], right[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) sum[i] = Vector{}, right[i] = load(g + c + i * VL);
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i) {
                const int64_t at = int64_t(r) * C + c + i * VL;
                const Vector next = (m ? load(m + at) : Vector{}) - left[r] * right[i];
                sum[i] += x[r] * next;
                if (to) store(to + at, next);
                if (Commit) store(committed + at, load(w + at) + tau * next);
            }
#pragma GCC unroll 8
        for (int i = 0; i < V; ++i) store(out + c + i * VL, load(from + c + i * VL) + tau * sum[i]);
    }
}

template <int R, int C>
static inline void learn(
    const float* m, float* to, const float* w, float* committed, float tau, const float* left, const float* g, const float* x,
    const float* from, float* out) {
    if (committed) learn<R, C, true>(m, to, w, committed, tau, left, g, x, from, out);
    else learn<R, C, false>(m, to, w, committed, tau, left, g, x, from, out);
}

// -- the norm ---------------------------------------------------------------------------------------------------------

// z becomes x̂ = (z − mean)·r; returns r.
static inline float normalize(float* z) {
    Vector sum = {};
    for (int j = 0; j < D; j += VL) sum += load(z + j);
    const float mean = total(sum) * (1.0f / D);
    Vector squares = {};
    for (int j = 0; j < D; j += VL) {
        const Vector centred = load(z + j) - mean;
        squares += centred * centred;
        store(z + j, centred);
    }
    const float r = 1.0f / sqrtf(total(squares) * (1.0f / D) + EPS);
    for (int j = 0; j < D; j += VL) store(z + j, load(z + j) * r);
    return r;
}

// From z = f(k): g = η ∂/∂z ½‖k + γ x̂(z) + β − v‖². z is overwritten.
static inline void inner_gradient(const Token& token, float* z, float* g) {
    const float r = normalize(z);
    Vector sum = {}, along = {};
    for (int j = 0; j < D; j += VL) {
        const Vector gamma = load(token.scale + j), hat = load(z + j);
        const Vector gap = load(token.k + j) + load(token.shift + j) - load(token.v + j), error = gamma * (gamma * hat + gap);
        store(g + j, error);
        sum += error;
        along += error * hat;
    }
    const float m1 = total(sum) * (1.0f / D), m2 = total(along) * (1.0f / D), step = token.eta * r;
    for (int j = 0; j < D; j += VL) store(g + j, step * (load(g + j) - m1 - load(z + j) * m2));
}

// From z = f(q): y = q + γ x̂(z) + β. z is overwritten.
static inline void write(const Token& token, float* z) {
    normalize(z);
    for (int j = 0; j < D; j += VL)
        store(token.y + j, load(token.q + j) + load(token.shift + j) + load(token.scale + j) * load(z + j));
}
