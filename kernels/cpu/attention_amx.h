// The matmuls of attention by the tile registers of AMX: sixteen rows of queries times keys, or of weights times values.
#pragma once

#include "amx.h"
#include "stretch.h"

#if defined(AMX)

constexpr int SLICE_PAIRS = TILE_BYTES / 4;  // of a query's numbers, in one register

// Queries (4) times keys (2 or 3) add to 0 and 1; weights of a block (6) times its values (5 or 7) to 0 up to 3. A block
// is 16 tokens deep, half a register.
static const TileShapes attention_tiles = [] {
    TileShapes shapes;
    std::fill_n(shapes.rows, 8, TILE_ROWS);
    std::fill_n(shapes.bytes, 8, TILE_BYTES);
    shapes.bytes[6] = BLOCK * 2, shapes.rows[5] = shapes.rows[7] = BLOCK / 2;
    return shapes;
}();

// scores [16][BLOCKS * 16], STRETCH apart, = queries x keys of one or two blocks. The 32 dimensions from d on of the
// queries are at query(d), their rows `stride` bytes apart.
template <int BLOCKS, class Query>
static void score_keys(Query query, size_t stride, int dim, const uint16_t* const* keys, float* scores,
                       StretchAhead& ahead) {
    const auto add = [&](const void* queries, size_t apart, const void* first, const void* second) {
        tile_load<4>(queries, apart);
        ahead.prefetch_beside(BLOCKS * SLICE_PAIRS);
        tile_load<2>(first, LINE);
        ahead.prefetch_beside(BLOCKS * SLICE_PAIRS);
        if constexpr (BLOCKS == 2) tile_load<3>(second, LINE);
        tile_dot_bf16<0, 4, 2>();
        if constexpr (BLOCKS == 2) tile_dot_bf16<1, 4, 3>();
    };
    tile_zero<0>();
    if constexpr (BLOCKS == 2) tile_zero<1>();
    for (int d = 0; d < dim; d += 2 * SLICE_PAIRS) {
        const int pairs = std::min(SLICE_PAIRS, (dim - d) / 2);
        const uint16_t *first = keys[0] + d * BLOCK, *second = keys[BLOCKS - 1] + d * BLOCK;
        if (pairs == SLICE_PAIRS) {
            add(query(d), stride, first, second);
        } else {  // zeros behind the last dimensions, in both
            alignas(LINE) uint8_t queries[TILE_ROWS][TILE_BYTES] = {}, rest[2][SLICE_PAIRS][LINE] = {};
            for (int r = 0; r < TILE_ROWS; r++)
                memcpy(queries[r], reinterpret_cast<const uint8_t*>(query(d)) + r * stride, 4 * pairs);
            memcpy(rest[0], first, pairs * LINE), memcpy(rest[1], second, pairs * LINE);
            add(queries, TILE_BYTES, rest[0], rest[1]);
        }
    }
    tile_store<0>(scores, STRETCH * 4);
    if constexpr (BLOCKS == 2) tile_store<1>(scores + BLOCK, STRETCH * 4);
}

// sums [16][PANELS * 16] = weights [16][STRETCH] x values, from the dimension `panel` * 16 on.
template <int PANELS>
static void sum_values(const uint16_t* weights, const uint16_t* const* values, int num_blocks, int panel, float* sums,
                       StretchAhead& ahead) {
    tile_zero<0>();
    if constexpr (PANELS > 1) tile_zero<1>();
    if constexpr (PANELS > 2) tile_zero<2>(), tile_zero<3>();
    constexpr int SIZE = PANEL * BLOCK;
    for (int b = 0; b < num_blocks; b++) {
        const uint16_t* from = values[b] + panel * SIZE;
        ahead.prefetch_beside(PANELS * BLOCK / 2);
        tile_load<6>(weights + b * BLOCK, STRETCH * 2);
        tile_load<5>(from, LINE);
        if constexpr (PANELS > 1) tile_load<7>(from + SIZE, LINE);
        tile_dot_bf16<0, 6, 5>();
        if constexpr (PANELS > 1) tile_dot_bf16<1, 6, 7>();
        ahead.prefetch_beside(PANELS * BLOCK / 2);
        if constexpr (PANELS > 2) {
            tile_load<5>(from + 2 * SIZE, LINE);
            tile_load<7>(from + 3 * SIZE, LINE);
            tile_dot_bf16<2, 6, 5>();
            tile_dot_bf16<3, 6, 7>();
        }
    }
    constexpr int ROW = PANELS * PANEL * 4;
    tile_store<0>(sums, ROW);
    if constexpr (PANELS > 1) tile_store<1>(sums + PANEL, ROW);
    if constexpr (PANELS > 2) tile_store<2>(sums + 2 * PANEL, ROW), tile_store<3>(sums + 3 * PANEL, ROW);
}

#endif
