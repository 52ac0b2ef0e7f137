// A mini-batch between memory and tiles, the same for every kernel. Included by a kernel after it has defined its Step, which has members
// kq, inner and eta, read_hat: in the kernel's own namespace.

struct Place {
    int64_t batch, head, first;  // first: its first token
    const float *tau, *scale, *shift;
};

inline Place place(const Call& call, int64_t learner, int64_t i) {
    const int64_t head = learner % call.heads;
    return {learner / call.heads, head, i * B, call.tau + head * call.tau_head, call.scale + head * D, call.shift + head * D};
}

inline void load_mini_batch(const Call& call, const Place& at, Step& s) {
    load_tile(s.kq[0], call.k, at.batch, at.head, at.first);
    load_tile(s.kq[B], call.q, at.batch, at.head, at.first);
    load_tile(s.inner.gap[0], call.v, at.batch, at.head, at.first);
    for (int t = 0; t < B; ++t) {
        s.eta[t] = *call.eta.at(at.batch, at.head, at.first + t);
        for (int j = 0; j < D; j += VL) store(s.inner.gap[t] + j, load(s.kq[t] + j) + load(at.shift + j) - load(s.inner.gap[t] + j));
    }
}

inline void write(const Call& call, const Place& at, const Step& s) {  // y = q + γ x̂ + β
    for (int t = 0; t < B; ++t) {
        float* y = call.y.at(at.batch, at.head, at.first + t);
        for (int j = 0; j < D; j += VL)
            store(y + j, load(s.kq[B + t] + j) + load(at.shift + j) + load(at.scale + j) * load(s.read_hat[t] + j));
    }
}

inline void write_label_and_steps(const Call& call, const Place& at, const float (&dlabel)[B][D], const float (&deta)[B]) {  // dv, dη
    for (int t = 0; t < B; ++t) {
        float* dv = call.dv.at(at.batch, at.head, at.first + t);
        for (int j = 0; j < D; j += VL) store(dv + j, -load(dlabel[t] + j));
        *call.deta.at(at.batch, at.head, at.first + t) = deta[t];
    }
}
