// What a model does between its matrix products: one pass over memory each, and one for its derivative.
//
// Every function computes units first to last - 1 of its work, what `passes.py` calls units.

#include "native_vector.h"

constexpr int LEAST = 16;  // rows and channels are multiples of so many floats

// -- vectors of length one, or of mean square one, times a scale -------------------------------------------------------

struct Scaling {
    int64_t width, heads, count, each, mean;
    double eps;
    View x, y, dy, dx, inverse;  // inverse [batch, head, token]: what x was multiplied with
    View scale, dscale;          // [width], null: ones; [units, width]
};

struct Rows {  // tokens of a head of a sequence that are a unit
    int64_t batch, head, first, last;
    Rows(const Scaling& c, int64_t unit) {
        const int64_t parts = (c.count + c.each - 1) / c.each, row = unit / parts;
        batch = row / c.heads, head = row % c.heads, first = unit % parts * c.each;
        last = first + c.each < c.count ? first + c.each : c.count;
    }
};

extern "C" int scale_rows(const Scaling& c, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
        const Rows r(c, unit);
        for (int64_t t = r.first; t < r.last; ++t) {
            const float *x = c.x.at(r.batch, r.head, t), *scale = c.scale.data;
            float* y = c.y.at(r.batch, r.head, t);
            Vector sums = {};
            for (int64_t j = 0; j < c.width; j += VL) sums += load(x + j) * load(x + j);
            const float square = total(sums), eps = static_cast<float>(c.eps), length = sqrtf(square);
            const float factor = 1 / (c.mean ? sqrtf(square / c.width + eps) : length < eps ? eps : length);
            *c.inverse.at(r.batch, r.head, t) = factor;
            for (int64_t j = 0; j < c.width; j += VL) store(y + j, load(x + j) * factor * (scale ? load(scale + j) : splat(1)));
        }
    }
    return 0;
}

extern "C" int scale_rows_back(const Scaling& c, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
        const Rows r(c, unit);
        const float* scale = c.scale.data;
        float* dscale = scale ? c.dscale.data + unit * c.width : nullptr;
        for (int64_t j = 0; dscale && j < c.width; j += VL) store(dscale + j, Vector{});
        for (int64_t t = r.first; t < r.last; ++t) {
            const float *x = c.x.at(r.batch, r.head, t), *dy = c.dy.at(r.batch, r.head, t);
            float* dx = c.dx.at(r.batch, r.head, t);
            const float factor = *c.inverse.at(r.batch, r.head, t);
            Vector sums = {};
            for (int64_t j = 0; j < c.width; j += VL) {
                const Vector product = load(x + j) * load(dy + j);
                sums += scale ? product * load(scale + j) : product;
                if (dscale) store(dscale + j, load(dscale + j) + product * factor);
            }
            const bool moves = c.mean || factor < 1 / static_cast<float>(c.eps);  // below eps the factor is a constant
            const float along = moves ? total(sums) * factor * factor / (c.mean ? c.width : 1) : 0;
            for (int64_t j = 0; j < c.width; j += VL) {
                const Vector d = scale ? load(dy + j) * load(scale + j) : load(dy + j);
                store(dx + j, factor * (d - along * load(x + j)));
            }
        }
    }
    return 0;
}

// -- a causal convolution of every channel by itself -------------------------------------------------------------------

struct Convolution {
    int64_t batch, count, dim, taps;
    View x, y, dy, dx;                   // [batch, row, dim]; x and dx have taps - 1 rows before the first token
    View weight, bias, dweight, dbias;  // [dim, taps]; [dim], null: zeros
};

constexpr int UNIT = 32;  // channels
constexpr int N = VL == 16 ? 2 : LEAST / VL;  // vectors at a time

template <int W, int M>
static void convolve(const Convolution& c, int64_t at) {
    Vector w[W][M], bias[M];
    for (int m = 0; m < M; ++m) {
        bias[m] = c.bias.data ? load(c.bias.data + at + m * VL) : Vector{};
        for (int i = 0; i < VL; ++i)
            for (int j = 0; j < W; ++j) w[j][m][i] = c.weight.data[(at + m * VL + i) * W + j];
    }
    for (int64_t b = 0; b < c.batch; ++b) {
        Vector seen[W][M];
        for (int j = 1; j < W; ++j)
            for (int m = 0; m < M; ++m) seen[j][m] = load(c.x.at(b, j - 1, 0) + at + m * VL);
        for (int64_t t = 0; t < c.count; ++t) {
            const float* x = c.x.at(b, t + W - 1, 0) + at;
            float* y = c.y.at(b, t, 0) + at;
            for (int m = 0; m < M; ++m) {
                Vector sum = bias[m];
                for (int j = 0; j < W - 1; ++j) seen[j][m] = seen[j + 1][m];
                seen[W - 1][m] = load(x + m * VL);
                for (int j = 0; j < W; ++j) sum += w[j][m] * seen[j][m];
                store(y + m * VL, sum);
            }
        }
    }
}

// Row r of x is seen by the outputs r, r - 1, ... with the taps 0, 1, ...
template <int W, int M>
static void convolve_back(const Convolution& c, int64_t at) {
    Vector w[W][M], dw[W][M], dbias[M];
    for (int m = 0; m < M; ++m) {
        dbias[m] = Vector{};
        for (int j = 0; j < W; ++j) dw[j][m] = Vector{};
        for (int i = 0; i < VL; ++i)
            for (int j = 0; j < W; ++j) w[j][m][i] = c.weight.data[(at + m * VL + i) * W + j];
    }
    for (int64_t b = 0; b < c.batch; ++b) {
        Vector dy[W][M];
        for (int j = 0; j < W; ++j)
            for (int m = 0; m < M; ++m) dy[j][m] = Vector{};
        for (int64_t r = 0; r < c.count + W - 1; ++r) {
            const float *x = c.x.at(b, r, 0) + at, *from = r < c.count ? c.dy.at(b, r, 0) + at : nullptr;
            float* dx = c.dx.at(b, r, 0) + at;
            for (int m = 0; m < M; ++m) {
                for (int j = W - 1; j > 0; --j) dy[j][m] = dy[j - 1][m];
                dy[0][m] = from ? load(from + m * VL) : Vector{};
                dbias[m] += dy[0][m];
                const Vector seen = load(x + m * VL);
                Vector sum = {};
                for (int j = 0; j < W; ++j) {
                    sum += w[j][m] * dy[j][m];
                    dw[j][m] += seen * dy[j][m];
                }
                store(dx + m * VL, sum);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        store(c.dbias.data + at + m * VL, dbias[m]);
        for (int i = 0; i < VL; ++i)
            for (int j = 0; j < W; ++j) c.dweight.data[(at + m * VL + i) * W + j] = dw[j][m][i];
    }
}

template <bool Back, int W>
static int units_of(const Convolution& c, int64_t first, int64_t last) {
    const int64_t end = last * UNIT < c.dim ? last * UNIT : c.dim;
    for (int64_t at = first * UNIT; at < end;) {
        const bool all = end - at >= N * VL;
        if (Back) all ? convolve_back<W, N>(c, at) : convolve_back<W, 1>(c, at);
        else all ? convolve<W, N>(c, at) : convolve<W, 1>(c, at);
        at += all ? N * VL : VL;
    }
    return 0;
}

template <bool Back>
static int of_any_width(const Convolution& c, int64_t first, int64_t last) {
    switch (c.taps) {
        case 2: return units_of<Back, 2>(c, first, last);
        case 3: return units_of<Back, 3>(c, first, last);
        case 4: return units_of<Back, 4>(c, first, last);
    }
    return 1;
}

extern "C" int convolve_rows(const Convolution& c, int64_t first, int64_t last) { return of_any_width<false>(c, first, last); }
extern "C" int convolve_rows_back(const Convolution& c, int64_t first, int64_t last) { return of_any_width<true>(c, first, last); }

// -- silu(a) b ----------------------------------------------------------------------------------------------------------

struct Gating {
    int64_t size, each;  // floats, and of a unit
    View a, b, dy, y, da, db;  // dense
};

template <bool Back>
static int gate_units(const Gating& c, int64_t first, int64_t last) {
    constexpr int M = LEAST / VL < 2 ? 1 : 2;
    const int64_t end = last * c.each < c.size ? last * c.each : c.size;
    for (int64_t i = first * c.each; i < end; i += M * VL) {
        Vector power[M];
        for (int m = 0; m < M; ++m) power[m] = -load(c.a.data + i + m * VL);
        exponential(power);
        for (int m = 0; m < M; ++m) {
            const int64_t at = i + m * VL;
            const Vector a = load(c.a.data + at), b = load(c.b.data + at), open = 1 / (1 + power[m]);
            if (Back) {
                const Vector dy = load(c.dy.data + at);
                store(c.da.data + at, dy * b * open * (1 + a * (1 - open)));
                store(c.db.data + at, dy * a * open);
            } else {
                store(c.y.data + at, a * open * b);
            }
        }
    }
    return 0;
}

extern "C" int gate(const Gating& c, int64_t first, int64_t last) { return gate_units<false>(c, first, last); }
extern "C" int gate_back(const Gating& c, int64_t first, int64_t last) { return gate_units<true>(c, first, last); }
