// What a matmul of attention reads and writes: some rows of a head, and a stretch of keys and values.
#pragma once

#include <type_traits>

#include "kv.h"
#include "stretch.h"

#if defined(AMX)
#include "amx.h"
constexpr int ATTENTION_ROWS = TILE_ROWS;
#else
constexpr int ATTENTION_ROWS = MOST_ROWS;
#endif

constexpr int SLICE = 64;  // dimensions of a query that are adjacent, so that rows are a constant apart

// What queries and softmax weights are multiplied as: 16-bit integers with a scale for each row, by int8 keys and values;
// by bfloat16 ones, and by tile registers, as activations are.
#if defined(AMX)
template <KVType TYPE>
constexpr bool INTEGERS = false;
template <KVType TYPE>
using Ahead = StretchAhead<true>;
#else
template <KVType TYPE>
constexpr bool INTEGERS = TYPE == KVType::INT8;
template <KVType TYPE>
using Ahead = StretchAhead<TYPE == KVType::INT8>;
#endif

// The first rows of one matmul.
template <class Number>
struct AttentionPart {
    const Number* queries;      // [slices of 64 numbers][ITEM_STATES][64]
    const float* query_scales;  // [rows], of integers
    float* out;                 // [rows][head_dim]
    float* scores;              // [rows][64]
    Number* weights;            // [rows][64]
    float* weight_scales;       // [rows], of integers
    int keys;                   // of the stretch that the rows attend to: the first ones
    const float* shrinks;       // [rows], to multiply `out` with; null: there is no `out` yet

    int num_blocks() const { return ceil_div(keys, BLOCK); }

    // LANES numbers of `out`, of row r, to which a stretch is added.
    vf so_far(int r, const float* at) const { return shrinks ? load<vf>(at) * shrinks[r] : vf{}; }
};
