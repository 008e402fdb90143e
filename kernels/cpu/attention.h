// Causal attention over keys and values in blocks, decode and prefill alike: softmax(queries x keys) x values, a stretch
// of 64 keys at a time, with the running maximum and sum of Milakov and Gimelshein (2018, arXiv:1805.02867).
//
// Stretches begin at multiples of 64 and every row goes through its own in order, so what a row yields does not depend on
// which rows are computed beside it, nor on how its prompt was cut.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"
#include "step.h"

constexpr int STRETCH = 64;
constexpr int ITEM_ROWS = 48;  // queries of one head that go through a stretch of keys together
constexpr int MOST_PANELS = 16;  // of a head's values: head_dim is 256 at most
constexpr int ITEM_STATES = 128;  // queries of all heads of a decoding row

// What the attention of one step is cut into; the same for every layer.
class AttentionPlan final : public Op {
   public:
    struct Item {
        int entry, head, heads;
        int row, rows;  // of the entry's tokens x queries a head
        int64_t cost;
    };

    AttentionPlan(int num_heads, int num_kv_heads, int threads, int window)
        : Op("attention_plan"), group(num_heads / num_kv_heads), num_kv_heads(num_kv_heads), window(window),
          threads_(threads) {}

    int tiles(const Step&) const override { return 1; }

    void tile(const Step& step, int, const Scratch&) override {
        items.clear();
        int decodes = 0;
        for (int entry = 0; entry < step.rows; entry++) decodes += step.counts[entry] == 1;
        // Heads of a row lie together, so one thread reads them all where there are rows enough for all threads.
        const bool whole = decodes >= 4 * threads_ && group * num_kv_heads <= ITEM_STATES;
        for (int entry = 0; entry < step.rows; entry++) {
            const int rows = step.counts[entry] * group;
            if (whole && step.counts[entry] == 1 && group <= ITEM_ROWS) {
                add(step, entry, 0, num_kv_heads, 0, group);
                continue;
            }
            for (int head = 0; head < num_kv_heads; head++)
                for (int row = 0; row < rows; row += ITEM_ROWS)
                    add(step, entry, head, 1, row, std::min(ITEM_ROWS, rows - row));
        }
        // The long ones first, so that none is begun when the others are done.
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }

    int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }

    std::vector<Item> items;
    const int group, num_kv_heads, window;

   private:
    void add(const Step& step, int entry, int head, int heads, int row, int rows) {
        const int last = step.starts[entry] + (row + rows - 1) / group;
        const int first = first_key(step.starts[entry] + row / group);
        items.push_back({entry, head, heads, row, rows, int64_t(last - first + 1) * heads * (rows + 4)});
    }

    const int threads_;
};

class Attention final : public Op {
   public:
    // `out` is plain activations; with `floats`, float32 at every level.
    Attention(Rows out, bool floats, const float* queries, const KV& kv, const AttentionPlan& plan)
        : Op("attention"), out_(out), floats_(floats), queries_(queries), kv_(kv), plan_(plan) {}

    int tiles(const Step&) const override { return int(plan_.items.size()); }

    size_t scratch_bytes() const override {
        return align(size_t(ITEM_STATES) * kv_.head_dim * sizeof(act)) + align(ITEM_STATES * kv_.head_dim * 4) +
               align(ITEM_STATES * STRETCH * 4) + align(ITEM_STATES * STRETCH * sizeof(act)) + 2 * align(ITEM_STATES * 4);
    }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const AttentionPlan::Item& item = plan_.items[index];
        const int dim = kv_.head_dim, states = item.heads * item.rows;
        uint8_t* memory = scratch.memory;
        const auto take = [&](size_t bytes) {
            uint8_t* at = memory;
            memory += align(bytes);
            return at;
        };
        State state;
        state.queries = reinterpret_cast<act*>(take(size_t(ITEM_STATES) * dim * sizeof(act)));
        state.out = reinterpret_cast<float*>(take(size_t(ITEM_STATES) * dim * 4));
        state.scores = reinterpret_cast<float*>(take(ITEM_STATES * STRETCH * 4));
        state.weights = reinterpret_cast<act*>(take(ITEM_STATES * STRETCH * sizeof(act)));
        state.top = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.total = reinterpret_cast<float*>(take(ITEM_STATES * 4));

        for (int i = 0; i < states; i++) {
            const float* from = query(step, item, i);
            for (int d = 0; d < dim; d++) state.queries[i * dim + d] = to_act(from[d]);
            state.top[i] = -INFINITY;
            state.total[i] = 0;
        }
        memset(state.out, 0, size_t(states) * dim * 4);

        const int start = step.starts[item.entry];
        const int last = start + (item.row + item.rows - 1) / plan_.group;
        const int first = plan_.first_key(start + item.row / plan_.group);
        for (int key = first / STRETCH * STRETCH; key <= last; key += STRETCH) stretch(step, item, key, last, state);

        for (int i = 0; i < states; i++) {
            const float factor = 1.0f / state.total[i];
            const float* from = state.out + i * dim;
            uint8_t* row = out_.data + token(step, item, i) * out_.stride;
            const size_t column = size_t(query_head(item, i)) * dim;
            if (floats_)
                for (int d = 0; d < dim; d++) reinterpret_cast<float*>(row)[column + d] = from[d] * factor;
            else
                for (int d = 0; d < dim; d++) reinterpret_cast<act*>(row)[column + d] = to_act(from[d] * factor);
        }
    }

    Cost cost(const Step& step) const override {
        Cost cost;
        for (int entry = 0; entry < step.rows; entry++) {
            const double last = step.starts[entry] + step.counts[entry] - 1;
            const double first = plan_.first_key(step.starts[entry]);
            double pairs = 0;
            for (int t = 0; t < step.counts[entry]; t++) {
                const int position = step.starts[entry] + t;
                pairs += position - plan_.first_key(position) + 1;
            }
            cost.bytes += (last - first + 1) * kv_.heads * kv_.head_dim * 4;
            cost.flops += 4 * pairs * kv_.heads * plan_.group * kv_.head_dim;
        }
        return cost;
    }

   private:
    struct State {
        act* queries;   // [states][head_dim]
        float* out;     // [states][head_dim]
        float* scores;  // [states][64]
        act* weights;   // [states][64]
        float *top, *total;  // [states]
    };

    static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

    // State i of an item is row i % rows of its head i / rows; row r is query r % group of token r / group.
    int query_head(const AttentionPlan::Item& item, int i) const {
        return (item.head + i / item.rows) * plan_.group + (item.row + i % item.rows) % plan_.group;
    }
    size_t token(const Step& step, const AttentionPlan::Item& item, int i) const {
        return step.offsets[item.entry] + (item.row + i % item.rows) / plan_.group;
    }
    const float* query(const Step& step, const AttentionPlan::Item& item, int i) const {
        const size_t heads = size_t(kv_.heads) * plan_.group;
        return queries_ + (token(step, item, i) * heads + query_head(item, i)) * kv_.head_dim;
    }

    // Blocks are gone through as they lie in memory, the keys of all heads and then the values: so the processor fetches
    // ahead by itself. Fetching by instruction took longer.
    void stretch(const Step& step, const AttentionPlan::Item& item, int key, int last, State& state) const {
        const int dim = kv_.head_dim, rows = item.rows;
        const int32_t* blocks = step.blocks(item.entry) + key / BLOCK;
        const int num_blocks = std::min(STRETCH / BLOCK, (last - key) / BLOCK + 1);
        for (int b = 0; b < num_blocks; b++)
            for (int head = 0; head < item.heads; head++) {
                const uint16_t* panel = kv_.keys(blocks[b], item.head + head);
                panels_product<false>(state.queries + size_t(head) * rows * dim, dim, rows, &panel, 1, dim,
                                      state.scores + size_t(head) * rows * STRETCH + b * BLOCK, STRETCH);
            }
        for (int i = 0; i < item.heads * rows; i++) {
            const int position = step.starts[item.entry] + (item.row + i % rows) / plan_.group;
            const int begin = std::clamp(plan_.first_key(position) - key, 0, STRETCH);
            const int end = std::clamp(position + 1 - key, 0, STRETCH);
            soften(state.scores + i * STRETCH, begin, end, state.weights + i * STRETCH, state.top[i], state.total[i],
                   state.out + size_t(i) * dim);
        }
        for (int b = 0; b < num_blocks; b++)
            for (int head = 0; head < item.heads; head++) {
                const uint16_t* panels[MOST_PANELS];
                const uint16_t* values = kv_.values(blocks[b], item.head + head);
                for (int p = 0; p < dim / PANEL; p++) panels[p] = values + p * PANEL * BLOCK;
                panels_product<true>(state.weights + size_t(head) * rows * STRETCH + b * BLOCK, STRETCH, rows, panels,
                                     dim / PANEL, BLOCK, state.out + size_t(head) * rows * dim, dim);
            }
    }

    // One row's scores as weights. Only the keys begin .. end are seen; there may be none.
    void soften(float* scores, int begin, int end, act* weights, float& top, float& total, float* out) const {
        for (int i = 0; i < begin; i++) scores[i] = -INFINITY;
        for (int i = end; i < STRETCH; i++) scores[i] = -INFINITY;
        vf tops = load<vf>(scores);
        for (int i = LANES; i < STRETCH; i += LANES) tops = max(tops, load<vf>(scores + i));
        const float stretch_top = largest(tops);
        if (stretch_top == -INFINITY) {
            for (int i = 0; i < STRETCH; i++) weights[i] = to_act(0);
            return;
        }
        if (stretch_top > top) {
            const float shrink = exp_of(splat(top - stretch_top))[0];
            for (int d = 0; d < kv_.head_dim; d++) out[d] *= shrink;
            total *= shrink;
            top = stretch_top;
        }
        vf sums{};
        for (int i = 0; i < STRETCH; i += LANES) {
            const vf weight = exp_of(load<vf>(scores + i) - top);
            sums += weight;
            store_acts(weights + i, weight);
        }
        total += sum(sums);
    }

    // out [rows][panels * 16] (+)= in [rows][depth] x panels
    template <bool ADD>
    static void panels_product(const act* in, int in_stride, int rows, const uint16_t* const* panels, int num_panels,
                               int depth, float* out, int out_stride) {
        const int parts = ceil_div(rows, MOST_ROWS);
        for (int part = 0, row = 0; part < parts; part++) {
            const int count = rows / parts + (part < rows % parts);
            const act* from = in + size_t(row) * in_stride;
            float* to = out + size_t(row) * out_stride;
            switch (count) {
#define CASE(R)                                                                                    \
    case R:                                                                                        \
        if constexpr (R <= MOST_ROWS)                                                              \
            rows_product<R, ADD>(from, in_stride, panels, num_panels, depth, to, out_stride);      \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
            }
            row += count;
        }
    }

    template <int R, bool ADD>
    static void rows_product(const act* in, int in_stride, const uint16_t* const* panels, int num_panels, int depth,
                             float* out, int out_stride) {
        constexpr int P = R == 1 ? 4 : R == 2 || LANES == 16 ? 2 : 1;
        int p = 0;
        for (; p + P <= num_panels; p += P)
            one_product<R, P, ADD>(in, in_stride, panels + p, depth, out + p * PANEL, out_stride);
        if constexpr (P > 1)
            for (; p < num_panels; p++)
                one_product<R, 1, ADD>(in, in_stride, panels + p, depth, out + p * PANEL, out_stride);
    }

    template <int R, int P, bool ADD>
    // Not inlined: with constants for arguments GCC runs out of registers.
    __attribute__((noinline)) static void one_product(const act* in, int in_stride, const uint16_t* const* panels, int depth, float* out,
                            int out_stride) {
        const act* rows[R];
        const uint32_t* from[P];
        vf acc[R][P][VECTORS] = {};
        for (int r = 0; r < R; r++) rows[r] = in + size_t(r) * in_stride;
        for (int p = 0; p < P; p++) from[p] = reinterpret_cast<const uint32_t*>(panels[p]);
        if constexpr (ADD)
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++)
                        acc[r][p][v] = load<vf>(out + r * out_stride + p * PANEL + v * LANES);
        multiply_bf16<R, P>(rows, from, depth / 2, acc);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++)
                    store(out + r * out_stride + p * PANEL + v * LANES, acc[r][p][v]);
    }

    const Rows out_;
    const bool floats_;
    const float* const queries_;
    const KV kv_;
    const AttentionPlan& plan_;
};
