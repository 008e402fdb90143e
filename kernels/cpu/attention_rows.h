// The rows that an item of attention reads and writes, and how they are prefetched.
#pragma once

#include "attention_plan.h"
#include "gemm.h"

// Calls work(r, token, query) for each row of a member: which token of its entry it is of, and which query of a group.
template <class Work>
INLINE void each_row(const AttentionPlan::Member& member, int group, Work work) {
    int token = member.row / group, query = member.row % group;
    for (int r = 0; r < member.rows; r++) {
        work(r, token, query);
        if (++query == group) query = 0, token++;
    }
}

// Prefetches the rows that an item writes, then the queries of its thread's next item, some for each matmul. They come from
// other cores' caches, and an item of a short prompt would wait for them for a good part of its time.
class RowsAhead {
   public:
    // Queries of one token, in activations of `bytes` each.
    struct Memory {
        Rows rows;
        int bytes;
    };

    // `next` may be null. The item fetches in so many `matmuls`.
    RowsAhead(const AttentionPlan& plan, const Step& step, int head_dim, const Memory& out, const AttentionPlan::Item& item,
              const Memory& queries, const AttentionPlan::Item* next, int matmuls)
        : plan_(plan), step_(step), head_dim_(head_dim), memory_(out), item_(&item), queries_(queries), next_(next) {
        const auto lines = [&](const Memory& memory, const AttentionPlan::Item& of) {
            int tokens = 0;
            for (int i = 0; i < of.num_members; i++) tokens += num_tokens(plan.members[of.members + i]);
            return tokens * ceil_div(of.heads * plan.group * head_dim * memory.bytes, LINE);
        };
        each_ = ceil_div(lines(out, item) + (next ? lines(queries, *next) : 0), std::max(1, matmuls));
        begin_member();
    }

    void fetch() {
        for (int left = each_; left > 0 && item_; left--) {
            __builtin_prefetch(from_, 0, L2);
            from_ += LINE;
            if (from_ < end_) continue;
            if (--tokens_ > 0) {
                begin_ += memory_.rows.stride;
                begin_token();
            } else if (++member_ < item_->num_members) {
                begin_member();
            } else {
                member_ = 0, item_ = next_, next_ = nullptr, memory_ = queries_;
                if (item_) begin_member();
            }
        }
    }

   private:
    int num_tokens(const AttentionPlan::Member& member) const {
        return (member.row + member.rows - 1) / plan_.group - member.row / plan_.group + 1;
    }

    void begin_member() {
        const AttentionPlan::Member& member = plan_.members[item_->members + member_];
        const int first = member.row / plan_.group, queries = plan_.group * head_dim_ * memory_.bytes;
        tokens_ = num_tokens(member);
        begin_ = memory_.rows.data + (step_.offsets[member.entry] + first) * memory_.rows.stride + item_->head * queries;
        bytes_ = item_->heads * queries;
        begin_token();
    }

    void begin_token() { from_ = begin_, end_ = begin_ + bytes_; }

    const AttentionPlan& plan_;
    const Step& step_;
    const int head_dim_;
    Memory memory_;
    const AttentionPlan::Item* item_;
    const Memory queries_;
    const AttentionPlan::Item* next_;
    int each_, member_ = 0, tokens_, bytes_;
    const uint8_t *begin_, *from_, *end_;
};
