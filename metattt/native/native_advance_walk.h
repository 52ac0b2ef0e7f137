// The walk over learners and their tokens, for a kernel that has defined
//     constexpr int SIZES[]: numbers of each weight of a learner, in the order of its weights;
//     void take(const Token&, w, committed, m, updated): one token of one learner, whose arrays are as in `Advance`.
// And what Python calls. Included at the end of a kernel.

constexpr int COUNT = sizeof SIZES / sizeof SIZES[0];

template <class Pointer>
static inline void of_learner(Pointer const* arrays, int64_t learner, Pointer (&own)[COUNT]) {
    for (int i = 0; i < COUNT; ++i) own[i] = arrays[i] ? arrays[i] + learner * SIZES[i] : nullptr;
}

static inline void copy(const float* from, float* to, int64_t size) {
    if (to && to != from) std::memcpy(to, from, size * sizeof(float));
}

// 1 where a sequence's place is none in a mini-batch; its learners are then left alone.
extern "C" int advance(const Advance* call, int64_t first, int64_t last) {
    int wrong = 0;
    for (int64_t n = first; n < last; ++n) {
        const int64_t batch = n / call->heads, head = n % call->heads;
        const int64_t start = call->phases ? call->phases[batch] : call->phase;
        if (start < 0 || start + call->count > call->size) {
            wrong = 1;
            continue;
        }
        const float *w[COUNT], *m[COUNT];
        float *committed[COUNT], *updated[COUNT], *nothing[COUNT] = {};
        of_learner(call->weights, n, w), of_learner(call->update, n, m);
        of_learner(call->committed, n, committed), of_learner(call->updated, n, updated);
        for (int64_t t = 0; t < call->count; ++t) {
            const bool completes = start + t == call->size - 1;
            const Token token = {
                call->k.at(batch, head, t),
                call->v.at(batch, head, t),
                call->q.at(batch, head, t),
                *call->eta.at(batch, head, t),
                call->tau ? call->tau[head * call->tau_head + start + t] : 1.0f,
                call->scale + head * D,
                call->shift + head * D,
                call->y.at(batch, head, t),
            };
            take(token, w, completes ? committed : nothing, m, completes ? nothing : updated);
            for (int i = 0; i < COUNT; ++i) m[i] = updated[i];
            if (!completes) continue;
            for (int i = 0; i < COUNT; ++i)
                if (updated[i]) std::memset(updated[i], 0, SIZES[i] * sizeof(float));
        }
        if (start + call->count < call->size)  // W stays, and goes where it is wanted
            for (int i = 0; i < COUNT; ++i) copy(w[i], committed[i], SIZES[i]);
    }
    return wrong;
}
