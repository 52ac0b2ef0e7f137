// TTT-MLP on the CPU, token by token: f(x) = x + LN(gelu(xW₁ + b₁)W₂ + b₂). Constants of the compilation: WIDTH, HIDDEN,
// BIAS 0 or 1.

#include "native_advance.h"

namespace {

constexpr int F = HIDDEN;
static_assert(F % VL == 0);

#if BIAS
constexpr int SIZES[] = {D * F, F, F * D, D};
#else
constexpr int SIZES[] = {D * F, F * D};
#endif
constexpr int SECOND = BIAS ? 2 : 1, BIAS1 = BIAS ? 1 : 0, BIAS2 = BIAS ? 3 : 0;  // places among the weights

// z becomes gelu(z), and `slope` gelu'(z) if it is wanted.
template <bool Slope>
void gelu(float* z, float* slope) {
    constexpr int AT_ONCE = columns_at_once(F, 4);
    for (int f = 0; f < F; f += AT_ONCE * VL) {
        Vector a[AT_ONCE], x[AT_ONCE], dx[AT_ONCE], ddx[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) a[i] = load(z + f + i * VL);
        gelu_of<Slope, false>(a, x, dx, ddx);
        for (int i = 0; i < AT_ONCE; ++i) store(z + f + i * VL, x[i]);
        for (int i = 0; Slope && i < AT_ONCE; ++i) store(slope + f + i * VL, dx[i]);
    }
}

void take(
    const Token& token, const float* const* w, float* const* committed, const float* const* m, float* const* updated) {
    const float one = 1;
    float x[F], hidden[F], slope[F], g1[F], z[D], read[D], g2[D];
    multiply<D, F, 2>(w[0], {token.k, token.q}, BIAS ? w[BIAS1] : nullptr, {x, hidden});
    gelu<true>(x, slope);
    multiply<F, D, 1>(w[SECOND], {x}, BIAS ? w[BIAS2] : nullptr, {z});
    inner_gradient(token, z, g2);
    multiply_transposed<F, D>(w[SECOND], g2, g1);
    for (int f = 0; f < F; f += VL) store(g1 + f, load(g1 + f) * load(slope + f));
    learn<D, F>(m[0], updated[0], w[0], committed[0], token.tau, token.k, g1, token.q, hidden, hidden);
    if (BIAS) learn<1, F>(m[BIAS1], updated[BIAS1], w[BIAS1], committed[BIAS1], token.tau, &one, g1, &one, hidden, hidden);
    gelu<false>(hidden, nullptr);
    multiply<F, D, 1>(w[SECOND], {hidden}, BIAS ? w[BIAS2] : nullptr, {read});
    learn<F, D>(m[SECOND], updated[SECOND], w[SECOND], committed[SECOND], token.tau, x, g2, hidden, read, read);
    if (BIAS) learn<1, D>(m[BIAS2], updated[BIAS2], w[BIAS2], committed[BIAS2], token.tau, &one, g2, &one, read, read);
    write(token, read);
}

}  // namespace

#include "native_advance_walk.h"
