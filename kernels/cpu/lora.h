// Low-rank adapters (LoRA; Hu et al., 2021, arXiv:2106.09685): a matmul's results get B x (A x input) on top, with the
// A and B of the row's adapter. Rows of one step may have different adapters, or none.
//
// `Shrink` computes A x input of all projections with one input; the matmul (`Gemm` in linear.h) adds B x that to its
// tile. Both multiply what a bf16 matmul does: pairs of bfloat16 where the CPU has an instruction for them, else float32.
// Each number is computed in one order of operations, whatever rows are beside it: so a row has the same bits alone and
// in any batch.
#pragma once

#include "step.h"

constexpr int LORA_TARGETS = 3;

// The matrices of one adapter in one layer, for the projections of one matmul, in bf16.
struct LoraAdapter {
    const uint16_t* a;                // [rank / 4][depth / 32][4][32], zeros at the ends; all projections, one after the
                                      // other. Without DOT_BF16, each 32 are in the order 0, 16, 1, 17, ..., 15, 31: the
                                      // halves of words are what is multiplied with neighbours of the input
    const uint16_t* b[LORA_TARGETS];  // [panels][ranks[i] / 2][16][2], in the order of the matmul's panels; if they are
                                      // interleaved, the first is of both projections
    int ranks[LORA_TARGETS];          // multiples of 4; 0: the adapter does not change this projection. Interleaved ones
                                      // have the same
    int rank;                         // the sum
};

class Shrink;

// A place in the program where adapters change a matmul.
struct LoraSite {
    const LoraAdapter* adapters;  // [slots]
    act* shrunk;                  // [tokens][stride]
    int stride;                   // the largest rank that an adapter may have
    int num_targets;
    int ends[LORA_TARGETS];  // the panels of all projections up to each
    int interleaved;         // a panel has eight outputs of the first projection and eight of the second
    int depth;
    const Shrink* next;  // of the matmul after this one, or null

    // values[r][...] += B x shrunk, of `panels` panels of a product from `first` on.
    void add(const Step& step, int product, int num_products, int first, int panels, int row, int count, float* values,
             int width) const {
        for (int r = 0; r < count; r++) {
            const int slot = step.adapters[row + r];
            if (slot < 0) continue;
            const act* small = shrunk + size_t(row + r) * stride;
            each_part(adapters[slot], product, num_products, first, panels, [&](const Part& part) {
                add_part(part, small + part.begin, values + size_t(r) * width + (part.first - first) * PANEL);
            });
        }
    }

    // The B of some panels, for the matmul to fetch.
    void add_lines(const Step& step, int product, int num_products, int first, int panels, int row, int count,
                   Lines& lines) const {
        for (int r = 0; r < count; r++) {
            const int slot = step.adapters[row + r];
            if (slot < 0 || (r && slot == step.adapters[row + r - 1])) continue;
            each_part(adapters[slot], product, num_products, first, panels, [&](const Part& part) {
                lines.add(part.b, int64_t(part.panels) * part.rank * PANEL * 2);
            });
        }
    }

   private:
    // Panels of one projection: their B, and where the results of its A begin.
    struct Part {
        const uint16_t* b;
        int first, panels, rank, begin;
    };

    template <class Work>
    void each_part(const LoraAdapter& adapter, int product, int num_products, int first, int panels, const Work& work) const {
        if (interleaved || num_products > 1) {
            int begin = 0;
            for (int other = 0; other < product; other++) begin += adapter.ranks[other];
            if (const int rank = adapter.ranks[product])
                work(Part{adapter.b[product] + size_t(first) * rank * PANEL, first, panels, rank, begin});
            return;
        }
        for (int target = 0, begin = 0, from = 0; target < num_targets; target++) {
            const int low = std::max(first, from), high = std::min(first + panels, ends[target]), rank = adapter.ranks[target];
            if (low < high && rank)
                work(Part{adapter.b[target] + size_t(low - from) * rank * PANEL, low, high - low, rank, begin});
            begin += rank, from = ends[target];
        }
    }

    void add_part(const Part& part, const act* small, float* values) const {
        interleaved ? add_part<true>(part, small, values) : add_part<false>(part, small, values);
    }

    template <bool INTERLEAVED>
    static void add_part(const Part& part, const act* small, float* values) {
        int panel = 0;
        for (; panel + 4 <= part.panels; panel += 4) add_panels<INTERLEAVED, 4>(part, panel, small, values);
        for (; panel + 2 <= part.panels; panel += 2) add_panels<INTERLEAVED, 2>(part, panel, small, values);
        for (; panel < part.panels; panel++) add_panels<INTERLEAVED, 1>(part, panel, small, values);
    }

    // Several at once: each sum waits for the one before.
    template <bool INTERLEAVED, int P>
    static void add_panels(const Part& part, int panel, const act* small, float* values) {
        const act* other = small + (INTERLEAVED ? part.rank : 0);  // of the upper half of a panel
        const size_t each = size_t(part.rank) * PANEL;
        const uint16_t* b = part.b + panel * each;
        values += panel * PANEL;
        vf sums[P][VECTORS];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) sums[p][v] = load<vf>(values + p * PANEL + v * LANES);
        for (int k = 0; k < part.rank; k += 2, b += 2 * PANEL) {
#if defined(DOT_BF16)
            const vu pair = halves_of<INTERLEAVED, vu>(load<uint32_t>(small + k), load<uint32_t>(other + k), 0);
            for (int p = 0; p < P; p++) sums[p][0] = dot_bf16(sums[p][0], load<vu>(b + p * each), pair);
#else
            for (int v = 0; v < VECTORS; v++) {
                const vf first = halves_of<INTERLEAVED, vf>(small[k], other[k], v);
                const vf second = halves_of<INTERLEAVED, vf>(small[k + 1], other[k + 1], v);
                for (int p = 0; p < P; p++) {
                    const vu words = load<vu>(b + p * each + v * 2 * LANES);
                    sums[p][v] = fma(first, bits<vf>(words << 16), sums[p][v]);
                    sums[p][v] = fma(second, bits<vf>(words & 0xFFFF0000u), sums[p][v]);
                }
            }
#endif
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) store(values + p * PANEL + v * LANES, sums[p][v]);
    }

    // Vector `v` of a panel that has one number in its lower half and another one in its upper half; the first one in both
    // if they are not interleaved.
    template <bool INTERLEAVED, class Vector, class Number>
    static Vector halves_of(Number low, Number high, [[maybe_unused]] int v) {
        const Vector lower = low - Vector{};
        if constexpr (!INTERLEAVED) return lower;
        const Vector upper = high - Vector{};
#if defined(ISA_AVX512)
        return __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
#else
        return v < VECTORS / 2 ? lower : upper;
#endif
    }
};

// shrunk = A x input. A tile is some ranks of one token, or of a few in a step with many. In steps of some tokens, the op
// that writes the input computes it, if it is one that writes row by row: that saves a round of all threads, and a row is
// in the cache of the thread that needs it.
class Shrink final : public Op, public RowWork {
   public:
    Shrink(const LoraSite& site, Rows in, ActivationForm form)
        : Op("lora_shrink", true), site_(site), in_(in), form_(form), chunks_(ceil_div(site.stride, CHUNK)) {}

    bool follows = false;  // another op computes each row of steps in which that is due

    // A part of the matrices that a thread reads, `at` of `num`, for an earlier matmul to fetch.
    void add_lines(const Step& step, int thread, int threads, int at, int num, Lines& lines) const {
        if (!is_due(step)) return;
        const int first = int(int64_t(step.tokens) * thread / threads), end = int(int64_t(step.tokens) * (thread + 1) / threads);
        for (int row = first; row < end; row++) {
            const int slot = step.adapters[row];
            if (slot < 0 || (row > first && slot == step.adapters[row - 1])) continue;
            const int64_t bytes = int64_t(site_.adapters[slot].rank) * padded() * 2;
            const int64_t begin = bytes * at / num / LINE * LINE;
            lines.add(reinterpret_cast<const uint8_t*>(site_.adapters[slot].a) + begin,
                      bytes * (at + 1) / num / LINE * LINE - begin);
        }
    }

    bool is_due(const Step& step) const override {
        return *step.num_adapted && step.tokens >= FEW_ROWS && step.tokens < MANY_ROWS;
    }

    void compute(const Step& step, int row, int next, uint8_t* memory) const override {
        const int slot = step.adapters[row];
        if (slot < 0) return;
        const LoraAdapter& adapter = site_.adapters[slot];
        if (adapter.rank) multiply(adapter, 0, adapter.rank, row, 1, next_a(step, next, slot), reinterpret_cast<act*>(memory));
    }

    int tiles(const Step& step) const override {
        if (follows && is_due(step)) return 0;
        return *step.num_adapted ? ceil_div(step.tokens, rows_each(step)) * chunks(step) : 0;
    }

    size_t scratch_bytes() const override { return size_t(MOST_ROWS_AT_ONCE) * padded() * sizeof(act); }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const int each = chunks(step), most = rows_each(step), begin = index / each * most;
        const int end = std::min(begin + most, step.tokens), chunk = index % each;
        for (int row = begin, count; row < end; row += count) {
            const int slot = step.adapters[row];
            for (count = 1; row + count < end && step.adapters[row + count] == slot;) count++;
            if (slot < 0) continue;
            const LoraAdapter& adapter = site_.adapters[slot];
            const int first = chunk * CHUNK, last = each == 1 ? adapter.rank : std::min(first + CHUNK, adapter.rank);
            if (first >= last) continue;
            const int next = row + count < end ? row + count : scratch.next / each * most;
            multiply(adapter, first, last, row, count, each == 1 ? next_a(step, next, slot) : nullptr,
                     reinterpret_cast<act*>(scratch.memory));
        }
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
    static constexpr int CHUNK = 16, RANKS = 4, DEPTH = 32, AHEAD = 2048;
    // Steps with fewer rows divide ranks among the threads; those with many read a matrix once for some of them.
    static constexpr int FEW_ROWS = 4, MANY_ROWS = 64;
    static constexpr int MOST_ROWS_AT_ONCE = LANES == 16 ? 4 : 2;  // as many as have their sums in registers

    int chunks(const Step& step) const { return step.tokens < FEW_ROWS ? chunks_ : 1; }
    int rows_each(const Step& step) const { return step.tokens < MANY_ROWS ? 1 : MOST_ROWS_AT_ONCE; }
    // The matrix that is read after that of `slot`: that of a row.
    const uint16_t* next_a(const Step& step, int row, int slot) const {
        if (row >= step.tokens || step.adapters[row] < 0 || step.adapters[row] == slot) return nullptr;
        return site_.adapters[step.adapters[row]].a;
    }

    int padded() const { return (site_.depth + DEPTH - 1) / DEPTH * DEPTH; }

    // `next` is read after this, or null.
    void multiply(const LoraAdapter& adapter, int first, int last, int row, int count, const uint16_t* next,
                  act* memory) const {
        const act* from[MOST_ROWS_AT_ONCE];
        for (int r = 0; r < count; r++) from[r] = input(row + r, memory + size_t(r) * padded());
        switch (count) {
            case 1: return multiply_rows<1>(adapter, first, last, row, from, next);
            case 2: return multiply_rows<2>(adapter, first, last, row, from, next);
            case 3: return multiply_rows<LANES == 16 ? 3 : 1>(adapter, first, last, row, from, next);
            default: return multiply_rows<LANES == 16 ? 4 : 1>(adapter, first, last, row, from, next);
        }
    }

    template <int R>
    void multiply_rows(const LoraAdapter& adapter, int first, int last, int row, const act* const* from,
                       const uint16_t* next) const {
        const uint16_t* a = adapter.a + size_t(first) * padded();
        // Fetches the ranks after those that are computed, and at the end the beginning of what this thread reads next.
        Ahead ahead{a, adapter.a + size_t(last) * padded(), next};
        for (int i = 0; i < AHEAD; i += RANKS * DEPTH) ahead.fetch<RANKS>();
        // Each sum waits for the one before, so one row has two groups of ranks at once.
        constexpr int MOST = R == 1 ? 2 : 1;
        int rank = first;
        for (; rank + MOST * RANKS <= last; rank += MOST * RANKS, a += size_t(MOST * RANKS) * padded())
            multiply_ranks<R, MOST>(a, rank, row, from, ahead);
        for (; rank < last; rank += RANKS, a += size_t(RANKS) * padded()) multiply_ranks<R, 1>(a, rank, row, from, ahead);
    }

    // Lines that are needed soon.
    struct Ahead {
        const uint16_t *at, *end, *next;

        template <int LINES>
        __attribute__((always_inline)) void fetch() {
            if (at >= end) {
                if (!next) return;
                at = next, end = next + AHEAD, next = nullptr;
            }
            for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * DEPTH, 0, L2);
            at += LINES * DEPTH;
        }
    };

    template <int R, int GROUPS>
    void multiply_ranks(const uint16_t* a, int rank, int row, const act* const* from, Ahead& ahead) const {
        const int depth = padded();
        const size_t each = size_t(RANKS) * depth;
        const act* rows[R];
        for (int r = 0; r < R; r++) rows[r] = from[r];
        vf sums[R][GROUPS * RANKS] = {};
        for (int i = 0; i < depth; i += DEPTH, a += RANKS * DEPTH) {
            ahead.fetch<GROUPS * RANKS>();
#if defined(DOT_BF16)
            for (int k = 0; k < GROUPS * RANKS; k++) {
                const vu weights = load<vu>(a + k / RANKS * each + k % RANKS * DEPTH);
                for (int r = 0; r < R; r++) sums[r][k] = dot_bf16(sums[r][k], weights, load<vu>(rows[r] + i));
            }
#else
            for (int j = 0; j < DEPTH / 2; j += LANES)
                for (int k = 0; k < GROUPS * RANKS; k++) {
                    const vu words = load<vu>(a + k / RANKS * each + k % RANKS * DEPTH + 2 * j);
                    const vf low = bits<vf>(words << 16), high = bits<vf>(words & 0xFFFF0000u);
                    for (int r = 0; r < R; r++) {
                        sums[r][k] = fma(low, load<vf>(rows[r] + i + j), sums[r][k]);
                        sums[r][k] = fma(high, load<vf>(rows[r] + i + DEPTH / 2 + j), sums[r][k]);
                    }
                }
#endif
        }
        for (int r = 0; r < R; r++) {
            act* out = site_.shrunk + size_t(row + r) * site_.stride + rank;
            for (int k = 0; k < GROUPS * RANKS; k++) out[k] = to_act(sum(sums[r][k]));
        }
    }

    // A row of the matmul's input, with zeros up to `padded`; where it isn't one already, in `to`.
    const act* input(int row, act* to) const {
        const int depth = site_.depth;
        if (form_ == ActivationForm::PLAIN) {
            if (depth == padded()) return in_.plain(row);
            memcpy(to, in_.plain(row), depth * sizeof(act));
        } else if (form_ == ActivationForm::BLOCKS) {
            const float* scales = in_.block_scales(row, depth);
            for (int i = 0; i < depth; i += LANES) {
                const int8_t* from = in_.block_bytes(row, depth) + i / GROUP * SPLIT_GROUP_BYTES + i % GROUP;
                const vi codes = load_signed_bytes(from) * 256 + load_signed_bytes(from + GROUP);
                store_acts(to + i, __builtin_convertvector(codes, vf) * scales[i / BLOCK_DEPTH]);
            }
        } else {
            switch (form_) {
                case ActivationForm::BYTES: dequantize<ActivationForm::BYTES>(row, in_.scales(row, depth), to); break;
                case ActivationForm::WORDS: dequantize<ActivationForm::WORDS>(row, in_.word_scales(row, depth), to); break;
                default: dequantize<ActivationForm::SPLIT>(row, in_.word_scales(row, depth), to);
            }
        }
        for (int i = depth; i < padded(); i++) to[i] = act(0);
        return to;
    }

    // LANES codes of a group, from the i-th on.
    template <ActivationForm FORM>
    vi codes(int row, int group, int i) const {
        if constexpr (FORM == ActivationForm::BYTES) return load_signed_bytes(in_.codes(row) + group * GROUP + i);
        if constexpr (FORM == ActivationForm::WORDS) return load_words(in_.words(row) + group * GROUP + i);
        const int8_t* from = in_.codes(row) + group * SPLIT_GROUP_BYTES + i;
        return load_signed_bytes(from) * 16 + load_signed_bytes(from + GROUP);
    }

    template <ActivationForm FORM>
    void dequantize(int row, const float* scales, act* to) const {
        for (int i = 0; i < site_.depth; i += LANES)
            store_acts(to + i, __builtin_convertvector(codes<FORM>(row, i / GROUP, i % GROUP), vf) * scales[i / GROUP]);
    }

    const LoraSite& site_;
    const Rows in_;
    const ActivationForm form_;
    const int chunks_;
};
