// Ops: the parts of a step. A thread pool computes them in order. Each is cut into tiles, and every thread has a
// share of them. A thread that is done with its share takes tiles of the others', so one that is delayed by another
// process delays at most one tile.
#pragma once

#include <cstdint>

#include "gemm.h"

// The arrays of one step, allocated once (see kernels/step_inputs.py), and the step's sizes.
struct Step {
    int tokens, rows, samples;
    const int64_t *ids, *positions, *slots, *sampled;
    const int32_t *starts, *counts, *offsets, *block_tables;
    int max_blocks;
    const int32_t *adapters, *num_adapted;  // of each token, the adapter's slot or -1; how many tokens have one
    const int32_t* key_ends = nullptr;  // of each token, the first key that it does not see; null: its position + 1

    const int32_t* own_rows = nullptr;  // the number of entries, if they are others than those of the program

    void set(int num_tokens, int num_rows, int num_samples) {
        tokens = num_tokens, rows = own_rows ? *own_rows : num_rows, samples = num_samples;
    }

    const int32_t* blocks(int row) const { return block_tables + size_t(row) * max_blocks; }
};

constexpr int BLOCK = 16;  // tokens

// Of one thread.
struct Scratch {
    int thread, threads;
    uint8_t* memory;  // large enough for every op
    int next = 0;     // the tile that it computes after the present one, if there is such
};

// What an op must move and compute: a lower bound for its time.
struct Cost {
    double bytes = 0, flops = 0;
    bool integer = false;
};

// What an op does to each row that it has written, while the row is in its thread's cache.
class RowWork {
   public:
    virtual ~RowWork() = default;
    virtual bool is_due(const Step& step) const = 0;
    // `next` is the row that this thread writes next, or the number of rows.
    virtual void compute(const Step& step, int row, int next, uint8_t* memory) const = 0;
};

class Op {
   public:
    explicit Op(const char* name, bool for_adapters = false) : name(name), for_adapters(for_adapters) {}
    virtual ~Op() = default;
    virtual int tiles(const Step& step) const = 0;
    virtual void tile(const Step& step, int index, const Scratch& scratch) = 0;
    virtual size_t scratch_bytes() const { return 0; }
    virtual Cost cost(const Step&) const { return {}; }
    // Whether a thread's share is a range of tiles, whose memory it reads in order. Else the threads' tiles alternate, so
    // that the first ones are begun first.
    virtual bool in_ranges() const { return true; }
    // Prefetches what a tile reads, while its thread waits for the op before. Returns whether there is anything.
    virtual bool prefetch_tile(const Step&, int /*index*/) const { return false; }
    // The rows that an op writes of which a tile is one; null for other ops.
    virtual const uint8_t* rows_out() const { return nullptr; }
    void then(const RowWork* work) { work_ = work; }
    // A barrier of several ranks: its thread arrives, prefetches for later ops and then computes the tile, which waits.
    virtual bool is_barrier() const { return false; }
    virtual void arrive() {}
    // 0, or the status with which the step ends early.
    virtual int status() const { return 0; }

    const char* const name;
    const bool for_adapters;  // left out of steps in which no token has an adapter

   protected:
    void row_is_written(const Step& step, int row, const Scratch& scratch) const {
        if (work_ && work_->is_due(step)) work_->compute(step, row, scratch.next, scratch.memory);
    }

   private:
    const RowWork* work_ = nullptr;
};

// A rank's part of some rows, which ranks share out where an op has no outputs to cut.
struct RowShare {
    int rank = 0, ranks = 1;

    int first(int rows) const { return int(int64_t(rows) * rank / ranks); }
    int size(int rows) const { return int(int64_t(rows) * (rank + 1) / ranks) - first(rows); }
};

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
