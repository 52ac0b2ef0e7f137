// What all native kernels share: vectors as wide as the processor's, functions of their elements, memory. fp32 throughout.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

constexpr float EPS = 1e-6f;  // of the norm

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

struct View {  // of a tensor [batch, head, token] or [batch, head, token, D] with contiguous D; strides in floats
    float* data;
    int64_t batch, head, token;
    float* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

// -- sums and shuffles ------------------------------------------------------------------------------------------------

static inline float total(Vector x) {
    float lanes[VL];
    store(lanes, x);
    for (int width = VL / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

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

// The sums over the lanes of VL vectors, as one vector.
static inline __attribute__((always_inline)) Vector totals(Vector (&x)[VL]) {
#pragma GCC unroll 8
    for (int n = VL / 2; n > 0; n /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i)
            x[i] = every_second<0>(x[2 * i], x[2 * i + 1], Lanes{}) + every_second<1>(x[2 * i], x[2 * i + 1], Lanes{});
    return x[0];
}

// -- functions of the elements ----------------------------------------------------------------------------------------

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

// gelu of `a` by the tanh formula, and its derivatives where they are wanted, of N vectors together: one alone would be a
// long chain of operations that wait for each other. With s = σ(2u), u = √(2/π)(a + 0.044715 a³), p = 2u':
//     gelu = a s,   gelu' = s + a s(1−s)p,   gelu'' = s(1−s)(2p + a((1−2s)p² + p')).
// Beyond ±16, where s(1−s) is 0, the derivatives take 16 for a: with a itself a⁵ is infinite from 1e8 on, and 0 times that no number.
template <bool Slope, bool Curve, int N>
static inline __attribute__((always_inline)) void gelu_of(
    const Vector (&a)[N], Vector (&value)[N], Vector (&slope)[N], Vector (&curve)[N]) {
    constexpr float linear = 1.5957691216057308f, cubic = linear * 0.044715f;  // of 2u
    Vector power[N], s[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) power[n] = -a[n] * (linear + cubic * a[n] * a[n]);
    exponential(power);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) s[n] = 1.0f / (1.0f + power[n]);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
        value[n] = a[n] * s[n];
        if (!Slope) continue;
        const Vector most = a[n] > 16.0f ? splat(16.0f) : a[n], at = most < -16.0f ? splat(-16.0f) : most;  // NaN stays
        const Vector ds = s[n] * s[n] * power[n], p = linear + 3 * cubic * at * at;
        slope[n] = s[n] + at * ds * p;
        if (!Curve) continue;
        curve[n] = ds * (2 * p + at * ((1 - 2 * s[n]) * p * p + 6 * cubic * at));
    }
}

// -- memory -----------------------------------------------------------------------------------------------------------

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

// Asks for large pages for memory that has not been touched yet: handing out that of a long sequence in small ones takes a fifth of a
// forward pass. It is only advice.
extern "C" void use_large_pages(char* data, int64_t size) {
#if defined(MADV_HUGEPAGE)
    constexpr int64_t page = int64_t(1) << 21;
    const int64_t start = reinterpret_cast<int64_t>(data), first = (start + page - 1) / page * page, last = (start + size) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)size;
#endif
}
