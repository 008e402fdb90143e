// The plan of a step's attention: cuts it into items of about equal cost for the threads; the same for every layer.
//
// Stretches of 64 keys begin at multiples of 64, and every row goes through its own in order. So a row's result depends
// neither on the rows that are computed beside it nor on the chunks of its prompt.
//
// Rows with the same first blocks, after a cached prefix, go through those together: their keys and values are read
// once, and a matmul of many rows takes less time than many of few.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "step.h"

constexpr int STRETCH = 64;
constexpr int STRETCH_BLOCKS = STRETCH / BLOCK;
constexpr int ITEM_ROWS = 48;  // most queries of a head and an entry that go through a stretch of keys together
constexpr int ITEM_STATES = 128;  // most queries of an item, over all heads and entries

class AttentionPlan final : public Op {
   public:
    // Rows row .. row + rows of an entry (its tokens x queries per head). They begin at row `at` of the item. Keys
    // before `own` are in the item's runs; the member goes through the others alone, up to `end`, which none of its rows
    // sees.
    struct Member {
        int entry, row, rows, at, own, end;
    };
    // Members begin .. end go through the stretch at `key` together: it is in the same blocks for all of them, and
    // before their first token.
    struct Run {
        int key, begin, end;
    };
    struct Item {
        int head, heads;
        int members, num_members;  // in `members`
        int runs, num_runs;        // in `runs`
        int rows;                  // per head
        int64_t cost;
    };

    // `window` is 0 for none. `window_after` is how many keys after a token it sees at most, besides the limit in
    // Step::key_ends; -1: only that limits it.
    AttentionPlan(int num_heads, int num_kv_heads, int threads, int window, int window_after)
        : Op("attention_plan"), group(num_heads / num_kv_heads), num_kv_heads(num_kv_heads), window(window),
          window_after_(window_after), threads_(threads) {}

    int tiles(const Step&) const override { return 1; }

    void tile(const Step& step, int, const Scratch&) override {
        items.clear(), members.clear(), runs.clear();
        int decodes = 0;
        for (int entry = 0; entry < step.rows; entry++) decodes += step.counts[entry] == 1;
        // The heads of a row are adjacent in memory. With enough rows for all threads, one thread reads all heads of a
        // row.
        whole_ = decodes >= 4 * threads_ && group * num_kv_heads <= ITEM_STATES;
        sort(step);
        for (size_t i = 0; i < order_.size();) {
            size_t end = i + 1;
            while (end < order_.size() && common_[end] > 0) end++;
            add_sharers(step, int(i), int(end - i));
            i = end;
        }
        // Longest first, so that no long item starts when the others are done.
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
        // Threads take them in turns: to and fro, else the first thread would have the longer one of each turn.
        for (size_t i = threads_; i + threads_ <= items.size(); i += 2 * threads_)
            std::reverse(items.begin() + i, items.begin() + i + threads_);
    }

    int first_key(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
    int first_stretch(int position) const { return first_key(position) / STRETCH; }

    // The first key that a token of an entry does not see.
    int end_key(const Step& step, int entry, int token) const {
        const int after = step.starts[entry] + token + 1;
        if (!step.key_ends) return after;
        const int end = step.key_ends[step.offsets[entry] + token];
        return window_after_ < 0 ? end : std::min(end, after + window_after_);
    }

    // The first key that none of the tokens from `first` to `last` of an entry sees.
    int end_key(const Step& step, int entry, int first, int last) const {
        int end = end_key(step, entry, last);
        for (int token = first; step.key_ends && token < last; token++) end = std::max(end, end_key(step, entry, token));
        return end;
    }

    std::vector<Item> items;
    std::vector<Member> members;
    std::vector<Run> runs;
    const int group, num_kv_heads, window;

   private:
    // Cost of reading a stretch, in rows that go through it.
    static constexpr int64_t FETCH = 4;

    // Sets `order_`, the entries that may share stretches, sorted by their blocks so that common prefixes are adjacent,
    // and `common_`, the number of stretches that each shares with the previous one. Makes items of the other entries.
    void sort(const Step& step) {
        order_.clear(), common_.clear();
        for (int entry = 0; entry < step.rows; entry++) {
            if (step.counts[entry] * group <= ITEM_ROWS && num_before(step, entry) > 0)
                order_.push_back(entry);
            else
                add_entry(step, entry);
        }
        // Most entries share no block with others, which their first blocks show.
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

    // Whole stretches before the first token of an entry that end before any of its tokens' `end_key`.
    int num_before(const Step& step, int entry) const {
        int end = step.starts[entry];
        for (int token = 0; step.key_ends && end && token < step.counts[entry]; token++)
            end = std::min(end, end_key(step, entry, token));
        return end / STRETCH;
    }

    // Number of first stretches that two entries have in the same blocks; 0 if they are all outside their windows.
    int in_common(const Step& step, int a, int b) const {
        const int32_t *first = step.blocks(a), *second = step.blocks(b);
        const int most = std::min(num_before(step, a), num_before(step, b)) * STRETCH_BLOCKS;
        const int num = int(std::mismatch(first, first + most, second).first - first) / STRETCH_BLOCKS;
        return num > first_stretch(std::max(step.starts[a], step.starts[b])) ? num : 0;
    }

    // Adds `num` entries of `order_` from `first` on, each of which shares stretches with the next.
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

    // Number of parts to cut sharing entries into: more parts occupy all threads, fewer read less. If little is shared,
    // as many as entries: a row alone reads its keys in the order of memory, all heads at once.
    int num_parts(const Step& step, int first, int num) const {
        if (num == 1) return 1;
        int64_t shared = 0, own = 0, rows = 0;
        for (int i = first; i < first + num; i++) {
            const int entry = order_[i], start = step.starts[entry], count = step.counts[entry];
            const int keys = end_key(step, entry, 0, count - 1) - first_stretch(start) * STRETCH;
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

    // Adds a part of sharing entries: an item for each head.
    void add_part(const Step& step, int first, int num) {
        const int first_member = int(members.size()), first_run = int(runs.size());
        int rows = 0, begin = INT32_MAX, end = 0;
        int64_t cost = 0;
        for (int i = 0; i < num; i++) {
            const int entry = order_[first + i], seen = first_stretch(step.starts[entry]);
            const int common = std::max(i ? common_[first + i] : 0, i + 1 < num ? common_[first + i + 1] : 0);
            const int last = step.counts[entry] - 1;
            members.push_back(
                {entry, 0, step.counts[entry] * group, rows, common * STRETCH, end_key(step, entry, 0, last)});
            rows += members.back().rows;
            begin = std::min(begin, seen), end = std::max(end, common);
            cost += own_cost(members.back());
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

    // Adds an entry that shares nothing.
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
        const Member member{entry, row, rows, 0, first, end_key(step, entry, row / group, (row + rows - 1) / group)};
        items.push_back({head, heads, int(members.size()), 1, 0, 0, rows, own_cost(member) * heads});
        members.push_back(member);
    }

    static int64_t own_cost(const Member& member) { return (member.end - member.own) * (FETCH + member.rows); }

    const int window_after_, threads_;
    bool whole_ = false;
    std::vector<int> order_, common_;
};
