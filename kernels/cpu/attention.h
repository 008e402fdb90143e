// Causal attention over keys and values in blocks, for decode and prefill: softmax(queries x keys) x values, one
// stretch of 64 keys at a time, with the running maximum and sum of Milakov and Gimelshein (2018, arXiv:1805.02867).
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "activation.h"
#include "attention_amx.h"
#include "attention_vectors.h"
#include "hadamard.h"

// How scores differ from queries x keys: a cap c in c * tanh(score / c), 0 for none, and for each query head what is
// subtracted for each position that a key is before the query (ALiBi: Press et al., 2021, arXiv:2108.12409), or null.
struct ScoreForm {
    float softcap = 0;
    const float* slopes = nullptr;
    // Of each query head, a score that takes part in the softmax without a value (Xiao et al., 2023, arXiv:2309.17453).
    const float* sinks = nullptr;
};

template <KVType TYPE>
class Attention final : public Op {
   public:
    // `queries` and `out` are plain activations; with `floats`, `out` is float32 on every ISA.
    Attention(Rows out, bool floats, Rows queries, const KV& kv, const AttentionPlan& plan, const ScoreForm& form = {})
        : Op("attention"), out_(out), floats_(floats), queries_(queries), kv_(kv), plan_(plan), form_(form) {}

    int tiles(const Step&) const override { return int(plan_.items.size()); }

    bool in_ranges() const override { return false; }

    size_t scratch_bytes() const override {
        return align(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(Number)) + align(ITEM_STATES * kv_.head_dim * 4) +
               align(ATTENTION_ROWS * STRETCH * 4) + align(ATTENTION_ROWS * STRETCH * sizeof(Number)) +
               6 * align(ITEM_STATES * 4) + align(ATTENTION_ROWS * 4) + align(unpacked_bytes());
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
        for (int i = 1; i < item.num_runs; i++) then(pass_of(step, members, runs[i]));
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
    using Number = std::conditional_t<INTEGERS<TYPE>, int16_t, act>;

    static constexpr float LARGEST_CODE = 32767.0f;

    // A thread's state for its item. Row r of a head is state head x rows + r.
    struct State {
        Number* queries;       // [slices of 64 numbers][ITEM_STATES][64]
        float* query_scales;   // [states], of integers
        float* out;            // [states][head_dim]
        float* scores;         // [ATTENTION_ROWS][64]
        Number* weights;       // [ATTENTION_ROWS][64]; the same memory as scores if both are floats
        float* weight_scales;  // [ATTENTION_ROWS], of integers
        float *top, *total;    // [states]
        int32_t *first, *end;  // [rows]: the keys that a row attends to
        int32_t* place;        // [rows]: a row's place in its group of query heads
        uint16_t* unpacked;    // keys and values of a stretch, if tiles multiply 8 bits
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
        state.total = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.first = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.end = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.place = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.unpacked = reinterpret_cast<uint16_t*>(take(unpacked_bytes()));
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
                    const size_t i = head * item.rows + member->at + r;
                    Number* to = state.queries + i * SLICE;
                    if constexpr (INTEGERS<TYPE>)
                        state.query_scales[i] = quantize_query(from, to);
                    else
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
        if (form_.sinks)
            for (int i = 0; i < states; i++) {
                state.top[i] = form_.sinks[(item.head + i / item.rows) * plan_.group + state.place[i % item.rows]];
                state.total[i] = 1.0f;
            }
    }

    // Writes a query as integers. Returns their scale.
    float quantize_query(const act* from, int16_t* to) const {
        float values[MAX_HEAD_DIM];
        vf tops{};
        for (int d = 0; d < kv_.head_dim; d += LANES) {
            const vf numbers = load_acts(from + d);
            tops = max(tops, max(numbers, -numbers));
            store(values + d, numbers);
        }
        const float top = largest(tops), inverse = top > 1e-30f ? LARGEST_CODE / top : 0.0f;
        for (int d = 0; d < kv_.head_dim; d += LANES)
            store_codes(to + d / SLICE * ITEM_STATES * SLICE + d % SLICE, load<vf>(values + d) * inverse);
        return top / LARGEST_CODE;
    }

    static void store_codes(int16_t* to, vf values) {
        typedef int16_t words __attribute__((vector_size(2 * LANES)));
        constexpr float round = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
        store(to, __builtin_convertvector(bits<vi>(values + round), words));
    }

    void write(const Step& step, const Item& item, const Member& member, const State& state) const {
        const int dim = kv_.head_dim;
        for (int head = 0; head < item.heads; head++)
            for (int r = 0; r < member.rows; r++) {
                const int i = head * item.rows + member.at + r;
                const float factor = 1.0f / state.total[i];
                float* from = state.out + size_t(i) * dim;
                if constexpr (TYPE == KVType::INT8) hadamard(from, dim);
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
    // `first` is the first key that any of them attends to.
    struct Pass {
        const Member* member = nullptr;
        int rows = 0, key = 0, num_blocks = 0, first = 0;
    };

    int last_key(const Step& step, const Member& member) const { return position(step, member, member.rows - 1); }

    int first_key(const Step& step, const Member& member) const { return plan_.first_key(position(step, member, 0)); }

    Pass pass_of(const Step& step, const Member* members, const Run& run) const {
        const Member &first = members[run.begin], &last = members[run.end - 1];
        int key = first_key(step, first);
        for (int i = run.begin + 1; i < run.end; i++) key = std::min(key, first_key(step, members[i]));
        return {&first, last.at + last.rows - first.at, run.key, STRETCH_BLOCKS, key};
    }

    Pass pass_of(const Step& step, const Member& member, int key) const {
        const int num_blocks = std::min(STRETCH_BLOCKS, (last_key(step, member) - key) / BLOCK + 1);
        return {&member, member.rows, key, num_blocks, first_key(step, member)};
    }

    Pass first_pass(const Step& step, const Item& item) const {
        const Member* members = plan_.members.data() + item.members;
        return item.num_runs ? pass_of(step, members, plan_.runs[item.runs]) : pass_of(step, *members, members->own);
    }

    // Each head prefetches the next one's keys and values; the last one, those of `next_head` in the next pass.
    void compute(const Step& step, const Item& item, const Pass& pass, const Pass& next, int next_head,
                 State& state) const {
        // One matmul's rows after the other, so that their data stays in the L1 cache.
        const int parts = ceil_div(pass.rows, ATTENTION_ROWS);
        for (int head = 0; head < item.heads; head++) {
            Stretch now = stretch_of(step, pass, item.head + head);
#if defined(AMX)
            if constexpr (TYPE == KVType::INT8) now = Products::unpack(now, state.unpacked, kv_.head_dim);
#endif
            for (int part = 0, row = pass.member->at; part < parts; part++) {
                const int count = pass.rows / parts + (part < pass.rows % parts);
                Stretch ahead;
                if (part == 0)
                    ahead = head + 1 < item.heads ? stretch_of(step, pass, item.head + head + 1)
                                                  : stretch_of(step, next, next_head);
                some_rows(item, head, row, count, now, Ahead<TYPE>(ahead, kv_.panel_bytes()), pass.key, state);
                row += count;
            }
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

    // Rows row .. row + count of a head, at most ATTENTION_ROWS.
    void some_rows(const Item& item, int head, int row, int count, const Stretch& stretch, Ahead<TYPE> ahead, int key,
                   State& state) const {
        const size_t first = size_t(head) * item.rows + row;
        const Part part{state.queries + first * SLICE,       state.query_scales + first, state.out + first * kv_.head_dim,
                        state.scores, state.weights, state.weight_scales};
        if constexpr (TYPE == KVType::INT8)
            for (int b = 0; b < ahead.next.num_blocks; b++)
                prefetch<L1>(reinterpret_cast<const uint8_t*>(ahead.next.scales[b]), LINE);
        Products::multiply_keys(part, count, stretch, ahead, kv_.head_dim);
        if (form_.softcap > 0 || form_.slopes)
            for (int r = 0; r < count; r++)
                reshape(part.scores + r * STRETCH, stretch.num_blocks * BLOCK, key - (state.end[row + r] - 1),
                        (item.head + head) * plan_.group + state.place[row + r]);
        switch (stretch.num_blocks) {
#define CASE(B)                                                                                                     \
    case B:                                                                                                         \
        softmax<B * BLOCK>(part, count, state.first + row, state.end + row, key, state.top + first, state.total + first, \
                           stretch, ahead);                                                                         \
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
            for (int i = 0; i < num; i++) scores[i] += form_.slopes[query] * float(distance + i);
    }

    // Makes the scores before `first` and from `end` on -INFINITY. With whole vectors: the next loads of the same vectors
    // would have to wait for smaller stores.
    template <int KEYS>
    static void mask(float* scores, int first, int end) {
        vi place;
        for (int lane = 0; lane < LANES; lane++) place[lane] = lane;
        for (int i = 0; i < KEYS; i += LANES, place += LANES)
            store(scores + i, (place < first) | (place >= end) ? -INFINITY - vf{} : load<vf>(scores + i));
    }

    // Turns the scores of KEYS keys into softmax weights. Row r attends to the keys first[r] .. end[r]; none of these may
    // be among them. Each loop goes over all rows, because the operations of a single row depend on each other.
    template <int KEYS>
    void softmax(const Part& part, int count, const int32_t* first, const int32_t* end, int key, float* top,
                 float* total, const Stretch& stretch, Ahead<TYPE>& ahead) const {
        static_assert(ATTENTION_ROWS <= LANES);
        float tops[LANES] = {}, shrinks[LANES];
        ahead.prefetch_part(8);
        for (int r = 0; r < count; r++) {
            float* scores = part.scores + r * STRETCH;
            if (first[r] > key || end[r] < key + KEYS) mask<KEYS>(scores, first[r] - key, end[r] - key);
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
        float scales[KEYS];
        for (int b = 0; TYPE == KVType::INT8 && b < KEYS / BLOCK; b++)
            for (int i = 0; i < BLOCK; i += LANES) store(scales + b * BLOCK + i, load_scales(stretch.scales[b] + BLOCK + i));
        for (int r = 0; r < count; r++) {
            float* scores = part.scores + r * STRETCH;
            Number* weights = part.weights + r * STRETCH;
            if (tops[r] == -INFINITY) {
                memset(weights, 0, KEYS * sizeof(Number));
                if constexpr (INTEGERS<TYPE>) part.weight_scales[r] = 0;
                continue;
            }
            ahead.prefetch_part(32);
            vf sums{}, largest_weight{};
            for (int i = 0; i < KEYS; i += LANES) {
                const vf weight = exp_of(load<vf>(scores + i) - top[r]);
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
            total[r] += sum(sums);
        }
    }

    const Rows out_;
    const bool floats_;
    const Rows queries_;
    const KV kv_;
    const AttentionPlan& plan_;
    const ScoreForm form_;
};
