// What ops are: parts of a step that a pool of threads computes one after the other, each cut into tiles that the
// threads take as they come. A thread that is held up by another process keeps at most one tile from its fellows.
#pragma once

#include <cstdint>

#include "gemm.h"

// The arrays of one step, allocated once (kernels/step_inputs.py says what they hold), and how much of them it uses.
struct Step {
    int tokens, rows, samples;
    const int64_t *ids, *positions, *slots, *sampled;
    const int32_t *starts, *counts, *offsets, *block_tables;
    int max_blocks;

    const int32_t* blocks(int row) const { return block_tables + size_t(row) * max_blocks; }
};

constexpr int BLOCK = 16;  // tokens

// Memory of one thread, of the size that any op asks for.
struct Scratch {
    int thread;
    uint8_t* memory;
};

// What an op must move and compute, for the floor beside its time.
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
    // 0, or what the step is to end with.
    virtual int status() const { return 0; }

    const char* const name;
};

INLINE int ceil_div(int a, int b) { return (a + b - 1) / b; }
