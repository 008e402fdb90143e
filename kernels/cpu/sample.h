// Samples an id from logits: the largest logit, or a random sample. One row at a time, on one thread.
//
// A random sample takes one uniform number and the inverse of the cumulative distribution over ascending ids (Devroye,
// "Non-Uniform Random Variate Generation", 1986, chapter III.2). The filters are applied in order. Each cuts everything
// below some logit, so together they are one floor, and equal logits stay or go together. The vocabulary is never
// sorted: histograms that become finer around the threshold find it.
//
// Logits are read in strips, and a strip whose largest logit is below the floor costs one comparison. Weights are
// float32, sums of them float64 in an order that is the same on every ISA, so every ISA samples the same ids.
//
// Reference in NumPy: sample_reference.py. Torch: kernels/sampling/sample.py.
#pragma once

#include <cfloat>

#include "vec.h"

namespace sampling {

constexpr int STRIP = 64;           // logits
constexpr int BINS = 512;           // of a histogram
constexpr int FEW = 32;             // values that are not worth a histogram
constexpr float LOWEST = -FLT_MAX;  // the lowest logit that can be sampled: neither -inf nor NaN

INLINE int num_strips(int vocab) { return (vocab + STRIP - 1) / STRIP; }

// Scratch memory for sampling a row, in one uninitialized allocation.
struct SamplingScratch {
    SamplingScratch(uint8_t* memory, int vocab) {
        const int strips = num_strips(vocab);
        bins = take<double>(memory, BINS);
        sums = take<double>(memory, strips);
        tops = take<float>(memory, strips);
        tail = take<float>(memory, STRIP);
        values = take<float>(memory, (strips + 1) * STRIP);
        weights = take<float>(memory, (strips + 1) * STRIP);
    }

    static size_t bytes(int vocab) {
        const size_t strips = num_strips(vocab);
        return BINS * 8 + strips * (8 + 4) + STRIP * 4 + 2 * (strips + 1) * STRIP * 4;
    }

    double* bins;
    double* sums;    // of each strip's weights
    float* tops;     // each strip's largest logit
    float* tail;     // the last strip, where the vocabulary ends within it
    float* values;   // candidates, and a strip more than there can be
    float* weights;  // of each candidate

   private:
    template <class T>
    static T* take(uint8_t*& memory, size_t count) {
        T* const taken = reinterpret_cast<T*>(memory);
        memory += count * sizeof(T);
        return taken;
    }
};

// The largest of a strip's logits, -inf where it has none. NaN loses every comparison, so it counts as -inf.
INLINE float top_of(const float* strip) {
    vf tops = splat(-INFINITY);
    for (int i = 0; i < STRIP; i += LANES) tops = max(load<vf>(strip + i), tops);
    return largest(tops);
}

// A row of logits as whole strips, the last one filled up with -inf.
class Row {
   public:
    Row(const float* logits, int vocab, const SamplingScratch& memory)
        : logits_(logits), tail_(memory.tail), tops(memory.tops), strips(num_strips(vocab)), vocab(vocab) {
        const int rest = vocab % STRIP;
        if (rest) memcpy(memory.tail, logits + vocab - rest, rest * 4);
        for (int i = rest; i < STRIP; i++) memory.tail[i] = -INFINITY;
        for (int s = 0; s < strips; s++) {
            memory.tops[s] = top_of(strip(s));
            top = memory.tops[s] > top ? memory.tops[s] : top;
        }
    }

    const float* strip(int s) const { return (s + 1) * STRIP <= vocab ? logits_ + size_t(s) * STRIP : tail_; }

   private:
    const float *const logits_, *const tail_;

   public:
    const float* const tops;
    const int strips, vocab;
    float top = -INFINITY;
};

// exp((logit - top) / temperature): the weight of the largest logit is exactly 1. Halves are subtracted, so that no two
// finite logits are infinitely far apart.
class Softmax {
   public:
    Softmax(float top, float temperature)
        : temperature(temperature < FLT_MAX ? temperature : FLT_MAX), half_top_(0.5f * top),
          scale_(2.0f / this->temperature < FLT_MAX ? 2.0f / this->temperature : FLT_MAX) {}

    vf weights(vf logits) const { return exp_of(fma(logits, splat(0.5f), splat(-half_top_)) * splat(scale_)); }

    // Of logits below the floor the weight is 0.
    void strip_weights(const float* strip, float floor, float* weights) const {
        for (int i = 0; i < STRIP; i += LANES) {
            const vf logits = load<vf>(strip + i);
            store(weights + i, logits >= floor ? this->weights(logits) : vf{});
        }
    }

    const float temperature;

   private:
    const float half_top_, scale_;
};

INLINE double strip_sum(const float* weights) {
    double lanes[16] = {};
    for (int i = 0; i < STRIP; i += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += weights[i + lane];
    for (int width = 8; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

// Each strip's sum of the weights that the floor leaves. Returns the sum of all.
static inline double weigh(const Row& row, const Softmax& softmax, float floor, double* sums) {
    double total = 0;
    for (int s = 0; s < row.strips; s++) {
        sums[s] = 0;
        if (!(row.tops[s] >= floor)) continue;
        float weights[STRIP];
        softmax.strip_weights(row.strip(s), floor, weights);
        sums[s] = strip_sum(weights);
        total += sums[s];
    }
    return total;
}

// The logits that the floor leaves, in the order of their ids. Returns how many.
static inline int gather(const Row& row, float floor, float* values) {
    int num = 0;
    for (int s = 0; s < row.strips; s++) {
        if (!(row.tops[s] >= floor)) continue;
        const float* const strip = row.strip(s);
        for (int i = 0; i < STRIP; i++) {
            values[num] = strip[i];
            num += strip[i] >= floor;
        }
    }
    return num;
}

// The value at which the weights, added up from the largest value down, reach `wanted`; the smallest value if they do
// not. There is at least one value and all are finite; both arrays are overwritten.
//
// Each round bins the values evenly by size and goes on with the bin in which `wanted` is reached. The largest and the
// smallest value never share a bin, so a round leaves fewer values, and where it leaves many they span less than a
// 500th of the range before.
static inline float threshold(float* values, float* weights, int num, double wanted, double* bins) {
    double held = 0;
    while (num > FEW) {
        float high = values[0], low = values[0];
        for (int i = 1; i < num; i++) {
            high = values[i] > high ? values[i] : high;
            low = values[i] < low ? values[i] : low;
        }
        if (high == low) break;
        const double scale = (BINS - 1) / (double(high) - low);
        const auto bin = [=](float value) { return int((double(high) - value) * scale); };
        for (int b = 0; b < BINS; b++) bins[b] = 0;
        for (int i = 0; i < num; i++) bins[bin(values[i])] += weights[i];
        // Where sums were rounded down too far, the last bin that holds anything is the one.
        const int last = bin(low);
        int chosen = 0;
        while (chosen < last && held + bins[chosen] < wanted) held += bins[chosen++];
        int left = 0;
        for (int i = 0; i < num; i++) {
            const float value = values[i], weight = weights[i];
            values[left] = value;
            weights[left] = weight;
            left += bin(value) == chosen;
        }
        num = left;
    }
    for (float before = INFINITY;;) {
        float value = -INFINITY;
        for (int i = 0; i < num; i++)
            if (values[i] < before && values[i] > value) value = values[i];
        if (value == -INFINITY) return before;
        for (int i = 0; i < num; i++)
            if (values[i] == value) held += weights[i];
        if (held >= wanted) return value;
        before = value;
    }
}

// The smallest float32 that is not below `value`, or LOWEST.
INLINE float round_up(double value) {
    if (!(value > LOWEST)) return LOWEST;
    const float rounded = float(value);
    return rounded < value ? std::nextafterf(rounded, INFINITY) : rounded;
}

INLINE float min_p_floor(const Row& row, float temperature, float min_p) {
    return round_up(row.top + temperature * std::log(double(min_p < 1 ? min_p : 1)));
}

// The k-th largest logit, or the smallest that `floor` leaves if those are fewer.
static inline float top_k_floor(const Row& row, float floor, int k, const SamplingScratch& memory) {
    const auto kth = [&](int num) {
        for (int i = 0; i < num; i++) memory.weights[i] = 1;
        return threshold(memory.values, memory.weights, num, k, memory.bins);
    };
    // The k-th largest of the strips' largest can't be above it, so what is below that one need not be looked at.
    float reach = floor;
    if (k <= row.strips) {
        int num = 0;
        for (int s = 0; s < row.strips; s++)
            if (row.tops[s] >= floor) memory.values[num++] = row.tops[s];
        if (num >= k) reach = kth(num);
    }
    return kth(gather(row, reach, memory.values));
}

// The smallest of the fewest largest logits that hold `top_p` of the weight above `floor`. A logit stays while those
// above it do not hold enough.
static inline float top_p_floor(const Row& row, const Softmax& softmax, float floor, float top_p,
                                const SamplingScratch& memory) {
    const double share = top_p > 0 ? top_p : 0;
    const double total = weigh(row, softmax, floor, memory.sums);
    // Logits whose weights are below a V-th of what may go would hold less than that together, so the nucleus has none
    // of them. The hundredth is for rounding.
    const double rare = 0.99 * (1 - share) * total / row.vocab;
    const float reach = round_up(row.top + softmax.temperature * std::log(rare));
    const int num = gather(row, reach > floor ? reach : floor, memory.values);
    for (int i = 0; i < num; i += LANES) store(memory.weights + i, softmax.weights(load<vf>(memory.values + i)));
    return threshold(memory.values, memory.weights, num, share * total, memory.bins);
}

// The smallest logit that all filters keep. The row's largest logit is finite.
static inline float floor_of(const Row& row, const Softmax& softmax, int top_k, float top_p, float min_p,
                             const SamplingScratch& memory) {
    float floor = LOWEST;
    if (min_p > 0) floor = min_p_floor(row, softmax.temperature, min_p);
    if (top_k > 0 && top_k < row.vocab) floor = top_k_floor(row, floor, top_k, memory);
    if (top_p < 1) floor = top_p_floor(row, softmax, floor, top_p, memory);
    return floor;
}

// The id at which the weights, added up over rising ids, exceed the key's share of their sum. An id without weight is
// never returned.
static inline int32_t sample_by_cdf(const Row& row, const Softmax& softmax, float floor, uint64_t key, double* sums) {
    // At most 1 - 2^-53 of the sum, which rounds to less than the sum; so the strips' sums, added up in the same order,
    // exceed it.
    const double wanted = double(key >> 11) * 0x1p-53 * weigh(row, softmax, floor, sums);
    int chosen = 0;
    double held = 0;
    while (chosen < row.strips - 1 && held + sums[chosen] <= wanted) held += sums[chosen++];
    // Within a strip the order is another, and all of it may not be enough: then it is the last id with a weight.
    float weights[STRIP];
    softmax.strip_weights(row.strip(chosen), floor, weights);
    int last = 0;
    for (int i = 0; i < STRIP && held <= wanted; i++) {
        if (!(weights[i] > 0)) continue;
        last = i;
        held += weights[i];
    }
    return chosen * STRIP + last;
}

}  // namespace sampling

// Bytes of memory, aligned to 8, that a draw needs, and what comes before and after it (logits_processors.h,
// logprobs.h). They do not care what is in it.
INLINE size_t sample_scratch_bytes(int vocab) { return sampling::SamplingScratch::bytes(vocab); }

// The result if no token can be sampled.
constexpr int32_t NO_ID = -1;

// The id of the largest logit, of equal ones the lowest. NaN counts as -inf; with nothing above that, NO_ID.
static inline int32_t greedy(const float* logits, int vocab) {
    float top = -INFINITY;
    int from = 0, v = 0;
    for (; v + sampling::STRIP <= vocab; v += sampling::STRIP) {
        const float strip_top = sampling::top_of(logits + v);
        if (strip_top > top) top = strip_top, from = v;
    }
    for (; v < vocab; v++)
        if (logits[v] > top) top = logits[v], from = v;
    if (top == -INFINITY) return NO_ID;
    while (logits[from] != top) from++;
    return from;
}

// Draw an id with the probabilities of the softmax of logits [vocab] / temperature, of which the filters leave: min_p,
// those at least min_p as likely as the likeliest (0 is off); then top_k, the k likeliest (0 is off); then top_p, the
// fewest likeliest that hold top_p of what is left (1 is off). The likeliest always stays. `key` is 64 random bits.
//
// -inf and NaN have probability 0. Where the largest logit is infinite, or the temperature 0, the draw is greedy.
static inline int32_t sample(const float* logits, int vocab, float temperature, int top_k, float top_p, float min_p,
                           uint64_t key, uint8_t* scratch) {
    using namespace sampling;
    const SamplingScratch memory(scratch, vocab);
    const Row row(logits, vocab, memory);
    if (!std::isfinite(row.top) || !(temperature > 0)) return greedy(logits, vocab);
    const Softmax softmax(row.top, temperature);
    return sample_by_cdf(row, softmax, floor_of(row, softmax, top_k, top_p, min_p, memory), key, memory.sums);
}
