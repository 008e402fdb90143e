// The keys and values of one head in a stretch of 64 tokens, and how they are prefetched.
#pragma once

#include "attention_plan.h"
#include "gemm.h"

struct Stretch {
    int num_blocks = 0;
    const uint8_t *keys[STRETCH_BLOCKS], *values[STRETCH_BLOCKS];
    const uint16_t* scales[STRETCH_BLOCKS];  // [2][16 tokens], of keys and values in 8 bits
};

// The stretch that a thread reads next. It prefetches it while it computes another one.
//
// A matmul of vectors prefetches a line for each line that it reads, from several blocks at once (`next`). At level amx,
// and with 8 bits, these bursts would be too long, and too far apart: the matmuls are half of the time only. So then
// (SPREAD) the lines are prefetched in the order of memory, some at a time, throughout.
template <bool SPREAD>
class StretchAhead {
   public:
    StretchAhead(const Stretch& next, size_t panel_bytes)
        : next(next), lines_(int(panel_bytes) / LINE), total_(2 * next.num_blocks * lines_) {}

    const Stretch& next;

    // Between two instructions on tiles, in a part of the matmul that reads this many lines.
    void prefetch_beside(int lines) { prefetch_lines(lines * 5 / 16); }
    // The fraction 1 / `part` of the lines.
    void prefetch_part(int part) { prefetch_lines(total_ / part); }
    void prefetch_rest() { prefetch_lines(total_); }

    void prefetch_lines(int count) {
        if constexpr (!SPREAD) return;
        while (count > 0 && piece_ < 2 * next.num_blocks) {
            const int n = next.num_blocks;
            const uint8_t* piece = piece_ < n ? next.keys[piece_] : next.values[piece_ - n];
            const int some = std::min(count, lines_ - line_);
            prefetch<L2>(piece + line_ * LINE, some * LINE);
            count -= some, line_ += some;
            if (line_ == lines_) line_ = 0, piece_++;
        }
    }

   private:
    const int lines_, total_;  // of a block's keys or values; of all
    int piece_ = 0, line_ = 0;
};
