// TTT-Linear on the CPU: f(x) = x + LN(xW + b), forward and backward pass of whole mini-batches, one learner (sequence x head) after the
// other with its weights in the cache. Constants of the compilation: WIDTH, TOKENS per mini-batch, BIAS 0 or 1.
//
// Per mini-batch, with mix_ts = τ_t η_s for s <= t and W, b before it:
//     z = kW + b,   G = ∂ℓ/∂z,   y_t = q_t + LN(q_t W + b − Σ_s mix_ts (q_t·k_s + 1) G_s),   W ← W − Σ_s mix_Bs k_s G_sᵀ.
// The tensors are tiles [B][D] with tokens as rows, except where a name ends in T.

#include "native_norm.h"

namespace {

struct State {
    float w[D][D];
    float b[D];
};

// What the forward pass of a mini-batch computes; the backward pass reads it.
struct Step {
    float kq[2 * B][D];  // keys, then queries
    float kT[D][B];
    InnerGradient inner;
    float eta[B];
    float dots[B][B];      // q_t·k_s + 1
    float mixed[B][B];     // mix ∘ dots
    float read_hat[B][D];  // x̂ of the read
    float read_rstd[B];
};

#include "native_mini_batch.h"

// From the state `now` to `next` (may be the same; null: not wanted).
template <bool Keep>
void forward_step(const Call& call, const Place& at, const State& now, State* next, Step& s) {
    load_mini_batch(call, at, s);
    transpose<B, D>(rows<B>(s.kT[0]), rows<D>(s.kq[0]));

    float z[2 * B][D];  // kW + b, qW + b
    product<2 * B, D, D>(rows<D>(z[0]), rows<0>(now.b), rows<D>(s.kq[0]), rows<D>(now.w[0]));
    inner_gradient(z[0], at.scale, s.inner);

    product<B, B, D>(rows<B>(s.dots[0]), Zero{}, rows<D>(s.kq[B]), rows<B>(s.kT[0]));  // q kᵀ
    for (int t = 0; t < B; ++t)
        for (int i = 0; i < B; i += VL) {
            const Vector dots = load(s.dots[t] + i) + float(BIAS);
            store(s.dots[t] + i, dots);
            store(s.mixed[t] + i, lower(at.tau[t] * load(s.eta + i) * dots, i, t));
        }
    product<B, D, B, MINUS, LOWER>(rows<D>(z[B]), rows<D>(z[B]), rows<B>(s.mixed[0]), rows<D>(s.inner.g[0]));  // − mixed G
    normalize(z[B], s.read_hat[0], s.read_rstd);

    if (!next) return;
    float step[B], scaledT[D][B];
    for (int i = 0; i < B; i += VL) store(step + i, at.tau[B - 1] * load(s.eta + i));
    for (int j = 0; j < D; ++j)
        for (int i = 0; i < B; i += VL) store(scaledT[j] + i, load(s.kT[j] + i) * load(step + i));
    product<D, D, B, MINUS>(rows<D>(next->w[0]), rows<D>(now.w[0]), rows<B>(scaledT[0]), rows<D>(s.inner.g[0]));  // W − (step ∘ k)ᵀ G
    for (int j = 0; j < D; j += VL) {
        Vector b = load(now.b + j);
        for (int i = 0; BIAS && i < B; ++i) b -= step[i] * load(s.inner.g[i] + j);
        store(next->b + j, b);
    }
}

// `d` comes in as the cotangent of the state after the mini-batch and leaves as that of the state before it, `now`.
void backward_step(const Call& call, const Place& at, int64_t learner, const State& now, const Step& s, State& d) {
    float *dscale = call.dscale + learner * D, *dshift = call.dshift + learner * D, *dtau = call.dtau + learner * B;
    float dtokens[2 * B][D];  // cotangents of k and q
    load_tile(dtokens[B], call.dy, at.batch, at.head, at.first);

    float dz[2 * B][D];  // of z, then of z̄ = qW + b − mixed G
    read_transposed(dtokens[B], s.read_hat[0], s.read_rstd, at.scale, dz[B], dscale, dshift);
    float gT[D][B], dmixed[B][B], dots[B][B];  // the last: cotangent of q_t·k_s
    transpose<B, D>(rows<B>(gT[0]), rows<D>(s.inner.g[0]));
    product<B, B, D, MINUS>(rows<B>(dmixed[0]), Zero{}, rows<D>(dz[B]), rows<B>(gT[0]));  // − dz̄ Gᵀ
    float deta[B] = {};
    for (int t = 0; t < B; ++t) {
        Vector along = {};
        for (int i = 0; i < B; i += VL) {
            const Vector x = lower(load(dmixed[t] + i), i, t), to_mix = x * load(s.dots[t] + i), eta = load(s.eta + i);
            store(dots[t] + i, x * at.tau[t] * eta);
            store(deta + i, load(deta + i) + at.tau[t] * to_mix);
            along += eta * to_mix;
        }
        dtau[t] += total(along);
    }

    // The commit: W' = W − (step ∘ k)ᵀ G, step_s = τ_B η_s, and G depends on W through z = kW + b.
    float u[B][D], p[B][D];
    product<B, D, B, MINUS, UPPER>(rows<D>(u[0]), Zero{}, columns<B>(s.mixed[0]), rows<D>(dz[B]));  // − mixedᵀ dz̄
    product<B, D, D>(rows<D>(p[0]), rows<0>(d.b), rows<D>(s.kq[0]), rows<D>(d.w[0]));               // k dW' + db'
    for (int i = 0; i < B; ++i) {
        const float step = at.tau[B - 1] * s.eta[i];
        Vector sum = {};
        for (int j = 0; j < D; j += VL) {
            const Vector x = load(p[i] + j);
            sum += x * load(s.inner.g[i] + j);
            store(u[i] + j, load(u[i] + j) - step * x);
        }
        const float dstep = -total(sum);
        deta[i] += at.tau[B - 1] * dstep;
        dtau[B - 1] += s.eta[i] * dstep;
    }
    for (int j = 0; j < D; ++j)
        for (int i = 0; i < B; i += VL) store(gT[j] + i, load(gT[j] + i) * at.tau[B - 1] * load(s.eta + i));
    float dlabel[B][D];
    inner_gradient_transposed(u[0], s.inner, at.scale, dz[0], dlabel[0], dscale, dshift);
    write_label_and_steps(call, at, dlabel, deta);
    // dk = −dv + dz Wᵀ − (step ∘ G) dW'ᵀ + dotsᵀ q,   dq = dy + dz̄ Wᵀ + dots k. The products with W are computed transposed.
    float dzT[D][2 * B], dtokensT[D][2 * B];
    transpose<2 * B, D>(rows<2 * B>(dzT[0]), rows<D>(dz[0]));
    product<D, 2 * B, D>(rows<2 * B>(dtokensT[0]), Zero{}, rows<D>(now.w[0]), rows<2 * B>(dzT[0]));
    product<D, B, D, MINUS>(rows<2 * B>(dtokensT[0]), rows<2 * B>(dtokensT[0]), rows<D>(d.w[0]), rows<B>(gT[0]));
    product<B, D, B, PLUS, UPPER>(rows<D>(dtokens[0]), rows<D>(dlabel[0]), columns<B>(dots[0]), rows<D>(s.kq[B]));
    product<B, D, B, PLUS, LOWER>(rows<D>(dtokens[B]), rows<D>(dtokens[B]), rows<B>(dots[0]), rows<D>(s.kq[0]));
    add_transposed_tile<2 * B>(call.dk, at.batch, at.head, at.first, dtokens[0], dtokensT[0]);
    add_transposed_tile<2 * B>(call.dq, at.batch, at.head, at.first, dtokens[B], dtokensT[0] + B);

    product<D, D, 2 * B>(rows<D>(d.w[0]), rows<D>(d.w[0]), columns<D>(s.kq[0]), rows<D>(dz[0]));  // dW = dW' + kᵀ dz + qᵀ dz̄
    if (BIAS)
        for (int j = 0; j < D; j += VL) {
            Vector b = load(d.b + j);
            for (int t = 0; t < 2 * B; ++t) b += load(dz[t] + j);
            store(d.b + j, b);
        }
}

void load_state(const float* const* weights, int64_t learner, State& state) {
    if (weights[0]) std::memcpy(state.w, weights[0] + learner * D * D, sizeof state.w);
    else std::memset(state.w, 0, sizeof state.w);
    if (BIAS && weights[1]) std::memcpy(state.b, weights[1] + learner * D, sizeof state.b);
    else std::memset(state.b, 0, sizeof state.b);
}

void store_state(float* const* weights, int64_t learner, const State& state) {
    std::memcpy(weights[0] + learner * D * D, state.w, sizeof state.w);
    if (BIAS) std::memcpy(weights[1] + learner * D, state.b, sizeof state.b);
}

}  // namespace

#include "native_walk.h"
