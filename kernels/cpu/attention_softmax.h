// The softmax of attention: scores of a stretch of keys become weights, in the order in which the rows meet their keys.
#pragma once

#include "attention_part.h"

template <KVType TYPE>
using AttentionNumber = std::conditional_t<INTEGERS<TYPE>, int16_t, act>;

constexpr float LARGEST_CODE = 32767.0f;

// Rounds to integers of 16 bits.
INLINE void store_codes(int16_t* to, vf values) {
    typedef int16_t words __attribute__((vector_size(2 * LANES)));
    constexpr float round = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    store(to, __builtin_convertvector(bits<vi>(values + round), words));
}

// Whether the sums of no row have begun; else zeroes those that have not. They begin with the first key that a row meets.
INLINE bool begin_sums(const float* top, int count, float* out, int dim) {
    int begun = 0;
    for (int r = 0; r < count; r++) begun += top[r] > -INFINITY;
    for (int r = 0; begun && r < count; r++)
        if (!(top[r] > -INFINITY)) memset(out + size_t(r) * dim, 0, dim * 4);
    return !begun;
}

// Makes the scores before `first` and from `end` on -INFINITY. With whole vectors: the next loads of the same vectors
// would have to wait for smaller stores.
template <int KEYS>
INLINE void mask(float* scores, int first, int end) {
    vi lanes;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    const int before = std::min(first, KEYS);
    for (int i = 0; i < before; i += LANES)
        store(scores + i, lanes + i < first ? -INFINITY - vf{} : load<vf>(scores + i));
    for (int i = std::max(end, 0) / LANES * LANES; i < KEYS; i += LANES)
        store(scores + i, lanes + i >= end ? -INFINITY - vf{} : load<vf>(scores + i));
}

// Turns the scores of KEYS keys into softmax weights. Row r attends to the keys first[r] .. end[r]; none of these may
// be among them. Sums so far are to be multiplied with `shrinks`. Each loop goes over all rows, because the operations
// of a single row depend on each other.
template <KVType TYPE, int KEYS>
static void softmax(const AttentionPart<AttentionNumber<TYPE>>& part, int count, const int32_t* first,
                    const int32_t* end, int key, float* top, vf* total, float* shrinks, const Stretch& stretch,
                    Ahead<TYPE>& ahead) {
    static_assert(ATTENTION_ROWS <= LANES);
    float changes[LANES] = {};
    bool is_empty[LANES];
    ahead.prefetch_part(8);
    for (int r = 0; r < count; r++) {
        float* scores = part.scores + r * STRETCH;
        if (first[r] > key || end[r] < key + KEYS) mask<KEYS>(scores, first[r] - key, end[r] - key);
        ahead.prefetch_part(32);
        vf highest = load<vf>(scores);
        for (int i = LANES; i < KEYS; i += LANES) highest = max(highest, load<vf>(scores + i));
        const float now = largest(highest), before = top[r];
        is_empty[r] = first[r] >= key + KEYS || end[r] <= key;
        top[r] = now > before ? now : before;
        changes[r] = now > before ? before - now : 0.0f;
    }
    store(shrinks, exp_of_negative(load<vf>(changes)));
    float scales[KEYS];
    for (int b = 0; TYPE == KVType::INT8 && b < KEYS / BLOCK; b++)
        for (int i = 0; i < BLOCK; i += LANES) store(scales + b * BLOCK + i, load_scales(stretch.scales[b] + BLOCK + i));
    for (int r = 0; r < count; r++) {
        float* scores = part.scores + r * STRETCH;
        AttentionNumber<TYPE>* weights = part.weights + r * STRETCH;
        if (is_empty[r]) {
            memset(weights, 0, KEYS * sizeof(AttentionNumber<TYPE>));
            if constexpr (INTEGERS<TYPE>) part.weight_scales[r] = 0;
            continue;
        }
        ahead.prefetch_part(32);
        vf sums{}, largest_weight{};
        for (int i = 0; i < KEYS; i += LANES) {
            const vf weight = exp_of_negative(load<vf>(scores + i) - top[r]);
            sums += weight;
            if constexpr (TYPE == KVType::BF16) {
                store_acts(weights + i, weight);
            } else {
                // What is not attended to has any scale. A NaN of the others must not be lost in integers.
                const vf scaled = weight == 0.0f ? vf{} : weight * load<vf>(scales + i);
                sums = fma(scaled, vf{}, sums);
                if constexpr (INTEGERS<TYPE>) {
                    store(scores + i, scaled);
                    largest_weight = max(largest_weight, scaled);
                } else {
                    store_acts(weights + i, scaled);
                }
            }
        }
        if constexpr (INTEGERS<TYPE>) {
            const float most = largest(largest_weight), inverse = most > 1e-30f ? LARGEST_CODE / most : 0.0f;
            part.weight_scales[r] = most / LARGEST_CODE;
            for (int i = 0; i < KEYS; i += LANES) store_codes(weights + i, load<vf>(scores + i) * inverse);
        }
        total[r] = total[r] * shrinks[r] + sums;
    }
}
