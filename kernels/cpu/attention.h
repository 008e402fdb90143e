// Causal attention over keys and values in blocks, decode and prefill alike: softmax(queries x keys) x values, a stretch
// of 64 keys at a time, with the running maximum and sum of Milakov and Gimelshein (2018, arXiv:1805.02867).
//
// Stretches begin at multiples of 64 and every row goes through its own in order, so what a row yields does not depend on
// which rows are computed beside it, nor on how its prompt was cut.
//
// Rows that begin with the same blocks, behind a cached prefix, go through those together: what is read once for all of
// them would else be read for each, and a product of many rows takes less than many of few.
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "linear.h"
#include "step.h"

constexpr int STRETCH = 64;
constexpr int STRETCH_BLOCKS = STRETCH / BLOCK;
constexpr int ITEM_ROWS = 48;  // queries of one head of an entry that go through a stretch of keys together
constexpr int MOST_PANELS = 16;  // of a head's values: head_dim is 256 at most
constexpr int ITEM_STATES = 128;  // queries of all heads and entries of an item

// What the attention of one step is cut into; the same for every layer.
class AttentionPlan final : public Op {
   public:
    // Rows row .. row + rows of an entry's tokens x queries a head. Among the rows of its item they begin at `at`. Keys
    // before `own` are in the item's runs; from there on it goes alone.
    struct Member {
        int entry, row, rows, at, own;
    };
    // Members begin .. end go through the stretch at `key` together: for all of them it lies in the same blocks, and
    // before their first token.
    struct Run {
        int key, begin, end;
    };
    struct Item {
        int head, heads;
        int members, num_members;  // in `members`
        int runs, num_runs;        // in `runs`
        int rows;                  // of a head
        int64_t cost;
    };

    AttentionPlan(int num_heads, int num_kv_heads, int threads, int window)
        : Op("attention_plan"), group(num_heads / num_kv_heads), num_kv_heads(num_kv_heads), window(window),
          threads_(threads) {}

    int tiles(const Step&) const override { return 1; }

    void tile(const Step& step, int, const Scratch&) override {
        items.clear(), members.clear(), runs.clear();
        int decodes = 0;
        for (int entry = 0; entry < step.rows; entry++) decodes += step.counts[entry] == 1;
        // Heads of a row lie together, so one thread reads them all where there are rows enough for all threads.
        whole_ = decodes >= 4 * threads_ && group * num_kv_heads <= ITEM_STATES;
        sort(step);
        for (size_t i = 0; i < order_.size();) {
            size_t end = i + 1;
            while (end < order_.size() && common_[end] > 0) end++;
            add_sharers(step, int(i), int(end - i));
            i = end;
        }
        // The long ones first, so that none is begun when the others are done.
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }

    int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
    int first_stretch(int position) const { return first_key(position) / STRETCH; }

    std::vector<Item> items;
    std::vector<Member> members;
    std::vector<Run> runs;
    const int group, num_kv_heads, window;

   private:
    // A stretch costs as much as so many rows before any has gone through it.
    static constexpr int64_t FETCH = 4;

    // Entries that may share, in the order of their blocks, so that those with a prefix in common lie side by side:
    // `order_`, and how many stretches each has in common with the one before it that both look at. Others are cut into
    // items of their own.
    void sort(const Step& step) {
        order_.clear(), common_.clear();
        for (int entry = 0; entry < step.rows; entry++) {
            if (step.counts[entry] * group <= ITEM_ROWS && num_before(step, entry) > 0)
                order_.push_back(entry);
            else
                add_entry(step, entry);
        }
        // Most have no block in common with any other, which the first one tells.
        std::sort(order_.begin(), order_.end(), [&](int a, int b) {
            const int32_t *first = step.blocks(a), *second = step.blocks(b);
            if (first[0] != second[0]) return first[0] < second[0];
            const int num[] = {num_before(step, a), num_before(step, b)};
            const int order = std::memcmp(first, second, std::min(num[0], num[1]) * STRETCH_BLOCKS * sizeof *first);
            return order ? order < 0 : num[0] != num[1] ? num[0] < num[1] : a < b;
        });
        for (size_t i = 0; i < order_.size(); i++)
            common_.push_back(i ? in_common(step, order_[i - 1], order_[i]) : 0);
    }

    // Whole stretches before the first token of an entry.
    static int num_before(const Step& step, int entry) { return step.starts[entry] / STRETCH; }

    // How many stretches from the first on two entries have in the same blocks; 0 if their windows leave none of them.
    int in_common(const Step& step, int a, int b) const {
        const int32_t *first = step.blocks(a), *second = step.blocks(b);
        const int most = std::min(num_before(step, a), num_before(step, b)) * STRETCH_BLOCKS;
        const int num = int(std::mismatch(first, first + most, second).first - first) / STRETCH_BLOCKS;
        return num > first_stretch(std::max(step.starts[a], step.starts[b])) ? num : 0;
    }

    // The `num` entries of `order_` from `first` on, each of which shares with the next.
    void add_sharers(const Step& step, int first, int num) {
        const int parts = num_parts(step, first, num);
        for (int part = 0; part < parts; part++) {
            const int count = num / parts + (part < num % parts);
            if (count == 1)
                add_entry(step, order_[first]);
            else
                add_part(step, first, count);
            first += count;
        }
    }

    // Into how many parts sharers are cut: more of them occupy all threads, fewer read less. As many as there are
    // sharers where little is shared: alone, a row reads what is its own in the order in which it lies, all heads at once.
    int num_parts(const Step& step, int first, int num) const {
        if (num == 1) return 1;
        int64_t shared = 0, own = 0, rows = 0;
        for (int i = first; i < first + num; i++) {
            const int entry = order_[i], start = step.starts[entry], count = step.counts[entry];
            const int keys = start + count - first_stretch(start) * STRETCH;
            const int common = std::max(i > first ? common_[i] : 0, i + 1 < first + num ? common_[i + 1] : 0);
            const int together = (common - first_stretch(start)) * STRETCH;
            shared += together, own += keys - together, rows = std::max(rows, int64_t(count) * group);
        }
        shared /= num, own /= num;
        int best = num;
        int64_t least = ceil_div(num * num_kv_heads, threads_) * (shared + own) * (FETCH + rows) * 3 / 4;
        for (int parts = 1; parts < num; parts++) {
            const int64_t count = ceil_div(num, parts);
            if (count * rows > ITEM_STATES) continue;
            const int64_t cost = shared * (FETCH + count * rows) + count * own * (FETCH + rows);
            const int64_t all = ceil_div(parts * num_kv_heads, threads_) * cost;
            if (all < least) least = all, best = parts;
        }
        return best;
    }

    // A part of some sharers: an item for each head.
    void add_part(const Step& step, int first, int num) {
        const int first_member = int(members.size()), first_run = int(runs.size());
        int rows = 0, begin = INT32_MAX, end = 0;
        int64_t cost = 0;
        for (int i = 0; i < num; i++) {
            const int entry = order_[first + i], seen = first_stretch(step.starts[entry]);
            const int common = std::max(i ? common_[first + i] : 0, i + 1 < num ? common_[first + i + 1] : 0);
            members.push_back({entry, 0, step.counts[entry] * group, rows, common * STRETCH});
            rows += members.back().rows;
            begin = std::min(begin, seen), end = std::max(end, common);
            cost += own_cost(step, members.back());
        }
        for (int stretch = begin; stretch < end; stretch++) {
            const auto looks = [&](int i) {
                const Member& member = members[first_member + i];
                return stretch >= first_stretch(step.starts[member.entry]) && stretch * STRETCH < member.own;
            };
            for (int i = 0; i < num;) {
                int next = i + 1;
                if (looks(i)) {
                    int count = members[first_member + i].rows;
                    for (; next < num && common_[first + next] > stretch && looks(next); next++)
                        count += members[first_member + next].rows;
                    runs.push_back({stretch * STRETCH, i, next});
                    cost += STRETCH * (FETCH + count);
                }
                i = next;
            }
        }
        for (int head = 0; head < num_kv_heads; head++)
            items.push_back({head, 1, first_member, num, first_run, int(runs.size()) - first_run, rows, cost});
    }

    // An entry that goes alone.
    void add_entry(const Step& step, int entry) {
        const int rows = step.counts[entry] * group;
        if (whole_ && step.counts[entry] == 1 && group <= ITEM_ROWS) {
            add_alone(step, entry, 0, num_kv_heads, 0, group);
            return;
        }
        for (int row = 0; row < rows; row += ITEM_ROWS)
            for (int head = 0; head < num_kv_heads; head++)
                add_alone(step, entry, head, 1, row, std::min(ITEM_ROWS, rows - row));
    }

    void add_alone(const Step& step, int entry, int head, int heads, int row, int rows) {
        const int first = first_stretch(step.starts[entry] + row / group) * STRETCH;
        const Member member{entry, row, rows, 0, first};
        items.push_back({head, heads, int(members.size()), 1, 0, 0, rows, own_cost(step, member) * heads});
        members.push_back(member);
    }

    int64_t own_cost(const Step& step, const Member& member) const {
        const int last = step.starts[member.entry] + (member.row + member.rows - 1) / group;
        return (last - member.own + 1) * (FETCH + member.rows);
    }

    const int threads_;
    bool whole_ = false;
    std::vector<int> order_, common_;
};

class Attention final : public Op {
   public:
    // `out` is plain activations; with `floats`, float32 on every ISA.
    Attention(Rows out, bool floats, const float* queries, const KV& kv, const AttentionPlan& plan)
        : Op("attention"), out_(out), floats_(floats), queries_(queries), kv_(kv), plan_(plan) {}

    int tiles(const Step&) const override { return int(plan_.items.size()); }

    size_t scratch_bytes() const override {
        return align(size_t(num_slices()) * ITEM_STATES * SLICE * sizeof(act)) + align(ITEM_STATES * kv_.head_dim * 4) +
               align(MOST_ROWS * STRETCH * 4) + align(MOST_ROWS * STRETCH * sizeof(act)) + 4 * align(ITEM_STATES * 4);
    }

    void tile(const Step& step, int index, const Scratch& scratch) override {
        const Item& item = plan_.items[index];
        const Member* members = plan_.members.data() + item.members;
        const Run* runs = plan_.runs.data() + item.runs;
        State state = lay_out(scratch.memory);
        begin(step, item, members, state);
        for (int i = 0; i < item.num_runs; i++) {
            const Member &first = members[runs[i].begin], &last = members[runs[i].end - 1];
            stretch(step, item, first, last.at + last.rows - first.at, runs[i].key, STRETCH_BLOCKS, state);
        }
        for (int i = 0; i < item.num_members; i++) {
            const Member& member = members[i];
            const int last = position(step, member, member.rows - 1);
            for (int key = member.own; key <= last; key += STRETCH)
                stretch(step, item, member, member.rows, key, std::min(STRETCH_BLOCKS, (last - key) / BLOCK + 1),
                        state);
        }
        for (int i = 0; i < item.num_members; i++) write(step, item, members[i], state);
    }

    // Keys and values of a block count once, however many entries read them: as many as one of them reads at most.
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

    // Of the item that a thread is at. Row r of a head is state head x rows + r.
    struct State {
        act* queries;   // [slices of 64 numbers][ITEM_STATES][64]
        float* out;     // [states][head_dim]
        float* scores;  // [MOST_ROWS][64]
        act* weights;   // [MOST_ROWS][64]; where they are floats too, in the scores' place
        float *top, *total;    // [states]
        int32_t *first, *end;  // [rows]: the keys that a row sees
    };

    static constexpr int SLICE = 64;  // numbers of queries that lie together: rows are then a constant apart

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
        state.scores = reinterpret_cast<float*>(take(MOST_ROWS * STRETCH * 4));
        if constexpr (sizeof(act) == sizeof(float))
            state.weights = reinterpret_cast<act*>(state.scores);
        else
            state.weights = reinterpret_cast<act*>(take(MOST_ROWS * STRETCH * sizeof(act)));
        state.top = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.total = reinterpret_cast<float*>(take(ITEM_STATES * 4));
        state.first = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
        state.end = reinterpret_cast<int32_t*>(take(ITEM_STATES * 4));
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
        const size_t width = size_t(kv_.heads) * plan_.group * dim;
        for (const Member* member = members; member < members + item.num_members; member++)
            for (int r = 0; r < member->rows; r++) {
                const float* row = queries_ + token(step, *member, r) * width;
                for (int head = 0; head < item.heads; head++) {
                    const float* from = row + column(item, *member, head, r);
                    act* to = state.queries + size_t(head * item.rows + member->at + r) * SLICE;
                    for (int d = 0; d < dim; d++) to[d / SLICE * ITEM_STATES * SLICE + d % SLICE] = to_act(from[d]);
                }
                const int at = position(step, *member, r);
                state.first[member->at + r] = plan_.first_key(at);
                state.end[member->at + r] = at + 1;
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
                if (floats_)
                    for (int d = 0; d < dim; d++) reinterpret_cast<float*>(row)[first + d] = from[d] * factor;
                else
                    for (int d = 0; d < dim; d++) reinterpret_cast<act*>(row)[first + d] = to_act(from[d] * factor);
            }
    }

    // `rows` rows of each head, from the first of `member` on, go through the stretch at `key` of that member's blocks.
    void stretch(const Step& step, const Item& item, const Member& member, int rows, int key, int num_blocks,
                 State& state) const {
        const int32_t* blocks = step.blocks(member.entry) + key / BLOCK;
        // Rows that a product takes at once have theirs, then others: what they need stays in the nearest cache.
        const int parts = ceil_div(rows, MOST_ROWS);
        for (int head = 0; head < item.heads; head++)
            for (int part = 0, row = member.at; part < parts; part++) {
                const int count = rows / parts + (part < rows % parts);
                some_rows(item, head, row, count, blocks, num_blocks, key, state);
                row += count;
            }
    }

    // Rows row .. row + count of a head; MOST_ROWS at most.
    void some_rows(const Item& item, int head, int row, int count, const int32_t* blocks, int num_blocks, int key,
                   State& state) const {
        const uint16_t *keys[STRETCH_BLOCKS], *values[STRETCH_BLOCKS];
        for (int b = 0; b < num_blocks; b++) {
            keys[b] = kv_.keys(blocks[b], item.head + head);
            values[b] = kv_.values(blocks[b], item.head + head);
        }
        const size_t first = size_t(head) * item.rows + row;
        const Part part{state.queries + first * SLICE, state.out + first * kv_.head_dim, state.scores, state.weights};
        switch (count) {
#define CASE(R)                                                          \
    case R:                                                              \
        if constexpr (R <= MOST_ROWS) scores<R>(part, keys, num_blocks); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
        soften(part, count, state.first + row, state.end + row, key, state.top + first, state.total + first);
        switch (count) {
#define CASE(R)                                                              \
    case R:                                                                  \
        if constexpr (R <= MOST_ROWS) add_values<R>(part, values, num_blocks); \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }

    // Where the rows of one product begin.
    struct Part {
        const act* queries;
        float *out, *scores;
        act* weights;
    };

    // Scores as weights. Row r sees the keys first[r] .. end[r]; of these 64 there may be none among them. Each step is
    // done for all rows before the next: a row alone would wait for its own last result most of the time.
    void soften(const Part& part, int count, const int32_t* first, const int32_t* end, int key, float* top,
                float* total) const {
        static_assert(MOST_ROWS <= LANES);
        float tops[LANES] = {}, shrinks[LANES];
        for (int r = 0; r < count; r++) {
            float* scores = part.scores + r * STRETCH;
            for (int i = 0; i < first[r] - key && i < STRETCH; i++) scores[i] = -INFINITY;
            for (int i = std::max(0, end[r] - key); i < STRETCH; i++) scores[i] = -INFINITY;
            vf highest = load<vf>(scores);
            for (int i = LANES; i < STRETCH; i += LANES) highest = max(highest, load<vf>(scores + i));
            tops[r] = largest(highest);
            shrinks[r] = top[r] - tops[r];
        }
        for (int r = count; r < LANES; r++) shrinks[r] = 0;
        store(shrinks, exp_of(load<vf>(shrinks)));
        for (int r = 0; r < count; r++) {
            if (!(tops[r] > top[r])) continue;
            float* out = part.out + size_t(r) * kv_.head_dim;
            for (int d = 0; d < kv_.head_dim; d++) out[d] *= shrinks[r];
            total[r] *= shrinks[r];
            top[r] = tops[r];
        }
        for (int r = 0; r < count; r++) {
            const float* scores = part.scores + r * STRETCH;
            act* weights = part.weights + r * STRETCH;
            if (tops[r] == -INFINITY) {
                for (int i = 0; i < STRETCH; i++) weights[i] = to_act(0);
                continue;
            }
            vf sums{};
            for (int i = 0; i < STRETCH; i += LANES) {
                const vf weight = exp_of(load<vf>(scores + i) - top[r]);
                sums += weight;
                store_acts(weights + i, weight);
            }
            total[r] += sum(sums);
        }
    }

    // Panels at once: one row has registers for more, and needs them.
    template <int R>
    static constexpr int AT_ONCE = R == 1 ? 4 : R == 2 || LANES == 16 ? 2 : 1;

    // scores [R][64] = queries [R][head_dim] x keys, a panel of which is a block
    template <int R>
    void scores(const Part& part, const uint16_t* const* keys, int num_blocks) const {
        int b = 0;
        for (; b + AT_ONCE<R> <= num_blocks; b += AT_ONCE<R>)
            keys_product<R, AT_ONCE<R>>(part.queries, keys + b, kv_.head_dim, part.scores + b * BLOCK);
        if constexpr (AT_ONCE<R> > 1)
            for (; b < num_blocks; b++)
                keys_product<R, 1>(part.queries, keys + b, kv_.head_dim, part.scores + b * BLOCK);
    }

    // out [R][head_dim] += weights [R][64] x values, of which a block has head_dim / 16 panels
    template <int R>
    void add_values(const Part& part, const uint16_t* const* values, int num_blocks) const {
        const int num_panels = kv_.head_dim / PANEL;
        int p = 0;
        for (; p + AT_ONCE<R> <= num_panels; p += AT_ONCE<R>)
            values_product<R, AT_ONCE<R>>(part.weights, values, num_blocks, p, part.out, kv_.head_dim);
        if constexpr (AT_ONCE<R> > 1)
            for (; p < num_panels; p++)
                values_product<R, 1>(part.weights, values, num_blocks, p, part.out, kv_.head_dim);
    }

    // Not inlined: with constants for arguments GCC runs out of registers.
    template <int R, int P>
    __attribute__((noinline)) static void keys_product(const act* queries, const uint16_t* const* keys, int dim,
                                                       float* out) {
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
            multiply_bf16<R, P>(rows, from, PANEL / 2, acc);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) store(out + r * STRETCH + p * PANEL + v * LANES, acc[r][p][v]);
    }

    template <int R, int P>
    __attribute__((noinline)) static void values_product(const act* weights, const uint16_t* const* values,
                                                         int num_blocks, int panel, float* out, int dim) {
        vf acc[R][P][VECTORS];
        out += panel * PANEL;
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = load<vf>(out + r * dim + p * PANEL + v * LANES);
        for (int b = 0; b < num_blocks; b++, weights += BLOCK) {
            const act* rows[R];
            const uint32_t* from[P];
            for (int r = 0; r < R; r++) rows[r] = weights + r * STRETCH;
            for (int p = 0; p < P; p++)
                from[p] = reinterpret_cast<const uint32_t*>(values[b] + (panel + p) * PANEL * BLOCK);
            multiply_bf16<R, P>(rows, from, BLOCK / 2, acc);
        }
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) store(out + r * dim + p * PANEL + v * LANES, acc[r][p][v]);
    }

    const Rows out_;
    const bool floats_;
    const float* const queries_;
    const KV kv_;
    const AttentionPlan& plan_;
};
