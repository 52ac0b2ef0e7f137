// Online rules of a linear map on the CPU, token by token, one learner (sequence x head) after the other. For every pair (k, v) of a token
//
//     F = p' W,   W ← Diag(a) W − η (bᵀ F − kᵀ v),   and after the last pair of the token y = q W (or before its first one),
//
// with p' = p, or p ∘ a where the gradient is taken at the decayed weights, and F = 0 for the dot loss. Columns of W do not meet: NV vectors
// of them are computed for the whole sequence, with W in the cache, before the next. Rows are passed in full (`Rows`), widths at run time.
//
// The backward pass runs a chunk of pairs, or what a document has of it, again from the weights that were kept at its start, and stores W
// before each of its pairs.

#include "native_vector.h"

struct Call {  // 8 bytes each, in the order of `NativeOnlineLinear._run`
    int64_t heads, pairs, each, rows, columns, chunk;  // pairs of a sequence, pairs of a token, d_in, d_out, pairs of a chunk
    int64_t erases, decayed, exclusive, by_channel;    // by_channel: a and da are [.., d_in]
    View k, v, q, p, b, eta, a, y, dy, dk, dv, dq, dp, db, deta, da;  // p, b, a: null data where there are none
    const float* start;  // [learners, rows, columns]
    float* after;        // the same
    float* kept;         // W at the start of each chunk, [learners, chunks, rows, columns]; null: not wanted
    const float* dafter;  // null: zero
    float* dstart;
    const bool* begins;   // [sequences, tokens]: a document begins with a token; null: none does
    const float* origin;  // weights that it begins with, [heads, rows, columns]
    float* dorigin;       // [learners, rows, columns], to be added to

    bool begin(int64_t batch, int64_t t) const { return begins && t % each == 0 && begins[(batch * pairs + t) / each]; }
};

namespace {

constexpr int64_t up(int64_t n) { return (n + VL - 1) / VL * VL; }

struct At {
    const Call& call;
    int64_t batch, head;
    const float* row(const View& view, int64_t t) const { return view.at(batch, head, t); }
    float number(const View& view, int64_t t) const { return *view.at(batch, head, t); }
};

inline void fetch(float* to, const float* from, int64_t n) {  // for a row, memcpy costs as much as the row
    int64_t i = 0;
    for (; i + VL <= n; i += VL) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = from[i];
}

// The rows of a pair, with zeros up to a multiple of VL.
struct Pair {
    Scratch<float> memory;
    const int64_t rows, columns;
    float *k, *p, *b, *q, *a, *v, *dy;
    float eta = 0, decay = 1;

    Pair(int64_t rows_, int64_t columns_) : memory(5 * up(rows_) + 2 * columns_), rows(up(rows_)), columns(columns_) {
        std::memset(memory.data, 0, (5 * rows + 2 * columns) * sizeof(float));
        k = memory.data, p = k + rows, b = p + rows, q = b + rows, a = q + rows, v = a + rows, dy = v + columns;
    }

    // `first` and `n`: columns that are computed; `token`: of q and dy, or −1.
    void read(const At& at, int64_t t, int64_t token, int64_t first, int64_t n, bool backward) {
        const Call& call = at.call;
        fetch(k, at.row(call.k, t), call.rows);
        fetch(v, at.row(call.v, t) + first, n);
        if (call.b.data) fetch(b, at.row(call.b, t), call.rows);
        eta = at.number(call.eta, t);
        if (call.a.data && call.by_channel) fetch(a, at.row(call.a, t), call.rows);
        else if (call.a.data) decay = at.number(call.a, t);
        if (call.erases) {
            fetch(p, at.row(call.p.data ? call.p : call.k, t), call.rows);
            if (call.decayed && call.a.data)
                for (int64_t i = 0; i < call.rows; ++i) p[i] *= call.by_channel ? a[i] : decay;
        }
        if (token < 0) return;
        fetch(q, at.row(call.q, token), call.rows);
        if (backward) fetch(dy, at.row(call.dy, token) + first, n);
    }
};

enum Decay { NONE, HEAD, CHANNEL };

// x W for rows x and NV vectors of columns. Two sums, since one would wait for itself.
template <int NV>
inline void times(const float* x, const float* w, int64_t rows, Vector (&result)[NV]) {
    Vector sum[NV] = {}, other[NV] = {};
    for (int64_t i = 0; i < rows; i += 2) {
        const Vector even = splat(x[i]), odd = splat(x[i + 1]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) {
            sum[v] += even * load(w + (i * NV + v) * VL);
            other[v] += odd * load(w + ((i + 1) * NV + v) * VL);
        }
    }
    for (int v = 0; v < NV; ++v) result[v] = sum[v] + other[v];
}

// W after a pair, from W before it (may be the same), and y = q W of the weights after it.
template <int NV, Decay DECAY, bool OTHER, bool READ>
inline void step(const Pair& x, const float* from, float* to, const Vector (&erase)[NV], const Vector (&write)[NV], Vector (&y)[NV]) {
    Vector sum[NV] = {}, other[NV] = {}, erased[NV], written[NV];
    for (int v = 0; v < NV; ++v) erased[v] = erase[v], written[v] = write[v];
    for (int64_t i = 0; i < x.rows; i += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            const int64_t r = i + odd;
            const Vector k = splat(x.k[r]), b = splat(x.b[r]), q = splat(x.q[r]), a = splat(DECAY == CHANNEL ? x.a[r] : x.decay);
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                Vector w = load(from + (r * NV + v) * VL);
                if (DECAY != NONE) w *= a;
                w += k * written[v];
                if (OTHER) w -= b * erased[v];
                store(to + (r * NV + v) * VL, w);
                if (READ) (odd ? other : sum)[v] += q * w;
            }
        }
    for (int v = 0; READ && v < NV; ++v) y[v] = sum[v] + other[v];
}

template <int NV, Decay DECAY>
struct Columns {
    static constexpr int64_t WIDTH = NV * VL;

    // One pair: W `from` to `to`; F (of the dot loss: 0), and y where the token is read.
    static inline void pair(const Call& call, const Pair& x, const float* from, float* to, Vector (&f)[NV], Vector (&y)[NV], bool begins, bool ends) {
        if (call.exclusive && begins) times<NV>(x.q, from, x.rows, y);
        for (int v = 0; v < NV; ++v) f[v] = Vector{};
        if (call.erases) times<NV>(x.p, from, x.rows, f);
        Vector erased[NV], written[NV];
        const bool other = call.erases && call.b.data, read = ends && !call.exclusive;
        for (int v = 0; v < NV; ++v) {
            erased[v] = x.eta * f[v];
            written[v] = x.eta * load(x.v + v * VL);
            if (!other) written[v] -= erased[v];
        }
        if (other && read) step<NV, DECAY, true, true>(x, from, to, erased, written, y);
        else if (other) step<NV, DECAY, true, false>(x, from, to, erased, written, y);
        else if (read) step<NV, DECAY, false, true>(x, from, to, erased, written, y);
        else step<NV, DECAY, false, false>(x, from, to, erased, written, y);
    }

    // `n` of the WIDTH columns exist.
    static void fetch_weights(float* to, const float* from, const Call& call, int64_t first, int64_t n) {
        for (int64_t r = 0; r < call.rows; ++r) fetch(to + r * WIDTH, from + r * call.columns + first, n);
    }
    static void put_weights(float* to, const float* from, const Call& call, int64_t first, int64_t n) {
        for (int64_t r = 0; r < call.rows; ++r) fetch(to + r * call.columns + first, from + r * WIDTH, n);
    }

    static void forward(const At& at, int64_t learner, int64_t first, int64_t n) {
        const Call& call = at.call;
        const int64_t size = call.rows * call.columns, chunks = (call.pairs + call.chunk - 1) / call.chunk;
        Pair x(call.rows, WIDTH);
        Scratch<float> w(x.rows * WIDTH);
        std::memset(w.data, 0, x.rows * WIDTH * sizeof(float));
        fetch_weights(w.data, call.start + learner * size, call, first, n);
        Vector f[NV], y[NV];
        for (int64_t t = 0; t < call.pairs; ++t) {
            if (call.begin(at.batch, t)) fetch_weights(w.data, call.origin + at.head * size, call, first, n);
            if (call.kept && t % call.chunk == 0) put_weights(call.kept + (learner * chunks + t / call.chunk) * size, w.data, call, first, n);
            const int64_t token = t / call.each, place = t % call.each;
            const bool begins = place == 0, ends = place == call.each - 1, reads = call.exclusive ? begins : ends;
            x.read(at, t, reads ? token : -1, first, n, false);
            pair(call, x, w.data, w.data, f, y, begins, ends);
            if (!reads) continue;
            alignas(64) float row[WIDTH];
            for (int v = 0; v < NV; ++v) store(row + v * VL, y[v]);
            fetch(call.y.at(at.batch, at.head, token) + first, row, n);
        }
        put_weights(call.after + learner * size, w.data, call, first, n);
    }

    // Adds the sums over lanes of `rows` vectors to a row of a cotangent, of which the first columns set the row.
    static inline void sum_lanes(float* to, const float* lanes, int64_t rows, bool set) {
        for (int64_t r = 0; r < rows; r += VL) {
            Vector x[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i) x[i] = load(lanes + (r + i) * VL);
            const Vector sums = totals(x);
            if (r + VL <= rows) {
                store(to + r, set ? sums : load(to + r) + sums);
                continue;
            }
            for (int64_t i = 0; r + i < rows; ++i) to[r + i] = set ? sums[i] : to[r + i] + sums[i];
        }
    }

    struct Lanes {  // of the rows of a pair: what is still to be summed over lanes
        Scratch<float> memory;
        float *k, *b, *p, *a, *q;
        explicit Lanes(int64_t rows) : memory(5 * rows * VL) {
            std::memset(memory.data, 0, 5 * rows * VL * sizeof(float));
            k = memory.data, b = k + rows * VL, p = b + rows * VL, a = p + rows * VL, q = a + rows * VL;
        }
    };

    // dW takes what the read and the pair's update say of W after the pair: sums over rows, and lanes of dk, db, dq.
    template <bool OTHER, bool READ>
    static inline void gather(const Pair& x, const float* after, float* dw, const Vector (&write)[NV], const Vector (&erase)[NV],
                              const Vector (&dread)[NV], Vector (&to_written)[NV], Vector (&to_erased)[NV], Lanes& lanes) {
        Vector along_k[NV] = {}, along_b[NV] = {}, written[NV], erased[NV], dy[NV];
        for (int v = 0; v < NV; ++v) written[v] = write[v], erased[v] = erase[v], dy[v] = dread[v];
        for (int64_t r = 0; r < x.rows; ++r) {
            const Vector k = splat(x.k[r]), b = splat(x.b[r]), q = splat(x.q[r]);
            Vector to_k = {}, to_b = {}, to_q = {};
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                const int64_t place = (r * NV + v) * VL;
                Vector d = load(dw + place);
                if (READ) {
                    d += q * dy[v];
                    store(dw + place, d);
                    to_q += load(after + place) * dy[v];
                }
                along_k[v] += k * d;
                to_k += d * written[v];
                if (OTHER) {
                    along_b[v] += b * d;
                    to_b -= d * erased[v];
                }
            }
            store(lanes.k + r * VL, to_k);
            if (OTHER) store(lanes.b + r * VL, to_b);
            if (READ) store(lanes.q + r * VL, to_q);
        }
        for (int v = 0; v < NV; ++v) to_written[v] = along_k[v], to_erased[v] = along_b[v];
    }

    // dW becomes the cotangent of W before the pair; lanes of dp', and of da by channel or in all.
    template <bool ERASES>
    static inline Vector release(const Pair& x, const float* before, float* dw, const Vector (&given)[NV], Lanes& lanes) {
        Vector all = {}, df[NV];
        for (int v = 0; v < NV; ++v) df[v] = given[v];
        for (int64_t r = 0; r < x.rows; ++r) {
            const Vector p = splat(x.p[r]), a = splat(DECAY == CHANNEL ? x.a[r] : x.decay);
            Vector to_p = {}, to_a = {};
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                const int64_t place = (r * NV + v) * VL;
                const Vector d = load(dw + place);
                Vector w = {};
                if (ERASES || DECAY != NONE) w = load(before + place);
                if (DECAY != NONE) to_a += d * w;
                Vector next = DECAY == NONE ? d : a * d;
                if (ERASES) {
                    to_p += w * df[v];
                    next += p * df[v];
                }
                if (ERASES || DECAY != NONE) store(dw + place, next);
            }
            if (ERASES) store(lanes.p + r * VL, to_p);
            if (DECAY == CHANNEL) store(lanes.a + r * VL, to_a);
            if (DECAY == HEAD) all += to_a;
        }
        return all;
    }

    static void backward(const At& at, int64_t learner, int64_t first, int64_t n) {
        const Call& call = at.call;
        const int64_t size = call.rows * call.columns, chunks = (call.pairs + call.chunk - 1) / call.chunk;
        const bool set = first == 0, other = call.erases && call.b.data;
        Pair x(call.rows, WIDTH);
        const int64_t state = x.rows * WIDTH;
        Scratch<float> states((call.chunk + 1) * state), fs(call.chunk * WIDTH), dw(state);
        Lanes lanes(x.rows);
        std::memset(states.data, 0, (call.chunk + 1) * state * sizeof(float));
        std::memset(dw.data, 0, state * sizeof(float));
        if (call.dafter) fetch_weights(dw.data, call.dafter + learner * size, call, first, n);
        alignas(64) float row[WIDTH];
        for (int64_t end = call.pairs, begin; end > 0; end = begin) {
            for (begin = end - 1; begin % call.chunk && !call.begin(at.batch, begin);) --begin;
            const bool fresh = call.begin(at.batch, begin);
            const float* now = fresh ? call.origin + at.head * size : call.kept + (learner * chunks + begin / call.chunk) * size;
            fetch_weights(states.data, now, call, first, n);
            for (int64_t t = begin; t < end; ++t) {
                Vector f[NV], y[NV];
                x.read(at, t, -1, first, n, false);
                pair(call, x, &states[(t - begin) * state], &states[(t - begin + 1) * state], f, y, false, false);
                for (int v = 0; v < NV; ++v) store(&fs[(t - begin) * WIDTH] + v * VL, f[v]);
            }
            for (int64_t t = end - 1; t >= begin; --t) {
                const int64_t token = t / call.each, place = t % call.each;
                const bool reads = place == (call.exclusive ? 0 : call.each - 1);
                x.read(at, t, reads ? token : -1, first, n, true);
                const float *before = &states[(t - begin) * state], *after = before + state;
                Vector dy[NV], written[NV], erased[NV], along_k[NV], along_b[NV], df[NV];
                for (int v = 0; v < NV; ++v) {
                    dy[v] = load(x.dy + v * VL);
                    erased[v] = x.eta * load(&fs[(t - begin) * WIDTH] + v * VL);
                    written[v] = x.eta * load(x.v + v * VL);
                    if (!other) written[v] -= erased[v];
                }
                const bool now = reads && !call.exclusive;
                if (other && now) gather<true, true>(x, after, dw.data, written, erased, dy, along_k, along_b, lanes);
                else if (other) gather<true, false>(x, after, dw.data, written, erased, dy, along_k, along_b, lanes);
                else if (now) gather<false, true>(x, after, dw.data, written, erased, dy, along_k, along_b, lanes);
                else gather<false, false>(x, after, dw.data, written, erased, dy, along_k, along_b, lanes);
                Vector to_eta = {};
                for (int v = 0; v < NV; ++v) {
                    const Vector b = other ? along_b[v] : along_k[v];
                    to_eta += load(x.v + v * VL) * along_k[v] - load(&fs[(t - begin) * WIDTH] + v * VL) * b;
                    df[v] = -x.eta * b;
                    store(row + v * VL, x.eta * along_k[v]);
                }
                fetch(call.dv.at(at.batch, at.head, t) + first, row, n);
                Vector to_a = call.erases ? release<true>(x, before, dw.data, df, lanes) : release<false>(x, before, dw.data, df, lanes);
                if (reads && call.exclusive)
                    for (int64_t r = 0; r < x.rows; ++r) {
                        Vector to_q = {};
                        for (int v = 0; v < NV; ++v) {
                            float* d = dw.data + (r * NV + v) * VL;
                            store(d, load(d) + x.q[r] * dy[v]);
                            to_q += load(before + (r * NV + v) * VL) * dy[v];
                        }
                        store(lanes.q + r * VL, to_q);
                    }
                if (call.erases) finish_erase(at, x, t, lanes, to_a, set);
                if (reads) sum_lanes(call.dq.at(at.batch, at.head, token), lanes.q, call.rows, set);
                sum_lanes(call.dk.at(at.batch, at.head, t), lanes.k, call.rows, set);
                if (other) sum_lanes(call.db.at(at.batch, at.head, t), lanes.b, call.rows, set);
                add(call.deta, at, t, total(to_eta), set);
                if (DECAY == CHANNEL) sum_lanes(call.da.at(at.batch, at.head, t), lanes.a, call.rows, set);
                if (DECAY == HEAD) add(call.da, at, t, total(to_a), set);
            }
            if (!fresh) continue;
            float* to = call.dorigin + learner * size + first;
            for (int64_t r = 0; r < call.rows; ++r)
                for (int64_t i = 0; i < n; ++i) to[r * call.columns + i] += dw[r * WIDTH + i];
            std::memset(dw.data, 0, state * sizeof(float));
        }
        put_weights(call.dstart + learner * size, dw.data, call, first, n);
    }

    static inline void add(const View& view, const At& at, int64_t t, float x, bool set) {
        float* to = view.at(at.batch, at.head, t);
        *to = set ? x : *to + x;
    }

    // From the lanes of dp' to those of dp, or of dk where k is p; and what the decay inside p' says of a.
    static inline void finish_erase(const At& at, const Pair& x, int64_t t, Lanes& lanes, Vector& to_a, bool set) {
        const Call& call = at.call;
        const float* p = at.row(call.p.data ? call.p : call.k, t);
        const bool decayed = DECAY != NONE && call.decayed;
        for (int64_t r = 0; r < call.rows; ++r) {
            Vector to_p = load(lanes.p + r * VL);
            if (decayed) {
                if (DECAY == CHANNEL) store(lanes.a + r * VL, load(lanes.a + r * VL) + p[r] * to_p);
                else to_a += p[r] * to_p;
                to_p *= DECAY == CHANNEL ? x.a[r] : x.decay;
            }
            if (call.p.data) store(lanes.p + r * VL, to_p);
            else store(lanes.k + r * VL, load(lanes.k + r * VL) + to_p);
        }
        if (call.p.data) sum_lanes(call.dp.at(at.batch, at.head, t), lanes.p, call.rows, set);
    }

    static void run(const At& at, int64_t learner, int64_t first, int64_t n, bool is_backward) {
        if (is_backward) backward(at, learner, first, n);
        else forward(at, learner, first, n);
    }
};

template <int NV>
void run(const At& at, int64_t learner, int64_t first, int64_t n, bool is_backward) {
    if (!at.call.a.data) Columns<NV, NONE>::run(at, learner, first, n, is_backward);
    else if (at.call.by_channel) Columns<NV, CHANNEL>::run(at, learner, first, n, is_backward);
    else Columns<NV, HEAD>::run(at, learner, first, n, is_backward);
}

int run(const Call& call, int64_t first, int64_t last, bool is_backward) try {
    for (int64_t learner = first; learner < last; ++learner) {
        const At at{call, learner / call.heads, learner % call.heads};
        for (int64_t column = 0; column < call.columns;) {
            const int64_t left = call.columns - column, vectors = left > 2 * VL ? 4 : left > VL ? 2 : 1, n = left < vectors * VL ? left : vectors * VL;
            if (vectors == 4) run<4>(at, learner, column, n, is_backward);
            else if (vectors == 2) run<2>(at, learner, column, n, is_backward);
            else run<1>(at, learner, column, n, is_backward);
            column += n;
        }
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

}  // namespace

extern "C" {

// Learners `first` to `last`: y, the weights after the sequence, and those at the start of each chunk if they are to be kept.
int forward(const Call* call, int64_t first, int64_t last) { return run(*call, first, last, false); }

// Learners `first` to `last`: all cotangents.
int backward(const Call* call, int64_t first, int64_t last) { return run(*call, first, last, true); }
}
