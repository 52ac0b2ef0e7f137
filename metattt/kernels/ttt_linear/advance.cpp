// TTT-Linear on the CPU, token by token: f(x) = x + LN(xW + b). Constants of the compilation: WIDTH, BIAS 0 or 1.

#include "native_advance.h"

namespace {

#if BIAS
constexpr int SIZES[] = {D * D, D};
#else
constexpr int SIZES[] = {D * D};
#endif

void take(
    const Token& token, const float* const* w, float* const* committed, const float* const* m, float* const* updated) {
    const float one = 1;
    float z[D], read[D], g[D];
    multiply<D, D, 2>(w[0], {token.k, token.q}, BIAS ? w[BIAS] : nullptr, {z, read});
    inner_gradient(token, z, g);
    learn<D, D>(m[0], updated[0], w[0], committed[0], token.tau, token.k, g, token.q, read, read);
    if (BIAS) learn<1, D>(m[BIAS], updated[BIAS], w[BIAS], committed[BIAS], token.tau, &one, g, &one, read, read);
    write(token, read);
}

}  // namespace

#include "native_advance_walk.h"
