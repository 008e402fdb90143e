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
    const uint16_t* a;                // [rank / 4][depth / 16][4][16], zeros at the ends; all projections, one after the
                                      // other
    const uint16_t* b[LORA_TARGETS];  // [outputs / 8][ranks[i]][8], in the order of the matmul's panels
    int ranks[LORA_TARGETS];          // 0: the adapter does not change this projection
    int rank;                         // the sum, up to a multiple of 4
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
            for (int panel = 0; panel < panels; panel++) {
                const Half low = half(adapter, product, num_products, first + panel, 0);
                const Half high = half(adapter, product, num_products, first + panel, 1);
                add_panel(low, high, small, values + size_t(r) * width + panel * PANEL);
            }
        }
    }

    // Fetches the B of some panels, while the matmul computes.
    void prefetch_panels(const Step& step, int product, int num_products, int first, int panels, int row, int count) const {
        for (int r = 0; r < count; r++) {
            const int slot = step.adapters[row + r];
            if (slot < 0 || (r && slot == step.adapters[row + r - 1])) continue;
            for (int panel = 0; panel < panels; panel++)
                for (int i = 0; i < 2; i++) {
                    const Half one = half(adapters[slot], product, num_products, first + panel, i);
                    prefetch<L2>(reinterpret_cast<const uint8_t*>(one.b), one.rank * PANEL);
                }
        }
    }

   private:
    // Half of a panel: its B, [rank][8], and where the results of its A begin.
    struct Half {
        const uint16_t* b;
        int rank, begin;
    };

    Half half(const LoraAdapter& adapter, int product, int num_products, int panel, int i) const {
        int target = 0, place = 2 * panel + i;
        if (interleaved) {
            target = i, place = panel;
        } else if (num_products > 1) {
            target = product;
        } else {
            while (target + 1 < num_targets && place >= ends[target]) target++;
            if (target) place -= ends[target - 1];
        }
        int begin = 0;
        for (int other = 0; other < target; other++) begin += adapter.ranks[other];
        const int rank = adapter.ranks[target];
        return {adapter.b[target] + size_t(place) * rank * 8, rank, begin};
    }

#if defined(ISA_AVX512)
    INLINE f8 widened(const uint16_t* from) {
        typedef uint16_t eight_halves __attribute__((vector_size(16)));
        typedef uint32_t eight_words __attribute__((vector_size(32)));
        return bits<f8>(__builtin_convertvector(load<eight_halves>(from), eight_words) << 16);
    }
#else
    INLINE half_panel widened(const uint16_t* from) { return from_bf16(load<halves>(from)); }
#endif

    // Both halves at once: each sum waits for the one before.
    static void add_panel(const Half& low, const Half& high, const float* small, float* values) {
        for (int i = 0; i < PANEL / 2; i += HALF_PANEL) {
            half_panel first = load<half_panel>(values + i), second = load<half_panel>(values + PANEL / 2 + i);
            const float *of_low = small + low.begin, *of_high = small + high.begin;
            const int both = std::min(low.rank, high.rank);
            int k = 0;
            for (; k < both; k++) {
                first = fma(of_low[k] - half_panel{}, widened(low.b + 8 * k + i), first);
                second = fma(of_high[k] - half_panel{}, widened(high.b + 8 * k + i), second);
            }
            for (int j = k; j < low.rank; j++) first = fma(of_low[j] - half_panel{}, widened(low.b + 8 * j + i), first);
            for (int j = k; j < high.rank; j++) second = fma(of_high[j] - half_panel{}, widened(high.b + 8 * j + i), second);
            store(values + i, first);
            store(values + PANEL / 2 + i, second);
        }
    }
};

// shrunk = A x input. A tile is some ranks of one token.
class Shrink final : public Op {
   public:
    Shrink(const LoraSite& site, Rows in, Form form)
        : Op("lora_shrink"), site_(site), in_(in), form_(form), chunks_(ceil_div(site.stride, CHUNK)) {}

    int tiles(const Step& step) const override { return *step.num_adapted ? step.tokens * chunks(step) : 0; }

    size_t scratch_bytes() const override { return size_t(padded()) * 4; }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int each = chunks(step), row = index / each, slot = step.adapters[row];
        if (slot < 0) return;
        const LoraAdapter& adapter = site_.adapters[slot];
        const int first = index % each * CHUNK, end = each == 1 ? adapter.rank : std::min(first + CHUNK, adapter.rank);
        if (first >= end) return;
        const float* x = input(row, reinterpret_cast<float*>(scratch.memory));
        float* out = site_.shrunk + size_t(row) * site_.stride;
        for (int k = first; k < end; k += 4) multiply(adapter.a + size_t(k) * padded(), x, out + k);
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
    static constexpr int CHUNK = 8, FEW_ROWS = 4;

    // Parts of a row's ranks, so that all threads have some of few rows.
    int chunks(const Step& step) const { return step.tokens < FEW_ROWS ? chunks_ : 1; }

    int padded() const { return (site_.depth + PANEL - 1) / PANEL * PANEL; }

    // Four ranks.
    void multiply(const uint16_t* a, const float* x, float* out) const {
        vf sums[4] = {};
        for (int i = 0; i < padded(); i += PANEL, a += 4 * PANEL)
            for (int j = 0; j < PANEL; j += LANES) {
                const vf values = load<vf>(x + i + j);
                for (int k = 0; k < 4; k++) sums[k] = fma(from_bf16(load<halves>(a + k * PANEL + j)), values, sums[k]);
            }
        for (int k = 0; k < 4; k++) out[k] = sum(sums[k]);
    }

    // A row of the matmul's input as floats, with zeros up to `padded`.
    const float* input(int row, float* to) const {
        const int depth = site_.depth;
        int i = 0;
        if (form_ == Form::PLAIN) {
            const act* from = in_.plain(row);
            for (; i + LANES <= depth; i += LANES) store(to + i, load_acts(from + i));
            for (; i < depth; i++) to[i] = plain_value(from[i]);
        } else if (form_ == Form::BLOCKS) {
            typedef int8_t bytes __attribute__((vector_size(LANES)));
            const float* scales = in_.block_scales(row, depth);
            for (; i < depth; i += LANES) {
                const int8_t* from = in_.block_bytes(row, depth) + i / GROUP * SPLIT_GROUP_BYTES + i % GROUP;
                const vf upper = __builtin_convertvector(load<bytes>(from), vf) * 256.0f;
                store(to + i, (upper + __builtin_convertvector(load<bytes>(from + GROUP), vf)) * scales[i / BLOCK_DEPTH]);
            }
        } else {
            const float* scales = form_ == Form::BYTES ? in_.scales(row, depth) : in_.word_scales(row, depth);
            for (; i + LANES <= depth; i += LANES)
                store(to + i, codes(row, i / GROUP, i % GROUP) * scales[i / GROUP]);
        }
        for (; i < padded(); i++) to[i] = 0;
        return to;
    }

    // LANES codes of a group, from the i-th on.
    vf codes(int row, int group, int i) const {
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        typedef int16_t words __attribute__((vector_size(2 * LANES)));
        switch (form_) {
            case Form::BYTES: return __builtin_convertvector(load<bytes>(in_.codes(row) + group * GROUP + i), vf);
            case Form::WORDS: return __builtin_convertvector(load<words>(in_.words(row) + group * GROUP + i), vf);
            default: {
                const int8_t* from = in_.codes(row) + group * SPLIT_GROUP_BYTES + i;
                return __builtin_convertvector(load<bytes>(from), vf) * 16.0f +
                       __builtin_convertvector(load<bytes>(from + GROUP), vf);
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
