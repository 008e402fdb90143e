// What is told of an id besides the id: its log probability by a row's logits as they are, and the likeliest ids with
// theirs. One row at a time, on one thread. Torch: kernels/sampling/logprobs.py.
#pragma once

#include <algorithm>

#include "sample.h"

namespace sampling {

// The `num` likeliest ids of all, likeliest first, of equal ones the lowest first; NaN counts as -inf. Only what is
// found is sorted.
static inline void find_top(const Row& row, const float* logits, int num, const SamplingScratch& memory, int32_t* out) {
    const auto value = [=](int32_t id) { return logits[id] > -INFINITY ? logits[id] : -INFINITY; };
    const auto likelier = [=](int32_t a, int32_t b) {
        return value(a) > value(b) || (value(a) == value(b) && a < b);
    };
    int32_t* const found = reinterpret_cast<int32_t*>(memory.values);
    if (!std::isfinite(row.top)) {
        // A model that is broken: no way to be quick here.
        for (int v = 0; v < row.vocab; v++) found[v] = v;
        std::partial_sort(found, found + num, found + row.vocab, likelier);
    } else {
        const float floor = num < row.vocab ? top_k_floor(row, LOWEST, num, memory) : LOWEST;
        int held = 0;
        const auto hold = [&](auto wanted) {
            for (int s = 0; s < row.strips; s++) {
                if (!(row.tops[s] >= floor)) continue;
                const float* const strip = row.strip(s);
                for (int i = 0; i < STRIP && held < num; i++)
                    if (wanted(strip[i])) found[held++] = s * STRIP + i;
            }
        };
        // Fewer than `num` are above the floor; of those at it the lowest ids fill up.
        hold([=](float logit) { return logit > floor; });
        hold([=](float logit) { return logit == floor; });
        std::sort(found, found + held, likelier);
        for (int v = 0; held < num; v++)
            if (!(logits[v] >= LOWEST)) found[held++] = v;
    }
    memcpy(out, found, num * sizeof(int32_t));
}

}  // namespace sampling

// Write the logprobs of an id: the natural logarithm of its probability by the softmax of logits [vocab]; the `num_top`
// likeliest ids, or the ids `given` if that is not null; their logarithms. `out` is aligned to 4 and has room for all of
// it. After the last id of the vocabulary come -1 with -inf. Sums are those of inputs, so logprobs are the same on every
// ISA. If the largest logit is infinite, the logarithm is 0 for its ids and -inf for others; never NaN. `memory` is of
// sample_scratch_bytes.
static inline void write_logprobs(const float* logits, int vocab, int32_t id, int num_top, const int32_t* given,
                                  uint8_t* out, uint8_t* scratch) {
    using namespace sampling;
    const SamplingScratch memory(scratch, vocab);
    const Row row(logits, vocab, memory);
    const bool finite = std::isfinite(row.top);
    const double log_total = finite ? std::log(weigh(row, Softmax(row.top, 1), LOWEST, memory.sums)) : 0;
    const auto logprob = [&](int32_t id) {
        const float logit = logits[id] > -INFINITY ? logits[id] : -INFINITY;
        if (!finite) return logit == row.top ? 0.0f : -INFINITY;
        return float(double(logit) - row.top - log_total);
    };
    int32_t* const ids = reinterpret_cast<int32_t*>(out + 4);
    float* const values = reinterpret_cast<float*>(out + 4 + 4 * size_t(num_top));
    *reinterpret_cast<float*>(out) = logprob(id);
    const int num = given ? num_top : std::min(num_top, vocab);
    if (given)
        memcpy(ids, given, num * sizeof(int32_t));
    else if (num > 0)
        find_top(row, logits, num, memory, ids);
    for (int i = 0; i < num_top; i++) {
        if (i >= num) ids[i] = NO_ID;
        values[i] = i < num ? logprob(ids[i]) : -INFINITY;
    }
}
