// Pipeline parallelism: each rank shows the others how far it is with the steps, and they wait for it. What a stage of
// the pipeline hands over lies in memory beside the board; its writer shows the step as done afterwards.
//
//     stage 0   step 7 ──► hidden states, done = 7 ─┐             ┌─► reads the ids of step 7
//     stage 1                                       └─► step 7 ──► ids, done = 7
#pragma once

#include "ranks.h"

// What one rank writes.
struct BoardLine {
    alignas(64) Signal signal;   // changes of `done`
    std::atomic<uint64_t> done;  // the scheduler's incarnation << 32 | how many of its steps this rank has computed
    std::atomic<uint64_t> at;    // changes with every op; (layer + 1) << 48, or 0 between steps
    std::atomic<uint64_t> awaited;  // `done` of the rank that it waits for
    std::atomic<int32_t> awaits;    // this rank + 1, or 0 if it waits for none
    std::atomic<int32_t> is_busy;   // it waits for another process, with a deadline of its own
    alignas(64) std::atomic<int64_t> waited;  // nanoseconds, ever
};

class StepBoard {
   public:
    // `memory` is zeros at first.
    StepBoard(uint8_t* memory, int rank, int spins, int timeout_ms)
        : rank_(rank), lines_(reinterpret_cast<BoardLine*>(memory)), spins_(spins) {
        set_timeout(timeout_ms);
    }

    static size_t bytes(int num) { return num * sizeof(BoardLine); }

    void set_timeout(int timeout_ms) { timeout_ = int64_t(timeout_ms) * 1'000'000; }

    std::atomic<uint64_t>* at() { return &lines_[rank_].at; }

    void post(uint64_t done) {
        BoardLine& line = lines_[rank_];
        line.at.store(0);
        line.done.store(done);
        line.signal.set(line.signal.word.load() + 1);
    }

    // Waits until a rank has done `least`. Returns what it has done, or 0 if it computes nothing for too long.
    uint64_t wait(int other, uint64_t least) {
        const BoardLine& line = lines_[other];
        const uint64_t seen = line.done.load();
        if (seen >= least) return seen;
        BoardLine& own = lines_[rank_];
        const int64_t begun = Ranks::now();
        own.awaited.store(least);
        own.awaits.store(other + 1);
        const bool is_ready = spin(line, least) || sleep(lines_[other], least);
        own.awaits.store(0);
        own.waited.fetch_add(Ranks::now() - begun, std::memory_order_relaxed);
        return is_ready ? line.done.load() : 0;
    }

    void set_busy(bool is_busy) { lines_[rank_].is_busy.store(is_busy); }

    // The layer that a rank computes; -1 before the first one and after the last one, -2 between steps.
    int layer(int of) const {
        const uint64_t at = lines_[of].at.load();
        return at ? int(at >> 48) - 1 : -2;
    }

    double waited_s() const { return double(lines_[rank_].waited.load()) * 1e-9; }

   private:
    bool spin(const BoardLine& line, uint64_t least) const {
        for (int i = 0; i < spins_; i++) {
            if (line.done.load() >= least) return true;
            Ranks::relax();
        }
        return false;
    }

    bool sleep(BoardLine& line, uint64_t least) const {
        uint64_t at = line.at.load();
        for (int64_t slept = 0;;) {
            line.signal.sleepers.fetch_add(1);
            const uint32_t seen = line.signal.word.load();
            if (line.done.load() >= least) {
                line.signal.sleepers.fetch_sub(1);
                return true;
            }
            const timespec slice{0, Ranks::SLICE};
            const int64_t begun = Ranks::now();
            syscall(SYS_futex, &line.signal.word, FUTEX_WAIT, seen, &slice, nullptr, 0);
            line.signal.sleepers.fetch_sub(1);
            if (const uint64_t now_at = line.at.load(); now_at != at || is_excused(line))
                at = now_at, slept = 0;
            else  // if all processes were suspended, one sleep seems long, but no rank was late
                slept += std::min(Ranks::now() - begun, 2 * Ranks::SLICE);
            if (slept > timeout_) return line.done.load() >= least;
        }
    }

    // Whether a rank can't go on: another one has not done what it waits for.
    bool is_excused(const BoardLine& line) const {
        const int awaits = line.awaits.load();
        return line.is_busy.load() || (awaits && lines_[awaits - 1].done.load() < line.awaited.load());
    }

    const int rank_;
    BoardLine* const lines_;
    const int spins_;
    int64_t timeout_;
};
