// Copies of whole KV blocks: to swap space, back from it, and from one block to another.
#pragma once

#include <cstdint>
#include <cstring>

#include "thread_pool.h"

// Where blocks lie. Ids from `num_blocks` on are blocks of swap space, which holds a block's layers side by side:
//
//     layers[layer]: [num_blocks][layer_bytes]        swap: [swap blocks][num_layers][layer_bytes]
struct Blocks {
    uint8_t* const* layers;
    uint8_t* swap;  // may be null, where no id says so
    int num_layers, num_blocks;
    size_t layer_bytes;  // of one block in one layer

    uint8_t* at(int layer, int32_t block) const {
        return block < num_blocks ? layers[layer] + size_t(block) * layer_bytes
                                  : swap + (size_t(block - num_blocks) * num_layers + layer) * layer_bytes;
    }
};

// Copies sources[i] to targets[i], for one i after the other. A thread makes all copies of the same few bytes of every
// block, in their order: so a block that was copied from may be copied to by a later one, and nobody waits for another.
inline void copy_blocks_of(ThreadPool& thread_pool, const Blocks& blocks, const int32_t* sources, const int32_t* targets, int count) {
    constexpr size_t part = 16 << 10;
    const int parts = int((blocks.layer_bytes + part - 1) / part);
    thread_pool.each(blocks.num_layers * parts, [&](int tile) {
        const int layer = tile / parts;
        const size_t begin = size_t(tile % parts) * part;
        const size_t left = blocks.layer_bytes - begin, bytes = left < part ? left : part;
        for (int i = 0; i < count; i++)
            memcpy(blocks.at(layer, targets[i]) + begin, blocks.at(layer, sources[i]) + begin, bytes);
    });
}
