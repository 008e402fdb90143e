// Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685): a matmul's results get B x (A x input) on top, with the
// A and B of the row's adapter. Rows of one step may have different adapters, or none.
//
// `Shrink` computes A x input of all projections with one input; the matmul (`Gemm` in linear.h) adds B x that to its
// tile. Each number is computed in one order of operations, whatever rows are beside it: so a row has the same bits
// alone and in any batch.
#pragma once

#include "step.h"

constexpr int LORA_TARGETS = 3;

// The matrices of one adapter in one layer, for the projections of one matmul, in bf16.
struct LoraAdapter {
    const uint16_t* a;                // [rank][depth]; those of all projections, one below the other
    const uint16_t* b[LORA_TARGETS];  // [outputs / 8][ranks[i]][8], in the order of the matmul's panels
    int ranks[LORA_TARGETS];          // 0: the adapter does not change this projection
    int rank;                         // the sum
};

// A place in the program where adapters change a matmul.
struct LoraSite {
    const LoraAdapter* adapters;  // [slots]
    float* shrunk;                // [tokens][stride]
    int stride;                   // the largest rank that an adapter may have
    int num_targets;
    int ends[LORA_TARGETS];  // the half panels of all projections up to each
    int interleaved;         // a panel has eight outputs of the first projection and eight of the second
    int depth;

    // values[r][...] += B x shrunk, of `panels` panels of a product from `first` on.
    void add(const Step& step, int product, int num_products, int first, int panels, int row, int count, float* values,
             int width) const {
        for (int r = 0; r < count; r++) {
            const int slot = step.adapters[row + r];
            if (slot < 0) continue;
            const LoraAdapter& adapter = adapters[slot];
            const float* small = shrunk + size_t(row + r) * stride;
            for (int half = 0; half < 2 * panels; half++) {
                int target = 0, place = 2 * first + half;
                if (interleaved) {
                    target = half % 2, place = first + half / 2;
                } else if (num_products > 1) {
                    target = product;
                } else {
                    while (target + 1 < num_targets && place >= ends[target]) target++;
                    if (target) place -= ends[target - 1];
                }
                add_half(adapter, target, place, small, values + size_t(r) * width + half * (PANEL / 2));
            }
        }
    }

   private:
#if defined(ISA_AVX512)
    INLINE f8 widened(const uint16_t* from) {
        typedef uint16_t eight_halves __attribute__((vector_size(16)));
        typedef uint32_t eight_words __attribute__((vector_size(32)));
        return bits<f8>(__builtin_convertvector(load<eight_halves>(from), eight_words) << 16);
    }
#else
    INLINE half_panel widened(const uint16_t* from) { return from_bf16(load<halves>(from)); }
#endif

    INLINE void add_half(const LoraAdapter& adapter, int target, int place, const float* small, float* values) {
        const int rank = adapter.ranks[target];
        for (int i = 0; i < target; i++) small += adapter.ranks[i];
        const uint16_t* b = adapter.b[target] + size_t(place) * rank * 8;
        for (int i = 0; i < PANEL / 2; i += HALF_PANEL) {
            half_panel sums = load<half_panel>(values + i);
            for (int k = 0; k < rank; k++) sums = fma(small[k] - half_panel{}, widened(b + 8 * k + i), sums);
            store(values + i, sums);
        }
    }
};

// shrunk = A x input. A tile is some ranks of one token.
class Shrink final : public Op {
   public:
    Shrink(const LoraSite& site, Rows in, Form form)
        : Op("lora_shrink"), site_(site), in_(in), form_(form), chunks_(ceil_div(site.stride, CHUNK)) {}

    int tiles(const Step& step) const override { return *step.num_adapted ? step.tokens * chunks_ : 0; }

    size_t scratch_bytes() const override { return size_t(site_.depth) * 4; }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int row = index / chunks_, first = index % chunks_ * CHUNK, slot = step.adapters[row];
        if (slot < 0) return;
        const LoraAdapter& adapter = site_.adapters[slot];
        const int end = std::min(first + CHUNK, adapter.rank);
        if (first >= end) return;
        const float* x = input(row, reinterpret_cast<float*>(scratch.memory));
        float* out = site_.shrunk + size_t(row) * site_.stride;
        int k = first;
        for (; k + 4 <= end; k += 4) multiply<4>(adapter.a, k, x, out);
        for (; k < end; k++) multiply<1>(adapter.a, k, x, out);
    }

    Cost cost(const Step& step) const override {
        Cost cost;
        for (int row = 0; *step.num_adapted && row < step.tokens; row++)
            if (const int slot = step.adapters[row]; slot >= 0) {
                const double size = double(site_.adapters[slot].rank) * site_.depth;
                cost.bytes += 2 * size + site_.depth * 4, cost.flops += 2 * size;
            }
        return cost;
    }

   private:
    static constexpr int CHUNK = 8;

    template <int COUNT>
    void multiply(const uint16_t* a, int first, const float* x, float* out) const {
        const int depth = site_.depth;
        const uint16_t* from = a + size_t(first) * depth;
        vf sums[COUNT] = {};
        int i = 0;
        for (; i + LANES <= depth; i += LANES) {
            const vf values = load<vf>(x + i);
            for (int k = 0; k < COUNT; k++) sums[k] = fma(from_bf16(load<halves>(from + size_t(k) * depth + i)), values, sums[k]);
        }
        for (int k = 0; k < COUNT; k++) {
            float total = sum(sums[k]);
            for (int j = i; j < depth; j++) total += from_bf16(from[size_t(k) * depth + j]) * x[j];
            out[first + k] = total;
        }
    }

    // A row of the matmul's input as floats.
    const float* input(int row, float* to) const {
        const int depth = site_.depth;
        if (form_ == Form::PLAIN) {
            const act* from = in_.plain(row);
            int i = 0;
            for (; i + LANES <= depth; i += LANES) store(to + i, load_acts(from + i));
            for (; i < depth; i++) to[i] = plain_value(from[i]);
            return to;
        }
        const float* scales = form_ == Form::BYTES ? in_.scales(row, depth) : in_.word_scales(row, depth);
        for (int g = 0; g < depth / GROUP; g++)
            for (int i = 0; i < GROUP; i++) to[g * GROUP + i] = float(code(row, g, i)) * scales[g];
        return to;
    }

    int code(int row, int group, int i) const {
        switch (form_) {
            case Form::BYTES: return in_.codes(row)[group * GROUP + i];
            case Form::WORDS: return in_.words(row)[group * GROUP + i];
            default: {
                const int8_t* codes = in_.codes(row) + group * SPLIT_GROUP_BYTES;
                return codes[i] * 16 + codes[GROUP + i];
            }
        }
    }

    static float plain_value(uint16_t value) { return from_bf16(value); }
    static float plain_value(float value) { return value; }

    const LoraSite& site_;
    const Rows in_;
    const Form form_;
    const int chunks_;
};
