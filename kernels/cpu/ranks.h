// Tensor parallelism: ranks are processes that compute one model together, each its own outputs of every matrix. They
// share one segment of memory, in which they gather what they have computed, and meet at barriers.
//
//     compute own outputs ──► arrived + 1 ──► wait until all have arrived ──► read what the others have written
//
// A waiting rank spins for some microseconds and then sleeps in the kernel. std::atomic::wait is not for processes: it
// asks for FUTEX_PRIVATE, and a rank would sleep for ever.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>
#include <string>

#include "step.h"

// A word that a rank changes and others wait for.
struct Signal {
    std::atomic<uint32_t> word;
    std::atomic<uint32_t> sleepers;

    void set(uint32_t value) {
        word.store(value);
        // A rank that sleeps has counted itself before it looked at the word.
        if (sleepers.load()) syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
};

// What one rank writes: a line for each signal.
struct RankLine {
    alignas(64) Signal arrived;  // barriers that it has come to, ever
    alignas(64) Signal begun;    // changes of `step`
    std::atomic<uint64_t> step;  // the scheduler's incarnation << 32 | how many of its steps this rank has begun
    std::atomic<int32_t> is_busy;  // it waits for another process, with a deadline of its own
    alignas(64) std::atomic<int64_t> waited;  // nanoseconds at barriers, ever
};

// What rank 0 writes when a step's ids are complete.
struct Outcome {
    alignas(64) Signal published;  // steps, and tries of steps, ever
    std::atomic<int32_t> status;
};

class Ranks {
   public:
    enum Begun { ALL = 0, ABANDONED = 1, LATE = 2 };

    // `memory` is the beginning of the segment, zeros at first.
    Ranks(uint8_t* memory, int rank, int num, int spins, int timeout_ms)
        : rank(rank), num(num), outcome_(reinterpret_cast<Outcome*>(memory)),
          lines_(reinterpret_cast<RankLine*>(memory + sizeof(Outcome))), spins_(spins) {
        set_timeout(timeout_ms);
    }

    static size_t bytes(int num) { return sizeof(Outcome) + num * sizeof(RankLine); }

    void set_timeout(int timeout_ms) { timeout_ = int64_t(timeout_ms) * 1'000'000; }

    void announce(uint64_t step) {
        RankLine& line = lines_[rank];
        line.step.store(step);
        line.begun.set(line.begun.word.load() + 1);
    }

    // Waits until all ranks have begun this step. ABANDONED: another rank knows a newer scheduler, so the one that planned
    // this step is dead, and not all ranks may have got it.
    int begin(uint64_t step) {
        announce(step);
        for (int other = 0; other < num; other++) {
            if (other == rank) continue;
            RankLine& line = lines_[other];
            uint64_t seen = 0;
            const auto is_here = [&] {
                seen = line.step.load();
                return seen >= step;
            };
            if (!wait(line.begun, other, is_here)) return late(other, "the end of the step before", -1), LATE;
            if (seen >> 32 > step >> 32) return ABANDONED;
        }
        return ALL;
    }

    void arrive() { lines_[rank].arrived.set(++arrived_); }

    // Returns whether all ranks have arrived in time.
    bool wait_for_all(const char* what, int layer) {
        for (int other = 0; other < num; other++) {
            if (other == rank) continue;
            RankLine& line = lines_[other];
            const auto is_here = [&] { return int32_t(line.arrived.word.load() - arrived_) >= 0; };
            if (!wait(line.arrived, other, is_here)) return late(other, what, layer), false;
        }
        return true;
    }

    void publish(int status) {
        outcome_->status.store(status);
        outcome_->published.set(++published_);
    }

    // The status of the next outcome, or -1 if rank 0 is late.
    int await_outcome() {
        published_++;
        const auto is_here = [&] { return int32_t(outcome_->published.word.load() - published_) >= 0; };
        if (!wait(outcome_->published, 0, is_here)) return late(0, "sampling", -1), -1;
        return outcome_->status.load();
    }

    // The time that this rank is busy with something else does not count as late.
    void set_busy(bool is_busy) { lines_[rank].is_busy.store(is_busy); }

    double waited_s(int of) const { return double(lines_[of].waited.load()) * 1e-9; }

    // Of the rank that was missed last: what it had not finished, and in which layer; -1 for none.
    int late_rank = -1, late_layer = -1;
    std::string late_at;

    const int rank, num;

    static constexpr int64_t SLICE = 100'000'000;  // nanoseconds of one sleep

    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    static void relax() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

   private:
    void late(int other, const char* at, int layer) { late_rank = other, late_at = at, late_layer = layer; }

    template <class Ready>
    bool wait(Signal& signal, int other, Ready ready) {
        if (ready()) return true;
        const int64_t begun = now();
        const bool is_ready = spin(ready) || sleep(signal, lines_[other].is_busy, ready);
        lines_[rank].waited.fetch_add(now() - begun, std::memory_order_relaxed);
        return is_ready;
    }

    template <class Ready>
    bool spin(Ready ready) const {
        for (int i = 0; i < spins_; i++) {
            if (ready()) return true;
            relax();
        }
        return false;
    }

    template <class Ready>
    bool sleep(Signal& signal, const std::atomic<int32_t>& is_busy, Ready ready) const {
        for (int64_t slept = 0;;) {
            signal.sleepers.fetch_add(1);
            const uint32_t seen = signal.word.load();
            if (ready()) {
                signal.sleepers.fetch_sub(1);
                return true;
            }
            const timespec slice{0, SLICE};
            const int64_t begun = now();
            syscall(SYS_futex, &signal.word, FUTEX_WAIT, seen, &slice, nullptr, 0);
            signal.sleepers.fetch_sub(1);
            // If all processes were suspended, one sleep seems long, but no rank was late.
            slept += is_busy.load() ? 0 : std::min(now() - begun, 2 * SLICE);
            if (slept > timeout_) return ready();
        }
    }

    Outcome* const outcome_;
    RankLine* const lines_;
    const int spins_;
    int64_t timeout_;
    uint32_t arrived_ = 0, published_ = 0;
};

// Waits until all ranks have computed the ops before. `what` names the last one.
class Barrier final : public Op {
   public:
    Barrier(Ranks& ranks, const char* what, int layer) : Op("barrier"), ranks_(ranks), what_(what), layer_(layer) {}

    int tiles(const Step&) const override { return 1; }
    void arrive() override { ranks_.arrive(); }
    bool is_barrier() const override { return true; }
    void tile(const Step&, int, const Scratch&) override { late_ = !ranks_.wait_for_all(what_.c_str(), layer_); }
    int status() const override { return late_ ? 2 : 0; }

   private:
    Ranks& ranks_;
    const std::string what_;
    const int layer_;
    std::atomic<bool> late_{false};
};
