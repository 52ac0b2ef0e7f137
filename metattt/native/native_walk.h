// The walk over groups of mini-batches, for a kernel that has defined State, Step, load_state, store_state, forward_step and
// backward_step; and what Python calls. Included at the end of a kernel.

extern "C" {

int64_t state_size() { return sizeof(State) / sizeof(float); }

// Learners `first` to `last`: y and the weights after the sequence; the state at the start of each group if it is to be kept.
int forward(const Call* call, int64_t first, int64_t last) try {
    Scratch<State> state(1);
    Scratch<Step> step(1);
    const int64_t groups = (call->count + call->group - 1) / call->group;
    State* kept = reinterpret_cast<State*>(call->kept);
    for (int64_t n = first; n < last; ++n) {
        load_state(call->start, n, state[0]);
        for (int64_t i = 0; i < call->count; ++i) {
            if (call->begin(n, i)) load_state(call->origin, n % call->heads, state[0]);
            if (kept && i % call->group == 0) std::memcpy(&kept[n * groups + i / call->group], &state[0], sizeof(State));
            const Place at = place(*call, n, i);
            forward_step<false>(*call, at, state[0], &state[0], step[0]);
            write(*call, at, step[0]);
        }
        store_state(call->after, n, state[0]);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

// Learners `first` to `last`: all cotangents. A group, or what a document has of it, runs again from its kept state, then backwards.
int backward(const Call* call, int64_t first, int64_t last) try {
    const int64_t group = call->group < call->count ? call->group : call->count, groups = (call->count + call->group - 1) / call->group;
    Scratch<State> states(group), moving(1), origin(2);  // origin: the weights that a document begins with, and their cotangent
    Scratch<Step> steps(group);
    const State* kept = reinterpret_cast<const State*>(call->kept);
    for (int64_t n = first; n < last; ++n) {
        load_state(call->dafter, n, moving[0]);
        if (call->begins) {
            load_state(call->origin, n % call->heads, origin[0]);
            std::memset(&origin[1], 0, sizeof(State));
        }
        for (int64_t end = call->count, start; end > 0; end = start) {
            for (start = end - 1; start % call->group && !call->begin(n, start);) --start;
            const bool begun = call->begin(n, start);
            const State* now = begun ? &origin[0] : &kept[n * groups + start / call->group];
            const int64_t size = end - start;
            for (int64_t i = 0; i < size; ++i) {
                State* next = i + 1 < size ? &states[i + 1] : nullptr;
                forward_step<true>(*call, place(*call, n, start + i), i ? states[i] : *now, next, steps[i]);
            }
            for (int64_t i = size - 1; i >= 0; --i)
                backward_step(*call, place(*call, n, start + i), n, i ? states[i] : *now, steps[i], moving[0]);
            if (!begun) continue;
            const float* from = reinterpret_cast<const float*>(&moving[0]);
            float* to = reinterpret_cast<float*>(&origin[1]);
            for (int64_t i = 0; i < state_size(); ++i) to[i] += from[i];
            std::memset(&moving[0], 0, sizeof(State));
        }
        store_state(call->dstart, n, moving[0]);
        if (call->begins) store_state(call->dorigin, n, origin[1]);
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

}  // extern "C"
