// Ops: the parts of a step. A thread pool computes them in order. Each is cut into tiles, and every thread takes the
// next free tile, so a thread that is delayed by another process delays at most one tile.
#pragma once

#include <cstdint>

#include "gemm.h"

// The arrays of one step, allocated once (see kernels/step_inputs.py), and the step's sizes.
struct Step {
    int tokens, rows, samples;
    const int64_t *ids, *positions, *slots, *sampled;
    const int32_t *starts, *counts, *offsets, *block_tables;
    int max_blocks;

    const int32_t* blocks(int row) const { return block_tables + size_t(row) * max_blocks; }
};

constexpr int BLOCK = 16;  // tokens

// Scratch memory of one thread, large enough for every op.
struct Scratch {
    int thread, threads;
    uint8_t* memory;
};

// What an op must move and compute: a lower bound for its time.
struct Cost {
    double bytes = 0, flops = 0;
    bool integer = false;
};

class Op {
   public:
    explicit Op(const char* name) : name(name) {}
    virtual ~Op() = default;
    virtual int tiles(const Step& step) const = 0;
    virtual void tile(const Step& step, int index, const Scratch& scratch) = 0;
    virtual size_t scratch_bytes() const { return 0; }
    virtual Cost cost(const Step&) const { return {}; }
    // Prefetches what a thread's first tile reads, while it waits for the op before. Returns whether there is anything.
    virtual bool prefetch_first(const Step&, int /*thread*/) const { return false; }
    // 0, or the status with which the step ends early.
    virtual int status() const { return 0; }

    const char* const name;
};

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
