// Causal attention over keys and values in blocks, for decode and prefill: softmax(queries x keys) x values, one
// stretch of 64 keys at a time, with the running maximum and sum of Milakov and Gimelshein (2018, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "attention_amx.h"
#include "qkv.h"
#include "step.h"

#if defined(AMX)
constexpr int ATTENTION_ROWS = TILE_ROWS;
#else
constexpr int ATTENTION_ROWS = MOST_ROWS;
#endif

// How scores differ from queries x keys: a cap c in c * tanh(score / c), 0 for none, and for each query head what is
// subtracted for each position that a key is before the query (ALiBi: Press et al., 2021, arXiv:2108.12409), or null.
struct ScoreForm {
    float softcap = 0;
    const float* slopes = nullptr;
};

class Attention final : public Op {
   public:
    // `queries` and `out` are plain activations; with `floats`, `out` is float32 on every ISA.
    Attention(Rows out, bool floats, Rows queries, const KV& kv, const AttentionPlan& plan, const ScoreForm& form = {})
        : Op("attention"), out_(out), floats_(floats), queries_(queries), kv_(kv), plan_(plan), form_(form) {}

    int tiles(const Step&) const override { return int(plan_.items.size()); }

    bool in_ranges() const override { return false; }

    size_t scratch_bytes() const override {
        return align(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(act)) + align(ITEM_STATES * kv_.head_dim * 4) +
               align(ATTENTION_ROWS * STRETCH * 4) + align(ATTENTION_ROWS * STRETCH * sizeof(act)) + 5 * align(ITEM_STATES * 4);
    }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const Item& item = plan_.items[index];
        const Member* members = plan_.members.data() + item.members;
        State state = lay_out(scratch.memory);
        begin(step, item, members, state);
        Pass pass = first_pass(step, item);
        const auto then = [&](const Pass& next) {
            compute(step, item, pass, next, item.head, state);
            pass = next;
        };
        const Run* runs = plan_.runs.data() + item.runs;
        for (int i = 1; i < item.num_runs; i++) then(pass_of(members, runs[i]));
        for (int i = 0; i < item.num_members; i++)
            for (int key = members[i].own; key <= last_key(step, members[i]); key += STRETCH)
                if (i || key > members[i].own || item.num_runs) then(pass_of(step, members[i], key));
        const bool has_next = scratch.next < int(plan_.items.size());
        const Item& next = plan_.items[has_next ? scratch.next : index];
        compute(step, item, pass, has_next ? first_pass(step, next) : Pass{}, next.head, state);
        for (int i = 0; i < item.num_members; i++) write(step, item, members[i], state);
    }

    // The keys and values of a block count once, even if several entries read them: the most that one entry reads.
    Cost cost(const Step& step) const override {
        Cost cost;
        std::unordered_map<int32_t, int> read;
        for (int entry = 0; entry < step.rows; entry++) {
            const int start = step.starts[entry], end = start + step.counts[entry];
            const int first = plan_.first_key(start);
            for (int block = first / BLOCK; block * BLOCK < end; block++) {
                const int keys = std::min(end, (block + 1) * BLOCK) - std::max(first, block * BLOCK);
                int& most = read[step.blocks(entry)[block]];
                most = std::max(most, keys);
            }
            double pairs = 0;
            for (int position = start; position < end; position++) pairs += position - plan_.first_key(position) + 1;
            cost.flops += 4 * pairs * kv_.heads * plan_.group * kv_.head_dim;
        }
        for (const auto& [block, keys] : read) cost.bytes += double(keys) * kv_.heads * kv_.head_dim * 4;
        return cost;
    }

   private:
    using Item = AttentionPlan::Item;
    using Member = AttentionPlan::Member;
    using Run = AttentionPlan::Run;

    // A thread's state for its item. Row r of a head is state head x rows + r.
    struct State {
        act* queries;   // [slices of 64 numbers][ITEM_STATES][64]
        float* out;     // [states][head_dim]
        float* scores;  // [ATTENTION_ROWS][64]
        act* weights;   // [ATTENTION_ROWS][64]; the same memory as scores if both are floats
        float *top, *total;    // [states]
        int32_t *first, *end;  // [rows]: the keys that a row attends to
        int32_t* place;        // [rows]: a row's place in its group of query heads
    };

    static constexpr int SLICE = 64;  // dimensions of a query that are adjacent, so that rows are a constant apart

    static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }
    int num_slices() const { return ceil_div(kv_.head_dim, SLICE); }

    State lay_out(uint8_t* memory) const {
        const auto take = [&](size_t bytes) {
            uint8_t* at = memory;
            memory += align(bytes);
            return at;
        };
        State state;
        state.queries = reinterpret_cast<act*>(take(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(act)));
        state.out = reinterpret_cast<float*>(take(size_t(ITEM_STATES) * kv_.head_dim * 4));
        state.scores = reinterpret_cast<float*>(take(ATTENTION_ROWS * STRETCH * 4));
        if constexpr (sizeof(act) == sizeof(float))
            state.weights = reinterpret_cast<act*>(state.scores);
        else
            state.weights = reinterpret_cast<act*>(take(ATTENTION_ROWS * STRETCH * sizeof(act)));
        state.top = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.total = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.first = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.end = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.place = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        return state;
    }

    // Row r of a member is query r % group of token r / group.
    int position(const Step& step, const Member& member, int r) const {
        return step.starts[member.entry] + (member.row + r) / plan_.group;
    }
    size_t token(const Step& step, const Member& member, int r) const {
        return step.offsets[member.entry] + (member.row + r) / plan_.group;
    }
    int column(const Item& item, const Member& member, int head, int r) const {
        return ((item.head + head) * plan_.group + (member.row + r) % plan_.group) * kv_.head_dim;
    }

    void begin(const Step& step, const Item& item, const Member* members, State& state) const {
        const int dim = kv_.head_dim, states = item.heads * item.rows;
        for (const Member* member = members; member < members + item.num_members; member++)
            for (int r = 0; r < member->rows; r++) {
                const act* row = queries_.plain(int(token(step, *member, r)));
                for (int head = 0; head < item.heads; head++) {
                    const act* from = row + column(item, *member, head, r);
                    act* to = state.queries + size_t(head * item.rows + member->at + r) * SLICE;
                    for (int d = 0; d < dim; d += SLICE)
                        memcpy(to + d * ITEM_STATES, from + d, std::min(SLICE, dim - d) * sizeof(act));
                }
                const int at = position(step, *member, r);
                state.first[member->at + r] = plan_.first_key(at);
                state.end[member->at + r] = at + 1;
                state.place[member->at + r] = (member->row + r) % plan_.group;
            }
        std::fill_n(state.top, states, -INFINITY);
        std::fill_n(state.total, states, 0.0f);
        memset(state.out, 0, size_t(states) * dim * 4);
    }

    void write(const Step& step, const Item& item, const Member& member, const State& state) const {
        const int dim = kv_.head_dim;
        for (int head = 0; head < item.heads; head++)
            for (int r = 0; r < member.rows; r++) {
                const int i = head * item.rows + member.at + r;
                const float factor = 1.0f / state.total[i];
                const float* from = state.out + size_t(i) * dim;
                uint8_t* row = out_.data + token(step, member, r) * out_.stride;
                const int first = column(item, member, head, r);
                for (int d = 0; d < dim; d += LANES) {
                    const vf numbers = load<vf>(from + d) * factor;
                    if (floats_)
                        store(reinterpret_cast<float*>(row) + first + d, numbers);
                    else
                        store_acts(reinterpret_cast<act*>(row) + first + d, numbers);
                }
            }
    }

    // Rows that go through a stretch of keys: `rows` of each head, from the first of `member` on. No blocks: there is no
    // such pass.
    struct Pass {
        const Member* member = nullptr;
        int rows = 0, key = 0, num_blocks = 0;
    };

    int last_key(const Step& step, const Member& member) const { return position(step, member, member.rows - 1); }

    static Pass pass_of(const Member* members, const Run& run) {
        const Member &first = members[run.begin], &last = members[run.end - 1];
        return {&first, last.at + last.rows - first.at, run.key, STRETCH_BLOCKS};
    }

    Pass pass_of(const Step& step, const Member& member, int key) const {
        return {&member, member.rows, key, std::min(STRETCH_BLOCKS, (last_key(step, member) - key) / BLOCK + 1)};
    }

    Pass first_pass(const Step& step, const Item& item) const {
        const Member* members = plan_.members.data() + item.members;
        return item.num_runs ? pass_of(members, plan_.runs[item.runs]) : pass_of(step, *members, members->own);
    }

    // Each head prefetches the next one's keys and values; the last one, those of `next_head` in the next pass.
    void compute(const Step& step, const Item& item, const Pass& pass, const Pass& next, int next_head,
                 State& state) const {
        // One matmul's rows after the other, so that their data stays in the L1 cache.
        const int parts = ceil_div(pass.rows, ATTENTION_ROWS);
        for (int head = 0; head < item.heads; head++)
            for (int part = 0, row = pass.member->at; part < parts; part++) {
                const int count = pass.rows / parts + (part < pass.rows % parts);
                Stretch ahead;
                if (part == 0)
                    ahead = head + 1 < item.heads ? stretch_of(step, pass, item.head + head + 1)
                                                  : stretch_of(step, next, next_head);
                some_rows(item, head, row, count, stretch_of(step, pass, item.head + head),
                          StretchAhead(ahead, kv_.head_dim), pass.key, state);
                row += count;
            }
    }

    Stretch stretch_of(const Step& step, const Pass& pass, int head) const {
        Stretch stretch;
        stretch.num_blocks = pass.num_blocks;
        if (!pass.num_blocks) return stretch;
        const int32_t* blocks = step.blocks(pass.member->entry) + pass.key / BLOCK;
        for (int b = 0; b < pass.num_blocks; b++) {
            stretch.keys[b] = kv_.keys(blocks[b], head);
            stretch.values[b] = kv_.values(blocks[b], head);
        }
        return stretch;
    }

    // Rows row .. row + count of a head, at most ATTENTION_ROWS.
    void some_rows(const Item& item, int head, int row, int count, const Stretch& stretch, StretchAhead ahead, int key,
                   State& state) const {
        const size_t first = size_t(head) * item.rows + row;
        const Part part{state.queries + first * SLICE, state.out + first * kv_.head_dim, state.scores, state.weights};
        multiply_keys(part, count, stretch, ahead);
        if (form_.softcap > 0 || form_.slopes)
            for (int r = 0; r < count; r++)
                reshape(part.scores + r * STRETCH, stretch.num_blocks * BLOCK, key - (state.end[row + r] - 1),
                        (item.head + head) * plan_.group + state.place[row + r]);
        switch (stretch.num_blocks) {
#define CASE(B)                                                                                                     \
    case B:                                                                                                         \
        softmax<B * BLOCK>(part, count, state.first + row, state.end + row, key, state.top + first, state.total + first, \
                           ahead);                                                                                  \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
        static_assert(STRETCH_BLOCKS == 4);
        multiply_values(part, count, stretch, ahead);
        ahead.prefetch_rest();
    }

    // Caps and biases the scores of a query with `num` keys, the first of which is `distance` positions after it.
    void reshape(float* scores, int num, int distance, int query) const {
        if (form_.softcap > 0)
            for (int i = 0; i < num; i += LANES)
                store(scores + i, form_.softcap * tanh_of(load<vf>(scores + i) * (1.0f / form_.softcap)));
        if (form_.slopes)
            for (int i = 0; i < num; i++) scores[i] += form_.slopes[query] * float(distance + i);
    }

    // The first rows of one matmul.
    struct Part {
        const act* queries;
        float *out, *scores;
        act* weights;
    };

    // Turns the scores of KEYS keys into softmax weights. Row r attends to the keys first[r] .. end[r]; none of these may
    // be among them. Each loop goes over all rows, because the operations of a single row depend on each other.
    template <int KEYS>
    void softmax(const Part& part, int count, const int32_t* first, const int32_t* end, int key, float* top,
                 float* total, StretchAhead& ahead) const {
        static_assert(ATTENTION_ROWS <= LANES);
        float tops[LANES] = {}, shrinks[LANES];
        ahead.prefetch_part(8);
        for (int r = 0; r < count; r++) {
            float* scores = part.scores + r * STRETCH;
            for (int i = 0; i < first[r] - key && i < KEYS; i++) scores[i] = -INFINITY;
            for (int i = std::max(0, end[r] - key); i < KEYS; i++) scores[i] = -INFINITY;
            ahead.prefetch_part(32);
            vf highest = load<vf>(scores);
            for (int i = LANES; i < KEYS; i += LANES) highest = max(highest, load<vf>(scores + i));
            tops[r] = largest(highest);
            shrinks[r] = top[r] - tops[r];
        }
        for (int r = count; r < LANES; r++) shrinks[r] = 0;
        store(shrinks, exp_of(load<vf>(shrinks)));
        for (int r = 0; r < count; r++) {
            if (!(tops[r] > top[r])) continue;
            float* out = part.out + size_t(r) * kv_.head_dim;
            for (int d = 0; d < kv_.head_dim; d += LANES) store(out + d, load<vf>(out + d) * shrinks[r]);
            total[r] *= shrinks[r];
            top[r] = tops[r];
        }
        for (int r = 0; r < count; r++) {
            const float* scores = part.scores + r * STRETCH;
            act* weights = part.weights + r * STRETCH;
            if (tops[r] == -INFINITY) {
                for (int i = 0; i < KEYS; i += LANES) store_acts(weights + i, vf{});
                continue;
            }
            ahead.prefetch_part(32);
            vf sums{};
            for (int i = 0; i < KEYS; i += LANES) {
                const vf weight = exp_of(load<vf>(scores + i) - top[r]);
                sums += weight;
                store_acts(weights + i, weight);
            }
            total[r] += sum(sums);
        }
    }

#if defined(AMX)
    // scores [16][64] = queries [16][head_dim] x keys; a block of keys is one panel
    void multiply_keys(const Part& part, int, const Stretch& stretch, StretchAhead& ahead) const {
        use_tile_shapes(attention_tiles);
        const auto query = [&](int d) { return part.queries + d / SLICE * ITEM_STATES * SLICE + d % SLICE; };
        for (int b = 0; b < stretch.num_blocks; b += 2) {
            const bool two = b + 1 < stretch.num_blocks;
            const auto score = two ? score_keys<2, decltype(query)> : score_keys<1, decltype(query)>;
            score(query, SLICE * 2, kv_.head_dim, stretch.keys + b, part.scores + b * BLOCK, ahead);
        }
    }

    // out [count][head_dim] += weights [16][64] x values; a block of values is head_dim / 16 panels
    void multiply_values(const Part& part, int count, const Stretch& stretch, StretchAhead& ahead) const {
        constexpr int MOST_PANELS = 4;
        alignas(LINE) float sums[TILE_ROWS * MOST_PANELS * PANEL];
        const int num_panels = kv_.head_dim / PANEL;
        for (int panel = 0; panel < num_panels;) {
            const auto add = [&]<int PANELS>() {
                sum_values<PANELS>(part.weights, stretch.values, stretch.num_blocks, panel, sums, ahead);
                for (int r = 0; r < count; r++) {
                    float* out = part.out + r * kv_.head_dim + panel * PANEL;
                    for (int i = 0; i < PANELS * PANEL; i += LANES)
                        store(out + i, load<vf>(out + i) + load<vf>(sums + r * PANELS * PANEL + i));
                }
                panel += PANELS;
            };
            const int left = num_panels - panel;
            if (left >= 4)
                add.template operator()<4>();
            else if (left >= 2)
                add.template operator()<2>();
            else
                add.template operator()<1>();
        }
    }
#else
    void multiply_keys(const Part& part, int count, const Stretch& stretch, StretchAhead& ahead) const {
        switch (count) {
#define CASE(R)                                                          \
    case R:                                                              \
        if constexpr (R <= MOST_ROWS) scores<R>(part, stretch, ahead.next); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }

    void multiply_values(const Part& part, int count, const Stretch& stretch, StretchAhead& ahead) const {
        switch (count) {
#define CASE(R)                                                              \
    case R:                                                                  \
        if constexpr (R <= MOST_ROWS) add_values<R>(part, stretch, ahead.next);   \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }

    // Panels per call. One row has registers for more, and needs them to hide the latency of its sums.
    template <int R>
    static constexpr int AT_ONCE = R == 1 ? 4 : R == 2 || LANES == 16 ? 2 : 1;

    // scores [R][64] = queries [R][head_dim] x keys; a block of keys is one panel
    template <int R>
    void scores(const Part& part, const Stretch& stretch, const Stretch& ahead) const {
        const auto next = [&](int b, int count) { return b + count <= ahead.num_blocks ? ahead.keys + b : nullptr; };
        int b = 0;
        for (; b + AT_ONCE<R> <= stretch.num_blocks; b += AT_ONCE<R>)
            multiply_key_panels<R, AT_ONCE<R>>(part.queries, stretch.keys + b, kv_.head_dim, part.scores + b * BLOCK,
                                         next(b, AT_ONCE<R>));
        if constexpr (AT_ONCE<R> > 1)
            for (; b < stretch.num_blocks; b++)
                multiply_key_panels<R, 1>(part.queries, stretch.keys + b, kv_.head_dim, part.scores + b * BLOCK, next(b, 1));
    }

    // out [R][head_dim] += weights [R][64] x values; a block of values is head_dim / 16 panels
    template <int R>
    void add_values(const Part& part, const Stretch& stretch, const Stretch& ahead) const {
        const int num_panels = kv_.head_dim / PANEL;
        int p = 0;
        for (; p + AT_ONCE<R> <= num_panels; p += AT_ONCE<R>)
            multiply_value_panels<R, AT_ONCE<R>>(part.weights, stretch, ahead, p, part.out, kv_.head_dim);
        if constexpr (AT_ONCE<R> > 1)
            for (; p < num_panels; p++)
                multiply_value_panels<R, 1>(part.weights, stretch, ahead, p, part.out, kv_.head_dim);
    }

    // Not inlined: with constant arguments GCC runs out of registers.
    template <int R, int P>
    __attribute__((noinline)) static void multiply_key_panels(const act* queries, const uint16_t* const* keys, int dim,
                                                       float* out, const uint16_t* const* ahead) {
        vf acc[R][P][VECTORS];
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = vf{};
        for (int d = 0; d < dim; d += PANEL) {
            const act* rows[R];
            const uint32_t* from[P];
            const act* at = queries + d / SLICE * ITEM_STATES * SLICE + d % SLICE;
            for (int r = 0; r < R; r++) rows[r] = at + r * SLICE;
            for (int p = 0; p < P; p++) from[p] = reinterpret_cast<const uint32_t*>(keys[p]) + d / 2 * PANEL;
            const uint8_t* next[P];
            if (ahead)
                for (int p = 0; p < P; p++) next[p] = reinterpret_cast<const uint8_t*>(ahead[p] + d * PANEL);
            multiply_bf16<R, P, L2>(rows, from, PANEL / 2, acc, ahead ? next : nullptr);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) store(out + r * STRETCH + p * PANEL + v * LANES, acc[r][p][v]);
    }

    template <int R, int P>
    __attribute__((noinline)) static void multiply_value_panels(const act* weights, const Stretch& stretch,
                                                         const Stretch& ahead, int panel, float* out, int dim) {
        vf acc[R][P][VECTORS];
        out += panel * PANEL;
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = load<vf>(out + r * dim + p * PANEL + v * LANES);
        for (int b = 0; b < stretch.num_blocks; b++, weights += BLOCK) {
            const act* rows[R];
            const uint32_t* from[P];
            for (int r = 0; r < R; r++) rows[r] = weights + r * STRETCH;
            for (int p = 0; p < P; p++)
                from[p] = reinterpret_cast<const uint32_t*>(stretch.values[b] + (panel + p) * PANEL * BLOCK);
            const bool has_next = b < ahead.num_blocks;
            const uint8_t* next[P];
            for (int p = 0; has_next && p < P; p++)
                next[p] = reinterpret_cast<const uint8_t*>(ahead.values[b] + (panel + p) * PANEL * BLOCK);
            multiply_bf16<R, P, L2>(rows, from, BLOCK / 2, acc, has_next ? next : nullptr);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) store(out + r * dim + p * PANEL + v * LANES, acc[r][p][v]);
    }

#endif

    const Rows out_;
    const bool floats_;
    const Rows queries_;
    const KV kv_;
    const AttentionPlan& plan_;
    const ScoreForm form_;
};
