// What a model does between its matrix products: one pass over memory each, and one for its derivative.
//
// Every function computes units first to last - 1 of its work, what `passes.py` calls units.

#include "native_vector.h"

constexpr int LEAST = 16;  // rows are multiples of so many floats

// -- vectors of mean square one, times a scale -----------------------------------------------------------------------------

struct Scaling {
    int64_t width, heads, count, each;
    double eps;
    View x, y, dy, dx, inverse;  // inverse [batch, head, token]: what x was multiplied with
    View scale, dscale;          // [width]; [units, width]
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
            const float square = total(sums), factor = 1 / sqrtf(square / c.width + static_cast<float>(c.eps));
            *c.inverse.at(r.batch, r.head, t) = factor;
            for (int64_t j = 0; j < c.width; j += VL) store(y + j, load(x + j) * factor * load(scale + j));
        }
    }
    return 0;
}

extern "C" int scale_rows_back(const Scaling& c, int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
        const Rows r(c, unit);
        const float* scale = c.scale.data;
        float* dscale = c.dscale.data + unit * c.width;
        for (int64_t j = 0; j < c.width; j += VL) store(dscale + j, Vector{});
        for (int64_t t = r.first; t < r.last; ++t) {
            const float *x = c.x.at(r.batch, r.head, t), *dy = c.dy.at(r.batch, r.head, t);
            float* dx = c.dx.at(r.batch, r.head, t);
            const float factor = *c.inverse.at(r.batch, r.head, t);
            Vector sums = {};
            for (int64_t j = 0; j < c.width; j += VL) {
                const Vector product = load(x + j) * load(dy + j);
                sums += product * load(scale + j);
                store(dscale + j, load(dscale + j) + product * factor);
            }
            const float along = total(sums) * factor * factor / c.width;
            for (int64_t j = 0; j < c.width; j += VL) {
                store(dx + j, factor * (load(dy + j) * load(scale + j) - along * load(x + j)));
            }
        }
    }
    return 0;
}

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
