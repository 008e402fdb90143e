// A forward pass as a list of ops, recorded once and replayed by one call for each step.
#pragma once

#include <cstdlib>
#include <memory>
#include <type_traits>
#include <utility>

#include "linear.h"
#include "lora.h"
#include "ranks.h"
#include "sampler.h"
#include "step.h"
#include "thread_pool.h"

namespace {

// How far an op is. The upper half of each number is the step's, so that a thread that comes late, from a step that is
// over, finds nothing to take.
struct alignas(64) Progress {
    std::atomic<uint64_t> done{0};  // tiles
    std::atomic<int64_t> ended{0};  // in a step that is timed: when, in nanoseconds
};

// How many tiles of a thread's share of an op are taken. Nearly always only that thread writes it: a line of memory that
// goes from core to core for every tile would take as long as a small tile.
struct alignas(64) ShareProgress {
    std::atomic<uint64_t> taken{0};
};

// A thread's share of an op's tiles.
struct Share {
    Share(const Op& op, int tiles, int thread, int threads) {
        if (op.in_ranges())
            first = int(int64_t(tiles) * thread / threads), size = int(int64_t(tiles) * (thread + 1) / threads) - first;
        else
            first = thread, step = threads, size = (tiles - thread + threads - 1) / threads;
    }
    int tile(int i) const { return first + i * step; }

    int first, size, step = 1;
};

// A rank's part of the vocabulary; by default all of it.
struct VocabShare {
    Ranks* ranks = nullptr;  // null: there are no others
    Best* best = nullptr;    // [ranks][threads][max_samples]
    int threads = 0, first = 0, size = INT32_MAX;

    int end() const { return ranks ? first + size : INT32_MAX; }
};

struct Aligned {
    explicit Aligned(size_t bytes)
        : data(static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096))) {}
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    uint8_t* const data;
};

class Program final : public Job {
   public:
    Program(ThreadPool& thread_pool, const Step& step) : thread_pool_(thread_pool), steps_{step} {}
    ~Program() override { thread_pool_.settle(); }

    template <class O, class... Args>
    O& add(Args&&... args) {
        auto op = std::make_unique<O>(std::forward<Args>(args)...);
        O& added = *op;
        if constexpr (std::is_base_of_v<Gemm, O>) added.adapt(std::exchange(lora, nullptr));
        scratch_bytes_ = std::max(scratch_bytes_, op->scratch_bytes());
        ops_.push_back(std::move(op));
        step_of_.push_back(using_);
        layer_of_.push_back(layer);
        return added;
    }

    // Lets the ops that are added from now on read these tables.
    void use(const int64_t* slots, const int32_t* block_tables) {
        for (using_ = 0; using_ < steps_.size(); using_++)
            if (steps_[using_].slots == slots && steps_[using_].block_tables == block_tables) return;
        Step step = steps_[0];
        step.slots = slots, step.block_tables = block_tables;
        steps_.push_back(step);
    }

    // Lets them read the same tokens as other entries: arrays of their own, and the number of entries that is at `rows`
    // when a step runs.
    void use_entries(const Step& step, const int32_t* rows) {
        for (using_ = 0; using_ < steps_.size(); using_++)
            if (steps_[using_].own_rows == rows) return;
        steps_.push_back(step);
        steps_.back().own_rows = rows;
    }

    // Seconds of each op where `seconds` is given. With `samples_again`, only the ops from the head on: a layer with a
    // state must not absorb a step twice. Returns 0, or the first status that an op ends with.
    int run(int tokens, int rows, int samples, double* seconds, bool samples_again = false) {
        return run_ops(tokens, rows, samples, seconds, samples_again ? head : 0, ops_.size());
    }

    // The same for the ops from `first` to before `end`.
    int run_ops(int tokens, int rows, int samples, double* seconds, size_t first, size_t end) {
        while (memory_.size() < size_t(thread_pool_.size())) memory_.push_back(std::make_unique<Aligned>(scratch_bytes_));
        if (progress_.size() != ops_.size()) {
            progress_ = std::vector<Progress>(ops_.size());
            shares_ = std::vector<ShareProgress>(ops_.size() * thread_pool_.size());
        }
        // Progress first: who is late in the last step must not take this one's sizes for its own. It may read them
        // while they are written; whatever number of tiles it makes of them, its exchange fails.
        const uint32_t number = number_.load() + 1;
        for (ShareProgress& share : shares_) share.taken.store(uint64_t(number) << 32);
        for (Progress& op : progress_) op.done.store(uint64_t(number) << 32);
        // Else a CPU that reorders stores (ARM) could show the sizes before the progress, and the exchange of a thread
        // that is late would not fail. The fence in `work` is the other half.
        std::atomic_thread_fence(std::memory_order_release);
        for (Step& step : steps_) step.set(tokens, rows, samples);
        timed_ = seconds != nullptr;
        first_.store(first), end_.store(end);
        status_ = 0;
        const int64_t began = nanoseconds();
        number_.store(number);
        thread_pool_.start(this);
        work(0);
        if (seconds) read_times(began, seconds);
        return status_;
    }

    // An op after the other: computes this thread's share of it, then what is left of the others', and waits until all
    // tiles are done.
    void work(int thread) override {
        const uint32_t number = number_.load();
        Scratch scratch{thread, thread_pool_.size(), memory_[thread]->data};
#if defined(AMX)
        const TileUse use;
#endif
        for (size_t i = first_.load(); i < end_.load(); i++) {
            Op& op = *ops_[i];
            const Step& step = step_for(i);
            // Who is late in the last step may read this one's number: its exchange at the next op fails.
            if (op.for_adapters && !*step.num_adapted) continue;
            if (at && !thread) show(i, number);
            Progress& progress = progress_[i];
            uint64_t all = 0;
            for (int other = 0; other < scratch.threads; other++) {
                const int owner = (thread + other) % scratch.threads;
                std::atomic<uint64_t>& num_taken = shares_[i * scratch.threads + owner].taken;
                int computed = 0;
                for (uint64_t taken = num_taken.load();;) {
                    if (taken >> 32 != number) return;
                    const int tiles = op.tiles(step);
                    std::atomic_thread_fence(std::memory_order_acquire);
                    all = uint64_t(number) << 32 | uint32_t(tiles);
                    const Share share(op, tiles, owner, scratch.threads);
                    const int at = int(uint32_t(taken));
                    if (at >= share.size) break;
                    if (!num_taken.compare_exchange_weak(taken, taken + 1)) continue;
                    scratch.next = owner == thread && at + 1 < share.size ? share.tile(at + 1) : tiles;
                    if (op.is_barrier()) op.arrive(), prefetch_after(i, thread);
                    op.tile(step, share.tile(at), scratch);
                    computed++;
                    taken = num_taken.load();
                }
                const int64_t now = timed_ ? nanoseconds() : 0;
                const uint64_t done = computed ? progress.done.fetch_add(computed) + computed : progress.done.load();
                if (computed && done == all) {
                    progress.ended.store(now);
                    finished_.fetch_add(1);
                    finished_.notify_all();
                }
                if (done >= all) break;
            }
            // The weights of the next matmul do not depend on this op: fetch some of them instead of idling.
            if (progress.done.load() < all && !op.is_barrier()) prefetch_after(i, thread);
            thread_pool_.wait([&] { return progress.done.load() >= all; }, finished_);
            if (progress.done.load() != all) return;  // of a later step
            if (const int status = op.status()) {
                if (!thread) status_ = status;
                return;
            }
        }
    }

    Cost cost(int op, int tokens, int rows, int samples) {
        // Of a copy: who is late in the last step still reads that one's sizes.
        Step step = step_for(op);
        step.set(tokens, rows, samples);
        return ops_[op]->cost(step);
    }

    ThreadPool& thread_pool() { return thread_pool_; }
    int size() const { return int(ops_.size()); }
    const char* name(int op) const { return ops_[op]->name; }
    float* best(size_t bytes) {
        kept_.push_back(std::make_unique<Aligned>(bytes));
        return reinterpret_cast<float*>(kept_.back()->data);
    }

    Op* last() const { return ops_.empty() ? nullptr : ops_.back().get(); }

    LogitForm logit_form;
    const LoraSite* lora = nullptr;  // of the next matmul
    LoraSite* last_site = nullptr;
    VocabShare vocab;
    int stride = 0;  // of the next matmul's results, if they are part of longer rows
    int layer = -1;  // of the ops that are added now
    size_t head = 0;  // the op that computes logits
    std::atomic<uint64_t>* at = nullptr;  // where a StepBoard shows the op that is computed, or null

    int take_stride(int width) { return stride ? std::exchange(stride, 0) : width; }

   private:
    const Step& step_for(size_t op) const { return steps_[step_of_[op]]; }

    void show(size_t op, uint32_t number) const {
        at->store(uint64_t(layer_of_[op] + 1) << 48 | uint64_t(number) << 16 | uint16_t(op), std::memory_order_relaxed);
    }

    void prefetch_after(size_t op, int thread) const {
        for (size_t i = op + 1, left = LOOKAHEAD; left && i < ops_.size(); i++) {
            const Op& later = *ops_[i];
            const bool is_skipped = later.for_adapters && !*step_for(i).num_adapted;
            if (!is_skipped && later.prefetch_tile(step_for(i), first_tile(i, thread))) return;
            left -= !later.for_adapters;
        }
    }

    int first_tile(size_t op, int thread) const {
        return Share(*ops_[op], ops_[op]->tiles(step_for(op)), thread, thread_pool_.size()).tile(0);
    }

    static int64_t nanoseconds() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // An op's time is from the end of the one before to its own, whichever threads those came to.
    void read_times(int64_t last, double* seconds) {
        for (size_t i = 0; i < ops_.size(); i++) {
            seconds[i] = 0;
            if (uint32_t(progress_[i].done.load()) == 0) continue;
            // Who did the last tile writes this just after saying that it is done.
            int64_t ended;
            while ((ended = progress_[i].ended.load()) < last) std::this_thread::yield();
            seconds[i] = double(ended - last) * 1e-9;
            last = ended;
        }
    }

    // Ops; between two matmuls is at most one that reads no weights, besides those for adapters.
    static constexpr size_t LOOKAHEAD = 2;

    ThreadPool& thread_pool_;
    std::vector<Step> steps_;  // the same step with the tables of each KV group
    size_t using_ = 0;         // of ops that are added now
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<size_t> step_of_;  // [ops]
    std::vector<int> layer_of_;    // [ops]
    std::vector<Progress> progress_;
    std::vector<ShareProgress> shares_;  // [ops][threads]
    std::vector<std::unique_ptr<Aligned>> memory_, kept_;
    size_t scratch_bytes_ = 64;
    std::atomic<uint32_t> number_{0};  // of the step
    std::atomic<size_t> first_{0};     // op of the step
    std::atomic<size_t> end_{0};       // the one behind its last op
    std::atomic<int> finished_{0};     // ops, ever
    bool timed_ = false;
    int status_ = 0;
};

}  // namespace
