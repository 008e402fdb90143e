// Copies KV blocks: to swap space, from it, and from block to block.
#pragma once

#include <cstdint>
#include <cstring>

#include "thread_pool.h"

// Addresses of blocks. Ids from `num_blocks` on are blocks of swap space, where a block's layers are adjacent:
//
//     layers[layer]: [num_blocks][layer_bytes]        swap: [swap blocks][num_layers][layer_bytes]
struct Blocks {
    uint8_t* const* layers;
    uint8_t* swap;  // null without swap space
    int num_layers, num_blocks;
    size_t layer_bytes;  // of one block in one layer

    uint8_t* at(int layer, int32_t block) const {
        return block < num_blocks ? layers[layer] + size_t(block) * layer_bytes
                                  : swap + (size_t(block - num_blocks) * num_layers + layer) * layer_bytes;
    }
};

// Copies sources[i] to targets[i] in order. A thread makes all copies of the same few bytes of every block, in order.
// So a later copy may overwrite the source of an earlier one, and no thread waits for another.
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
