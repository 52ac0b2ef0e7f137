// Layer norm and the gradient of the inner loss, with their transposes, for tiles [B][D] of tokens.

#pragma once

#include "native.h"

// x̂ = (z − mean)·r of B tokens, and r. `z` and `hat` may be the same.
static inline void normalize(const float* z, float* hat, float* rstd) {
    for (int t = 0; t < B; t += VL) {
        Vector sums[VL];
        for (int i = 0; i < VL; ++i) {
            Vector sum = {};
            for (int j = 0; j < D; j += VL) sum += load(z + (t + i) * D + j);
            sums[i] = sum;
        }
        const Vector mean = totals(sums) * (1.0f / D);
        for (int i = 0; i < VL; ++i) {
            Vector sum = {};
            for (int j = 0; j < D; j += VL) {
                const Vector c = load(z + (t + i) * D + j) - mean[i];
                store(hat + (t + i) * D + j, c);
                sum += c * c;
            }
            sums[i] = sum;
        }
        const Vector r = inverse_root(totals(sums) * (1.0f / D) + EPS);
        store(rstd + t, r);
        for (int i = 0; i < VL; ++i)
            for (int j = 0; j < D; j += VL) store(hat + (t + i) * D + j, load(hat + (t + i) * D + j) * r[i]);
    }
}

// Inner loss ½‖k + γ x̂(z) + β − v‖²: what its gradient leaves for the second order, B tokens.
struct InnerGradient {
    float hat[B][D];  // x̂
    float gap[B][D];  // k + β − v; the cotangent of x̂ is e = γ (γ x̂ + gap)
    float g[B][D];    // G = ∂ℓ/∂z = r (e − mean e − x̂ mean(e x̂))
    float rstd[B];    // r
    float e[B];       // Σ e
    float along[B];   // Σ e x̂
    float hat1[B];    // Σ γ² x̂
    float hat2[B];    // Σ γ² x̂²
};

// From z [B][D] and the gap.
static __attribute__((noinline)) void inner_gradient(const float* z, const float* scale, InnerGradient& s) {
    for (int t = 0; t < B; t += VL) {
        Vector sums[VL], s1[VL], s2[VL], s3[VL], s4[VL];
        for (int i = 0; i < VL; ++i) {
            Vector sum = {};
            for (int j = 0; j < D; j += VL) sum += load(z + (t + i) * D + j);
            sums[i] = sum;
        }
        const Vector mean = totals(sums) * (1.0f / D);
        for (int i = 0; i < VL; ++i) {  // with c = z − mean = x̂/r: Σ c², Σ γ²c, Σ γ²c², Σ γ gap, Σ γ gap c
            Vector c2 = {}, gc = {}, gcc = {}, o = {}, oc = {};
            for (int j = 0; j < D; j += VL) {
                const Vector c = load(z + (t + i) * D + j) - mean[i];
                store(s.hat[t + i] + j, c);
                const Vector gamma = load(scale + j), square = gamma * gamma * c, offset = gamma * load(s.gap[t + i] + j);
                c2 += c * c;
                gc += square;
                gcc += square * c;
                o += offset;
                oc += offset * c;
            }
            sums[i] = c2, s1[i] = gc, s2[i] = gcc, s3[i] = o, s4[i] = oc;
        }
        const Vector r = inverse_root(totals(sums) * (1.0f / D) + EPS);
        const Vector hat1 = r * totals(s1), hat2 = r * r * totals(s2);
        const Vector e = hat1 + totals(s3), along = hat2 + r * totals(s4);
        store(s.rstd + t, r), store(s.hat1 + t, hat1), store(s.hat2 + t, hat2), store(s.e + t, e), store(s.along + t, along);
        const Vector m1 = e * (1.0f / D), m2 = along * (1.0f / D);
        for (int i = 0; i < VL; ++i)
            for (int j = 0; j < D; j += VL) {
                const Vector gamma = load(scale + j), x = load(s.hat[t + i] + j) * r[i];
                store(s.hat[t + i] + j, x);
                const Vector error = gamma * (gamma * x + load(s.gap[t + i] + j));
                store(s.g[t + i] + j, r[i] * (error - m1[i] - x * m2[i]));
            }
    }
}

// Its transpose: from u = the cotangent of G, that of z, and γ times that of e (the opposite of dv); adds to dγ and dβ.
//
// With P x = x − mean x − x̂ mean(x̂ x): de = r P u; x̂ enters through e and P, r through z:
//     dx̂ = γ² de − r mean(x̂ e) u − r mean(x̂ u) e,    dz = r P dx̂ − x̂ r mean(u G).
// The means of dx̂ and x̂ dx̂ follow from sums over u and those that the InnerGradient holds.
static __attribute__((noinline)) void inner_gradient_transposed(
    const float* u, const InnerGradient& s, const float* scale, float* dz, float* dlabel, float* dscale, float* dshift) {
    constexpr float over = 1.0f / D;
    float squares = 0;
    for (int j = 0; j < D; ++j) squares += scale[j] * scale[j];
    for (int t = 0; t < B; t += VL) {
        Vector s0[VL], s1[VL], s2[VL], s3[VL], s4[VL];
        for (int i = 0; i < VL; ++i) {
            Vector a = {}, b = {}, c = {}, d = {}, e = {};
            for (int j = 0; j < D; j += VL) {
                const Vector x = load(u + (t + i) * D + j), hat = load(s.hat[t + i] + j), gamma = load(scale + j);
                const Vector xx = gamma * gamma * x;
                a += x;
                b += x * hat;
                c += x * load(s.g[t + i] + j);
                d += xx;
                e += xx * hat;
            }
            s0[i] = a, s1[i] = b, s2[i] = c, s3[i] = d, s4[i] = e;
        }
        const Vector r = load(s.rstd + t), hat1 = load(s.hat1 + t), hat2 = load(s.hat2 + t), es = load(s.e + t), along = load(s.along + t);
        const Vector u0 = totals(s0) * over, u1 = totals(s1) * over, ug = totals(s2) * over * r;
        const Vector with_u = r * along * over, with_e = r * u1;
        const Vector d0 = (r * (totals(s3) - u0 * squares - u1 * hat1) - with_e * es) * over - with_u * u0;
        const Vector d1 = (r * (totals(s4) - u0 * hat1 - u1 * hat2) - with_e * along) * over - with_u * u1;
        const Vector back = r * d1 + ug;
        for (int j = 0; j < D; j += VL) {
            const Vector gamma = load(scale + j);
            Vector to_scale = load(dscale + j), to_shift = load(dshift + j);
            for (int i = 0; i < VL; ++i) {
                const Vector x = load(u + (t + i) * D + j), hat = load(s.hat[t + i] + j), gap = load(s.gap[t + i] + j);
                const Vector de = r[i] * (x - u0[i] - hat * u1[i]);
                const Vector error = gamma * hat + gap, label = gamma * de;  // e / γ
                store(dlabel + (t + i) * D + j, label);
                to_shift += label;
                to_scale += de * (error + gamma * hat);
                const Vector dhat = gamma * (label - with_e[i] * error) - with_u[i] * x;
                store(dz + (t + i) * D + j, r[i] * (dhat - d0[i]) - hat * back[i]);
            }
            store(dscale + j, to_scale), store(dshift + j, to_shift);
        }
    }
}

// Of y = q + γ x̂ + β: the cotangent of z from dy; adds to dγ and dβ.
static __attribute__((noinline)) void read_transposed(
    const float* dy, const float* hat, const float* rstd, const float* scale, float* dz, float* dscale, float* dshift) {
    for (int t = 0; t < B; t += VL) {
        Vector s0[VL], s1[VL];
        for (int i = 0; i < VL; ++i) {
            Vector a = {}, b = {};
            for (int j = 0; j < D; j += VL) {
                const Vector x = load(scale + j) * load(dy + (t + i) * D + j);
                a += x;
                b += x * load(hat + (t + i) * D + j);
            }
            s0[i] = a, s1[i] = b;
        }
        const Vector r = load(rstd + t), m0 = totals(s0) * (1.0f / D), m1 = totals(s1) * (1.0f / D);
        for (int j = 0; j < D; j += VL) {
            const Vector gamma = load(scale + j);
            Vector to_scale = load(dscale + j), to_shift = load(dshift + j);
            for (int i = 0; i < VL; ++i) {
                const Vector x = load(dy + (t + i) * D + j), h = load(hat + (t + i) * D + j);
                to_shift += x;
                to_scale += x * h;
                store(dz + (t + i) * D + j, r[i] * (gamma * x - m0[i] - h * m1[i]));
            }
            store(dscale + j, to_scale), store(dshift + j, to_shift);
        }
    }
}
