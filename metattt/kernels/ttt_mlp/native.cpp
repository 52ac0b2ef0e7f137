// TTT-MLP on the CPU: f(x) = x + LN(gelu(xW₁ + b₁)W₂ + b₂), forward and backward pass of whole mini-batches, one learner
// (sequence x head) after the other with its weights in the cache. Constants of the compilation: WIDTH, HIDDEN, TOKENS per mini-batch,
// BIAS 0 or 1.
//
// Per mini-batch, with mix_ts = τ_t η_s for s <= t and the weights before it:
//     z₁ = kW₁ + b₁,   x = gelu(z₁),   z₂ = xW₂ + b₂,   g₂ = ∂ℓ/∂z₂,   e = g₂W₂ᵀ,   g₁ = e ∘ gelu'(z₁)
//     z̄₁_t = q_t W₁ + b₁ − Σ_s mix_ts (q_t·k_s + 1) g₁_s,   x̄ = gelu(z̄₁),   z̄₂_t = x̄_t W₂ + b₂ − Σ_s mix_ts (x̄_t·x_s + 1) g₂_s
//     y = q + LN(z̄₂),   W₁ ← W₁ − Σ_s mix_Bs k_s g₁_sᵀ,   W₂ ← W₂ − Σ_s mix_Bs x_s g₂_sᵀ.
//
// Tensors of width D are tiles [B][D] with tokens as rows, except where a name ends in T; those of the hidden layer are [F][B], features as
// rows, and W₁ is kept transposed: so no tensor of the hidden layer is ever transposed, and both weights are walked in blocks of hidden
// features that stay in the first cache while everything is done with them.

#include "native_norm.h"

namespace {

constexpr int F = HIDDEN;
constexpr int BLOCK = F % 64 ? F % 32 ? 16 : 32 : 64;  // hidden features at a time

struct State {
    float w1T[F][D];
    float w2[F][D];
    float b1[F];
    float b2[D];
};

// What the forward pass of a mini-batch computes; the backward pass reads it.
struct Step {
    float kq[2 * B][D];  // keys, then queries
    float kqT[D][2 * B];
    InnerGradient inner;  // of z₂
    float g2T[D][B];
    float x[F][3 * B];            // x; z̄₁, then its gradient's cotangent de; x̄: so that backwards they are the left factors of dW₂
    float slope[F][B], g1[F][B];  // gelu'(z₁)
    float curve[F][2 * B];        // e gelu''(z₁), gelu'(z̄₁); backwards dz₁ and dz̄₁ take their place, the left factors of dW₁
    float eta[B];
    float dots1T[B][B], mixed1T[B][B];  // [s][t]: q_t·k_s + 1, times mix_ts
    float dots2T[B][B], mixed2T[B][B];  // [s][t]: x̄_t·x_s + 1
    float read_hat[B][D];               // x̂ of z̄₂
    float read_rstd[B];
};

#include "native_mini_batch.h"

// gelu of z [BLOCK][B] and its derivatives, four rows at a time.
template <bool Slope, bool Curve, int ZRow, int Row, int SlopeRow>
__attribute__((noinline)) void gelu(Matrix<ZRow, 1> z, Matrix<Row, 1> value, Matrix<SlopeRow, 1> slope, Matrix<2 * B, 1> curve) {
    constexpr int AT_ONCE = 4;
    for (int i = 0; i < BLOCK; i += AT_ONCE)
        for (int t = 0; t < B; t += VL) {
            Vector a[AT_ONCE], x[AT_ONCE], dx[AT_ONCE], ddx[AT_ONCE];
#pragma GCC unroll 4
            for (int n = 0; n < AT_ONCE; ++n) a[n] = load(z.data + (i + n) * ZRow + t);
            gelu_of<Slope, Curve>(a, x, dx, ddx);
#pragma GCC unroll 4
            for (int n = 0; n < AT_ONCE; ++n) {
                store(value.data + (i + n) * Row + t, x[n]);
                if (Slope) store(slope.data + (i + n) * SlopeRow + t, dx[n]);
                if (Curve) store(curve.data + (i + n) * 2 * B + t, ddx[n]);
            }
        }
}

// mixedT = mixᵀ ∘ dotsT, where dotsT becomes dotsT + 1.
inline void mix(const float* tau, const float* eta, float (&dotsT)[B][B], float (&mixedT)[B][B]) {
    for (int s = 0; s < B; ++s)
        for (int t = 0; t < B; t += VL) {
            const Vector dots = load(dotsT[s] + t) + float(BIAS);
            store(dotsT[s] + t, dots);
            store(mixedT[s] + t, upper(eta[s] * load(tau + t) * dots, s, t));
        }
}

// From the cotangent of mixedT: that of dotsT (in its place), and what goes to η and τ.
inline void mix_transposed(
    const float* tau, const float* eta, const float (&dotsT)[B][B], float (&dmixedT)[B][B], float* deta, float* dtau) {
    for (int s = 0; s < B; ++s) {
        Vector along = {};
        for (int t = 0; t < B; t += VL) {
            const Vector d = upper(load(dmixedT[s] + t), s, t), to_mix = d * load(dotsT[s] + t), steps = load(tau + t);
            store(dmixedT[s] + t, eta[s] * steps * d);
            along += steps * to_mix;
            store(dtau + t, load(dtau + t) + eta[s] * to_mix);
        }
        deta[s] += total(along);
    }
}

// From the state `now` to `next` (may be the same; null: not wanted). Keep: also what only the backward pass needs.
template <bool Keep>
void forward_step(const Call& call, const Place& at, const State& now, State* next, Step& s) {
    load_mini_batch(call, at, s);
    transpose<2 * B, D>(rows<2 * B>(s.kqT[0]), rows<D>(s.kq[0]));
    product<B, B, D>(rows<B>(s.dots1T[0]), Zero{}, rows<D>(s.kq[0]), rows<2 * B>(s.kqT[0] + B));  // k qᵀ
    mix(at.tau, s.eta, s.dots1T, s.mixed1T);

    float z[2 * B][D];  // z₂, then z̄₂
    for (int t = 0; t < 2 * B; ++t)
        for (int j = 0; j < D; j += VL) store(z[t] + j, load(now.b2 + j));
    for (int f = 0; f < F; f += BLOCK) {
        float z1[BLOCK][2 * B];
        product<BLOCK, 2 * B, D>(rows<2 * B>(z1[0]), Column{now.b1 + f}, rows<D>(now.w1T[f]), rows<2 * B>(s.kqT[0]));
        gelu<true, Keep>(rows<2 * B>(z1[0]), rows<3 * B>(s.x[f]), rows<B>(s.slope[f]), rows<2 * B>(s.curve[f]));
        for (int i = 0; i < BLOCK; ++i)
            for (int t = 0; t < B; t += VL) store(s.x[f + i] + B + t, load(z1[i] + B + t));
        product<B, D, BLOCK>(rows<D>(z[0]), rows<D>(z[0]), columns<3 * B>(s.x[f]), rows<D>(now.w2[f]));  // z₂ += x W₂
    }
    inner_gradient(z[0], at.scale, s.inner);
    transpose<B, D>(rows<B>(s.g2T[0]), rows<D>(s.inner.g[0]));

    float step[B], ks[B][D], g2s[B][D];  // the last two multiplied by the step of the token, mix_Bs
    for (int i = 0; i < B; ++i) {
        step[i] = at.tau[B - 1] * s.eta[i];
        for (int j = 0; j < D; j += VL) {
            store(ks[i] + j, step[i] * load(s.kq[i] + j));
            store(g2s[i] + j, step[i] * load(s.inner.g[i] + j));
        }
    }
    std::memset(s.dots2T, 0, sizeof s.dots2T);
    for (int f = 0; f < F; f += BLOCK) {
        product<BLOCK, B, D>(rows<B>(s.g1[f]), Zero{}, rows<D>(now.w2[f]), rows<B>(s.g2T[0]));  // e = W₂ g₂ᵀ
        for (int i = f; i < f + BLOCK; ++i)
            for (int t = 0; t < B; t += VL) {
                const Vector e = load(s.g1[i] + t);
                store(s.g1[i] + t, e * load(s.slope[i] + t));
                if (Keep) store(s.curve[i] + t, e * load(s.curve[i] + t));
            }
        product<BLOCK, B, B, MINUS>(rows<3 * B>(s.x[f] + B), rows<3 * B>(s.x[f] + B), rows<B>(s.g1[f]), rows<B>(s.mixed1T[0]));  // z̄₁
        gelu<Keep, false>(rows<3 * B>(s.x[f] + B), rows<3 * B>(s.x[f] + 2 * B), rows<2 * B>(s.curve[f] + B), rows<2 * B>(nullptr));
        product<B, B, BLOCK>(rows<B>(s.dots2T[0]), rows<B>(s.dots2T[0]), columns<3 * B>(s.x[f]), rows<3 * B>(s.x[f] + 2 * B));  // x x̄ᵀ
        product<B, D, BLOCK>(rows<D>(z[B]), rows<D>(z[B]), columns<3 * B>(s.x[f] + 2 * B), rows<D>(now.w2[f]));  // z̄₂ += x̄ W₂
        if (!next) continue;
        product<BLOCK, D, B, MINUS>(rows<D>(next->w1T[f]), rows<D>(now.w1T[f]), rows<B>(s.g1[f]), rows<D>(ks[0]));    // W₁ᵀ − g₁ step k
        product<BLOCK, D, B, MINUS>(rows<D>(next->w2[f]), rows<D>(now.w2[f]), rows<3 * B>(s.x[f]), rows<D>(g2s[0]));  // W₂ − x step g₂
        add_row_sums<BLOCK, B>(next->b1 + f, now.b1 + f, s.g1[f], step);
    }
    mix(at.tau, s.eta, s.dots2T, s.mixed2T);
    product<B, D, B, MINUS, LOWER>(rows<D>(z[B]), rows<D>(z[B]), columns<B>(s.mixed2T[0]), rows<D>(s.inner.g[0]));
    normalize(z[B], s.read_hat[0], s.read_rstd);
    for (int j = 0; next && j < D; j += VL) {
        Vector b = load(now.b2 + j);
        for (int i = 0; BIAS && i < B; ++i) b -= load(g2s[i] + j);
        store(next->b2 + j, b);
    }
}

// `d` comes in as the cotangent of the state after the mini-batch and leaves as that of the state before it, `now`.
void backward_step(const Call& call, const Place& at, int64_t learner, const State& now, Step& s, State& d) {
    float *dscale = call.dscale + learner * D, *dshift = call.dshift + learner * D, *dtau = call.dtau + learner * B;
    float dtokens[2 * B][D];  // cotangents of k and q
    float right[3 * B][D];    // dz₂, g₂, dz̄₂
    float deta[B] = {};
    load_tile(dtokens[B], call.dy, at.batch, at.head, at.first);
    read_transposed(dtokens[B], s.read_hat[0], s.read_rstd, at.scale, right[2 * B], dscale, dshift);
    std::memcpy(right[B], s.inner.g, sizeof s.inner.g);

    // The second layer of the read.
    float dzT[D][B], dots2T[B][B], dots2[B][B];  // dz̄₂ᵀ; cotangent of x̄_t·x_s as [s][t], [t][s]
    float u2[B][D];                              // cotangent of g₂
    transpose<B, D>(rows<B>(dzT[0]), rows<D>(right[2 * B]));
    product<B, B, D, MINUS>(rows<B>(dots2T[0]), Zero{}, rows<D>(s.inner.g[0]), rows<B>(dzT[0]));  // − g₂ dz̄₂ᵀ
    mix_transposed(at.tau, s.eta, s.dots2T, dots2T, deta, dtau);
    transpose<B, B>(rows<B>(dots2[0]), rows<B>(dots2T[0]));
    product<B, D, B, MINUS, UPPER>(rows<D>(u2[0]), Zero{}, rows<B>(s.mixed2T[0]), rows<D>(right[2 * B]));  // − mixed₂ᵀ dz̄₂

    // Everything that does not need dz₂. The commit W' = W − xᵀ (step ∘ g) sends − step (x dW') to g, and − step g dW'ᵀ to x.
    float step[B], dstep[B] = {}, mixed1[B][B], dots1T[B][B] = {};
    float p2[B][D];                              // x dW₂' + db₂'
    transpose<B, B>(rows<B>(mixed1[0]), rows<B>(s.mixed1T[0]));
    for (int i = 0; i < B; i += VL) store(step + i, at.tau[B - 1] * load(s.eta + i));
    for (int i = 0; i < B; ++i)
        for (int j = 0; j < D; j += VL) store(p2[i] + j, load(d.b2 + j));
    std::memset(dtokens[0], 0, sizeof dtokens / 2);
    for (int f = 0; f < F; f += BLOCK) {
        float part[BLOCK][B], p1[BLOCK][B];
        product<BLOCK, B, D>(rows<B>(part[0]), Zero{}, rows<D>(now.w2[f]), rows<B>(dzT[0]));                // dx̄ = W₂ dz̄₂ᵀ
        product<BLOCK, B, B>(rows<B>(part[0]), rows<B>(part[0]), rows<3 * B>(s.x[f]), rows<B>(dots2T[0]));  //   + x dotsᵀ
        for (int i = 0; i < BLOCK; ++i)
            for (int t = 0; t < B; t += VL) {
                const Vector dz = load(part[i] + t) * load(s.curve[f + i] + B + t);
                store(part[i] + t, dz);
                store(s.curve[f + i] + B + t, dz);
            }
        product<B, B, BLOCK, MINUS>(rows<B>(dots1T[0]), rows<B>(dots1T[0]), columns<B>(s.g1[f]), rows<B>(part[0]));  // − g₁ᵀ dz̄₁
        product<B, D, BLOCK>(rows<D>(dtokens[B]), rows<D>(dtokens[B]), columns<B>(part[0]), rows<D>(now.w1T[f]));    // dq += dz̄₁ W₁ᵀ
        product<BLOCK, B, D>(rows<B>(p1[0]), Column{d.b1 + f}, rows<D>(d.w1T[f]), rows<2 * B>(s.kqT[0]));            // (k dW₁' + db₁')ᵀ
        product<BLOCK, B, B, MINUS>(rows<B>(part[0]), Zero{}, rows<2 * B>(s.curve[f] + B), rows<B>(mixed1[0]));      // dg₁ = − dz̄₁ mixed₁
        for (int i = 0; i < BLOCK; ++i)
            for (int t = 0; t < B; t += VL) {
                const Vector p = load(p1[i] + t), u = load(part[i] + t) - load(step + t) * p, de = u * load(s.slope[f + i] + t);
                store(dstep + t, load(dstep + t) - p * load(s.g1[f + i] + t));
                store(s.curve[f + i] + t, u * load(s.curve[f + i] + t));
                store(s.x[f + i] + B + t, de);
            }
        product<B, D, BLOCK>(rows<D>(u2[0]), rows<D>(u2[0]), columns<3 * B>(s.x[f] + B), rows<D>(now.w2[f]));  // u₂ += de W₂
        product<B, D, BLOCK>(rows<D>(p2[0]), rows<D>(p2[0]), columns<3 * B>(s.x[f]), rows<D>(d.w2[f]));
    }
    mix_transposed(at.tau, s.eta, s.dots1T, dots1T, deta, dtau);
    for (int i = 0; i < B; ++i) {
        Vector sum = {};
        for (int j = 0; j < D; j += VL) {
            const Vector p = load(p2[i] + j);
            sum += p * load(s.inner.g[i] + j);
            store(u2[i] + j, load(u2[i] + j) - step[i] * p);
        }
        dstep[i] -= total(sum);
        deta[i] += at.tau[B - 1] * dstep[i];
        dtau[B - 1] += s.eta[i] * dstep[i];
    }
    float dlabel[B][D];
    inner_gradient_transposed(u2[0], s.inner, at.scale, right[0], dlabel[0], dscale, dshift);
    write_label_and_steps(call, at, dlabel, deta);

    float g2sT[D][B];
    transpose<B, D>(rows<B>(dzT[0]), rows<D>(right[0]));
    for (int j = 0; j < D; ++j)
        for (int i = 0; i < B; i += VL) store(g2sT[j] + i, load(s.g2T[j] + i) * load(step + i));
    for (int f = 0; f < F; f += BLOCK) {
        float hidden[BLOCK][B], g1s[BLOCK][B];
        product<BLOCK, B, D>(rows<B>(hidden[0]), Zero{}, rows<D>(now.w2[f]), rows<B>(dzT[0]));                         // dx = W₂ dz₂ᵀ
        product<BLOCK, B, D, MINUS>(rows<B>(hidden[0]), rows<B>(hidden[0]), rows<D>(d.w2[f]), rows<B>(g2sT[0]));       //   − dW₂' step g₂ᵀ
        product<BLOCK, B, B>(rows<B>(hidden[0]), rows<B>(hidden[0]), rows<3 * B>(s.x[f] + 2 * B), rows<B>(dots2[0]));  //   + x̄ dots
        for (int i = 0; i < BLOCK; ++i)
            for (int t = 0; t < B; t += VL) {
                store(s.curve[f + i] + t, load(s.curve[f + i] + t) + load(hidden[i] + t) * load(s.slope[f + i] + t));
                store(g1s[i] + t, load(s.g1[f + i] + t) * load(step + t));
            }
        product<B, D, BLOCK>(rows<D>(dtokens[0]), rows<D>(dtokens[0]), columns<2 * B>(s.curve[f]), rows<D>(now.w1T[f]));  // dk += dz₁ W₁ᵀ
        product<B, D, BLOCK, MINUS>(rows<D>(dtokens[0]), rows<D>(dtokens[0]), columns<B>(g1s[0]), rows<D>(d.w1T[f]));  //   − step g₁ dW₁'ᵀ
        product<BLOCK, D, 2 * B>(rows<D>(d.w1T[f]), rows<D>(d.w1T[f]), rows<2 * B>(s.curve[f]), rows<D>(s.kq[0]));  // dW₁ᵀ
        product<BLOCK, D, 3 * B>(rows<D>(d.w2[f]), rows<D>(d.w2[f]), rows<3 * B>(s.x[f]), rows<D>(right[0]));  // dW₂
        add_row_sums<BLOCK, 2 * B>(d.b1 + f, d.b1 + f, s.curve[f], nullptr);
    }
    for (int j = 0; BIAS && j < D; j += VL) {
        Vector b = load(d.b2 + j);
        for (int t = 0; t < B; ++t) b += load(right[t] + j) + load(right[2 * B + t] + j);
        store(d.b2 + j, b);
    }

    // dk += −dv + dots₁ᵀ q,   dq += dy + dots₁ k
    product<B, D, B, PLUS, UPPER>(rows<D>(dtokens[0]), rows<D>(dtokens[0]), rows<B>(dots1T[0]), rows<D>(s.kq[B]));
    product<B, D, B, PLUS, LOWER>(rows<D>(dtokens[B]), rows<D>(dtokens[B]), columns<B>(dots1T[0]), rows<D>(s.kq[0]));
    add_tile(call.dk, at.batch, at.head, at.first, dtokens[0], dlabel[0]);
    add_tile(call.dq, at.batch, at.head, at.first, dtokens[B], nullptr);
}

constexpr int SECOND = BIAS ? 2 : 1;  // place of W₂ among the weights

void load_state(const float* const* weights, int64_t learner, State& state) {
    std::memset(&state, 0, sizeof state);
    if (weights[0]) transpose<D, F>(rows<D>(state.w1T[0]), rows<F>(weights[0] + learner * D * F));
    if (weights[SECOND]) std::memcpy(state.w2, weights[SECOND] + learner * F * D, sizeof state.w2);
    if (BIAS && weights[1]) std::memcpy(state.b1, weights[1] + learner * F, sizeof state.b1);
    if (BIAS && weights[3]) std::memcpy(state.b2, weights[3] + learner * D, sizeof state.b2);
}

void store_state(float* const* weights, int64_t learner, const State& state) {
    transpose<F, D>(rows<F>(weights[0] + learner * D * F), rows<D>(state.w1T[0]));
    std::memcpy(weights[SECOND] + learner * F * D, state.w2, sizeof state.w2);
    if (BIAS) std::memcpy(weights[1] + learner * F, state.b1, sizeof state.b1);
    if (BIAS) std::memcpy(weights[3] + learner * D, state.b2, sizeof state.b2);
}

}  // namespace

#include "native_walk.h"
