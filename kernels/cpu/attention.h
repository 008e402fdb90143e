// Attention over keys and values in blocks, for decode, prefill and encoders: softmax(queries x keys) x values, one
// stretch of 64 keys at a time, with the running maximum and sum of Milakov and Gimelshein (2018, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "activation.h"
#include "attention_amx.h"
#include "attention_rows.h"
#include "attention_seen.h"
#include "attention_softmax.h"
#include "attention_vectors.h"
#include "hadamard.h"

// How scores differ from queries x keys: a cap c in c * tanh(score / c), 0 for none, and for each query head what is
// subtracted for each position that a key is away from the query (ALiBi: Press et al., 2021, arXiv:2108.12409), or null.
struct ScoreOptions {
    float softcap = 0;
    const float* slopes = nullptr;
    // Of each query head, a score that takes part in the softmax without a value (Xiao et al., 2023, arXiv:2309.17453).
    const float* sinks = nullptr;
    // [query heads][2 x reach + 1]: what is added by the distance from the query to the key, clamped to +-reach (T5:
    // Raffel et al., 2020, arXiv:1910.10683); or null.
    const float* biases = nullptr;
    int reach = 0;
};

template <KVType TYPE>
class Attention final : public Op {
   public:
    // `queries` and `out` are plain activations; with `floats`, `out` is float32 on every ISA.
    Attention(Rows out, bool floats, Rows queries, const KV& kv, const AttentionPlan& plan, const ScoreOptions& form = {})
        : Op("attention"), out_(out), floats_(floats), queries_(queries), kv_(kv), plan_(plan), form_(form) {}

    int tiles(const Step&) const override { return int(plan_.items.size()); }

    bool in_ranges() const override { return false; }

    size_t scratch_bytes() const override {
        return align(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(Number)) + align(ITEM_STATES * kv_.head_dim * 4) +
               align(ATTENTION_ROWS * STRETCH * 4) + align(ATTENTION_ROWS * STRETCH * sizeof(Number)) +
               6 * align(ITEM_STATES * 4) + align(ITEM_STATES * sizeof(vf)) + align(ATTENTION_ROWS * 4) +
               align(LANES * 4) + align(unpacked_bytes()) + align(seen_bytes<TYPE>(kv_.head_dim));
    }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const Item& item = plan_.items[index];
        const Item* next = scratch.next < int(plan_.items.size()) ? &plan_.items[scratch.next] : nullptr;
        State state = lay_out(scratch.memory);
        const bool is_finite = attend<false>(step, item, next, state);
        if constexpr (TYPE == KVType::BF16)
            if (!is_finite) attend<true>(step, item, nullptr, state);
    }

    // The keys and values of a block count once, even if several entries read them: the most that one entry reads.
    Cost cost(const Step& step) const override {
        Cost cost;
        std::unordered_map<int32_t, int> read;
        for (int entry = 0; entry < step.rows; entry++) {
            const int start = step.starts[entry], count = step.counts[entry];
            const int first = plan_.first_key(start), end = plan_.end_key(step, entry, 0, count - 1);
            for (int block = first / BLOCK; block * BLOCK < end; block++) {
                const int keys = std::min(end, (block + 1) * BLOCK) - std::max(first, block * BLOCK);
                int& most = read[step.blocks(entry)[block]];
                most = std::max(most, keys);
            }
            double pairs = 0;
            for (int i = 0; i < count; i++) pairs += plan_.end_key(step, entry, i) - plan_.first_key(start + i);
            cost.flops += 4 * pairs * kv_.heads * plan_.group * kv_.head_dim;
        }
        for (const auto& [block, keys] : read) cost.bytes += double(keys) / BLOCK * double(kv_.block_bytes());
        cost.integer = INTEGERS<TYPE>;
        return cost;
    }

   private:
    using Item = AttentionPlan::Item;
    using Member = AttentionPlan::Member;
    using Run = AttentionPlan::Run;
    using Products = AttentionProducts<TYPE>;
    using Part = typename Products::Part;
    using Number = AttentionNumber<TYPE>;

    // A thread's state for its item. Row r of a head is state head x rows + r.
    struct State {
        Number* queries;       // [slices of 64 numbers][ITEM_STATES][64]
        float* query_scales;   // [states], of integers
        float* out;            // [states][head_dim]
        float* scores;         // [ATTENTION_ROWS][64]
        Number* weights;       // [ATTENTION_ROWS][64]; the same memory as scores if both are floats
        float* weight_scales;  // [ATTENTION_ROWS], of integers
        float* top;            // [states]
        vf* total;             // [states], sums of some keys in each lane
        float* shrinks;        // [LANES], of the rows of a matmul
        int32_t *first, *end;  // [rows]: the keys that a row attends to
        int32_t* position;     // [rows]
        int32_t* place;        // [rows]: a row's place in its group of query heads
        uint16_t* unpacked;    // keys and values of a stretch, if tiles multiply 8 bits
        uint8_t* seen;         // values of a stretch without those that a row may not see
    };

    static size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }
    int num_slices() const { return ceil_div(kv_.head_dim, SLICE); }

    size_t unpacked_bytes() const {
#if defined(AMX)
        return Products::unpacked_bytes(kv_.head_dim);
#else
        return 0;
#endif
    }

    State lay_out(uint8_t* memory) const {
        const auto take = [&](size_t bytes) {
            uint8_t* at = memory;
            memory += align(bytes);
            return at;
        };
        State state;
        state.queries = reinterpret_cast<Number*>(take(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(Number)));
        state.query_scales = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.out = reinterpret_cast<float*>(take(size_t(ITEM_STATES) * kv_.head_dim * 4));
        state.scores = reinterpret_cast<float*>(take(ATTENTION_ROWS * STRETCH * 4));
        if constexpr (sizeof(Number) == sizeof(float))
            state.weights = reinterpret_cast<Number*>(state.scores);
        else
            state.weights = reinterpret_cast<Number*>(take(ATTENTION_ROWS * STRETCH * sizeof(Number)));
        state.weight_scales = reinterpret_cast<float*>(take(ATTENTION_ROWS * 4));
        state.top = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.total = reinterpret_cast<vf*>(take(ITEM_STATES * sizeof(vf)));
        state.shrinks = reinterpret_cast<float*>(take(LANES * 4));
        state.first = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.end = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.position = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.place = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.unpacked = reinterpret_cast<uint16_t*>(take(unpacked_bytes()));
        state.seen = take(seen_bytes<TYPE>(kv_.head_dim));
        return state;
    }

    // Computes an item and writes its rows. Returns whether all results are finite, in bfloat16.
    //
    // What a row may not see has the weight 0, and 0 x NaN is NaN: the values behind a sequence's last one are what was
    // in that memory before, perhaps another request's. To look at them first would take time in every step. So an item
    // is computed as if they were finite, and if a result is not, again, EXACT: then they are not multiplied.
    template <bool EXACT>
    bool attend(const Step& step, const Item& item, const Item* next, State& state) const {
        const Member* members = plan_.members.data() + item.members;
        begin(step, item, members, state);
        Pass pass = first_pass(step, item);
        RowsAhead rows(plan_, step, kv_.head_dim, {out_, floats_ ? 4 : int(sizeof(act))}, item, {queries_, sizeof(act)},
                       next, num_matmuls(item, members));
        const auto then = [&](const Pass& after) {
            compute<EXACT>(step, item, pass, after, item.head, rows, state);
            pass = after;
        };
        const Run* runs = plan_.runs.data() + item.runs;
        for (int i = 1; i < item.num_runs; i++) then(pass_of(step, members, runs[i]));
        for (int i = 0; i < item.num_members; i++)
            for (int key = members[i].own; key < members[i].end; key += STRETCH)
                if (i || key > members[i].own || item.num_runs) then(pass_of(step, members[i], key));
        compute<EXACT>(step, item, pass, next ? first_pass(step, *next) : Pass{}, next ? next->head : item.head, rows,
                       state);
        vf nothing{};
        for (int i = 0; i < item.num_members; i++) nothing += write(step, item, members[i], state);
        return sum(nothing) == 0.0f;
    }

    int num_matmuls(const Item& item, const Member* members) const {
        int passes = item.num_runs;
        for (int i = 0; i < item.num_members; i++)
            passes += std::max(0, members[i].end - members[i].own + STRETCH - 1) / STRETCH;
        return passes * item.heads * ceil_div(item.rows, ATTENTION_ROWS);
    }

    void begin(const Step& step, const Item& item, const Member* members, State& state) const {
        const int dim = kv_.head_dim, states = item.heads * item.rows;
        for (const Member* member = members; member < members + item.num_members; member++)
            each_row(*member, plan_.group, [&](int r, int token, int query) {
                const act* row = queries_.plain(step.offsets[member->entry] + token);
                for (int head = 0; head < item.heads; head++) {
                    const act* from = row + ((item.head + head) * plan_.group + query) * dim;
                    const size_t i = head * item.rows + member->at + r;
                    Number* to = state.queries + i * SLICE;
                    if constexpr (INTEGERS<TYPE>)
                        state.query_scales[i] = quantize_query(from, to);
                    else
                        for (int d = 0; d < dim; d += PANEL)
                            memcpy(to + d / SLICE * ITEM_STATES * SLICE + d % SLICE, from + d, PANEL * sizeof(act));
                }
                const int at = step.starts[member->entry] + token;
                state.first[member->at + r] = plan_.first_key(at);
                state.end[member->at + r] = plan_.end_key(step, member->entry, token);
                state.position[member->at + r] = at;
                state.place[member->at + r] = query;
            });
        std::fill_n(state.top, states, -INFINITY);
        std::fill_n(state.total, states, vf{});
        if (!form_.sinks) return;
        memset(state.out, 0, size_t(states) * dim * 4);
        for (int i = 0; i < states; i++) {
            state.top[i] = form_.sinks[(item.head + i / item.rows) * plan_.group + state.place[i % item.rows]];
            state.total[i][0] = 1.0f;
        }
    }

    // Writes a query as integers. Returns their scale, NaN if a number is not finite.
    float quantize_query(const act* from, int16_t* to) const {
        float values[MAX_HEAD_DIM];
        vf tops{}, nothing{};
        for (int d = 0; d < kv_.head_dim; d += LANES) {
            const vf numbers = load_acts(from + d);
            tops = max(tops, max(numbers, -numbers));
            nothing = fma(numbers, vf{}, nothing);
            store(values + d, numbers);
        }
        const float top = largest(tops), inverse = top > 1e-30f ? LARGEST_CODE / top : 0.0f;
        for (int d = 0; d < kv_.head_dim; d += LANES)
            store_codes(to + d / SLICE * ITEM_STATES * SLICE + d % SLICE, load<vf>(values + d) * inverse);
        return top / LARGEST_CODE + sum(nothing);
    }

    // Returns zeros, or NaN if a number is not finite.
    vf write(const Step& step, const Item& item, const Member& member, const State& state) const {
        const int dim = kv_.head_dim;
        vf nothing{};
        for (int head = 0; head < item.heads; head++)
            each_row(member, plan_.group, [&](int r, int token, int query) {
                const int i = head * item.rows + member.at + r;
                const float factor = 1.0f / sum(state.total[i]);
                float* from = state.out + size_t(i) * dim;
                if constexpr (TYPE == KVType::INT8) hadamard(from, dim);
                uint8_t* row = out_.data + size_t(step.offsets[member.entry] + token) * out_.stride;
                const int first = ((item.head + head) * plan_.group + query) * dim;
                for (int d = 0; d < dim; d += LANES) {
                    const vf numbers = load<vf>(from + d) * factor;
                    if constexpr (TYPE == KVType::BF16) nothing = fma(numbers, vf{}, nothing);
                    if (floats_)
                        store(reinterpret_cast<float*>(row) + first + d, numbers);
                    else
                        store_acts(reinterpret_cast<act*>(row) + first + d, numbers);
                }
            });
        return nothing;
    }

    // Rows that go through a stretch of keys: `rows` of each head, from the first of `member` on. No blocks: there is no
    // such pass.
    // `first` is the first key that any of them attends to.
    struct Pass {
        const Member* member = nullptr;
        int rows = 0, key = 0, num_blocks = 0, first = 0;
    };

    int first_key(const Step& step, const Member& member) const {
        return plan_.first_key(step.starts[member.entry] + member.row / plan_.group);
    }

    Pass pass_of(const Step& step, const Member* members, const Run& run) const {
        const Member &first = members[run.begin], &last = members[run.end - 1];
        int key = first_key(step, first);
        for (int i = run.begin + 1; i < run.end; i++) key = std::min(key, first_key(step, members[i]));
        return {&first, last.at + last.rows - first.at, run.key, STRETCH_BLOCKS, key};
    }

    Pass pass_of(const Step& step, const Member& member, int key) const {
        const int num_blocks = std::min(STRETCH_BLOCKS, ceil_div(member.end - key, BLOCK));
        return {&member, member.rows, key, num_blocks, first_key(step, member)};
    }

    Pass first_pass(const Step& step, const Item& item) const {
        const Member* members = plan_.members.data() + item.members;
        return item.num_runs ? pass_of(step, members, plan_.runs[item.runs]) : pass_of(step, *members, members->own);
    }

    // Each head prefetches the next one's keys and values; the last one, those of `next_head` in the next pass.
    template <bool EXACT>
    void compute(const Step& step, const Item& item, const Pass& pass, const Pass& next, int next_head, RowsAhead& rows,
                 State& state) const {
        // One matmul's rows after the other, so that their data stays in the L1 cache.
        const int parts = ceil_div(pass.rows, ATTENTION_ROWS);
        for (int head = 0; head < item.heads; head++) {
            Stretch now = stretch_of(step, pass, item.head + head);
#if defined(AMX)
            if constexpr (TYPE == KVType::INT8) now = Products::unpack(now, state.unpacked, kv_.head_dim);
#endif
            Stretch ahead = head + 1 < item.heads ? stretch_of(step, pass, item.head + head + 1)
                                                  : stretch_of(step, next, next_head);
            for (int part = 0, row = pass.member->at; part < parts; part++) {
                const int count = pass.rows / parts + (part < pass.rows % parts);
                const int keys = *std::max_element(state.end + row, state.end + row + count) - pass.key;
                if (keys > 0) {
                    rows.fetch();
                    const int most = std::min(keys, now.num_blocks * BLOCK);
                    if (EXACT && !see_all(state, row, count, pass.key, most))
                        each_alone(item, head, row, count, now, pass.key, state);
                    else
                        some_rows(item, head, row, count, most, now, Ahead<TYPE>(ahead, kv_.panel_bytes()), pass.key,
                                  state);
                    ahead.num_blocks = 0;
                }
                row += count;
            }
        }
    }

    // Whether each of some rows attends to all keys in the blocks of the first `keys` from `key` on.
    bool see_all(const State& state, int row, int count, int key, int keys) const {
        const int end = key + ceil_div(keys, BLOCK) * BLOCK;
        for (int r = row; r < row + count; r++)
            if (state.first[r] > key || state.end[r] < end) return false;
        return true;
    }

    // One row after the other, each with zeros in place of the values that it may not see.
    void each_alone(const Item& item, int head, int row, int count, const Stretch& stretch, int key, State& state) const {
        for (int r = row; r < row + count; r++) {
            const int first = std::max(state.first[r] - key, 0);
            const int end = std::min(state.end[r] - key, stretch.num_blocks * BLOCK);
            if (first < end)
                some_rows(item, head, r, 1, end, seen_values<TYPE>(stretch, first, end, kv_.head_dim, state.seen),
                          Ahead<TYPE>(Stretch{}, kv_.panel_bytes()), key, state);
        }
    }

    Stretch stretch_of(const Step& step, const Pass& pass, int head) const {
        Stretch stretch;
        stretch.num_blocks = pass.num_blocks;
        if (!pass.num_blocks) return stretch;
        // Blocks before the window are others' by now: one of the window is read in their place, and masked.
        const int32_t* own = step.blocks(pass.member->entry) + pass.key / BLOCK;
        const int before = pass.first / BLOCK - pass.key / BLOCK;
        int32_t blocks[STRETCH_BLOCKS];
        for (int b = 0; b < pass.num_blocks; b++) blocks[b] = own[std::max(b, before)];
        for (int b = 0; b < pass.num_blocks; b++) {
            stretch.keys[b] = kv_.keys(blocks[b], head);
            stretch.values[b] = kv_.values(blocks[b], head);
            if constexpr (TYPE == KVType::INT8) stretch.scales[b] = kv_.key_scales(blocks[b], head);
        }
        return stretch;
    }

    // Rows row .. row + count of a head, at most ATTENTION_ROWS. They attend to none but the first `keys` of the stretch.
    void some_rows(const Item& item, int head, int row, int count, int keys, const Stretch& stretch, Ahead<TYPE> ahead,
                   int key, State& state) const {
        const size_t first = size_t(head) * item.rows + row;
        float* out = state.out + first * kv_.head_dim;
        const bool is_first = !form_.sinks && begin_sums(state.top + first, count, out, kv_.head_dim);
        const Part part{state.queries + first * SLICE, state.query_scales + first, out,  state.scores,
                        state.weights,                 state.weight_scales,        keys, is_first ? nullptr : state.shrinks};
        if constexpr (TYPE == KVType::INT8)
            for (int b = 0; b < ahead.next.num_blocks; b++)
                prefetch<L1>(reinterpret_cast<const uint8_t*>(ahead.next.scales[b]), LINE);
        Products::multiply_keys(part, count, stretch, ahead, kv_.head_dim);
        if (form_.softcap > 0 || form_.slopes || form_.biases)
            for (int r = 0; r < count; r++)
                reshape(part.scores + r * STRETCH, part.num_blocks() * BLOCK, key - state.position[row + r],
                        (item.head + head) * plan_.group + state.place[row + r]);
        switch (part.num_blocks()) {
#define CASE(B)                                                                                                        \
    case B:                                                                                                            \
        softmax<TYPE, B * BLOCK>(part, count, state.first + row, state.end + row, key, state.top + first,               \
                                 state.total + first, state.shrinks, stretch, ahead);                                  \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
        static_assert(STRETCH_BLOCKS == 4);
        Products::multiply_values(part, count, stretch, ahead, kv_.head_dim);
        ahead.prefetch_rest();
    }

    // Caps and biases the scores of a query with `num` keys, the first of which is `distance` positions after it.
    void reshape(float* scores, int num, int distance, int query) const {
        if (form_.softcap > 0)
            for (int i = 0; i < num; i += LANES)
                store(scores + i, form_.softcap * tanh_of(load<vf>(scores + i) * (1.0f / form_.softcap)));
        if (form_.slopes)
            for (int i = 0; i < num; i++) scores[i] += form_.slopes[query] * float(-std::abs(distance + i));
        if (form_.biases) {
            const float* biases = form_.biases + query * (2 * form_.reach + 1) + form_.reach;
            for (int i = 0; i < num; i++) scores[i] += biases[std::clamp(distance + i, -form_.reach, form_.reach)];
        }
    }

    const Rows out_;
    const bool floats_;
    const Rows queries_;
    const KV kv_;
    const AttentionPlan& plan_;
    const ScoreOptions form_;
};
