// The matmuls of attention by the tile registers of AMX: sixteen rows of queries times keys, or of weights times values.
#pragma once

#include "attention_part.h"

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
static void score_keys(Query query, size_t stride, int dim, const uint8_t* const* keys, float* scores,
                       StretchAhead<true>& ahead) {
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
        const uint8_t *first = keys[0] + d * BLOCK * 2, *second = keys[BLOCKS - 1] + d * BLOCK * 2;
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
static void sum_values(const uint16_t* weights, const uint8_t* const* values, int num_blocks, int panel, float* sums,
                       StretchAhead<true>& ahead) {
    tile_zero<0>();
    if constexpr (PANELS > 1) tile_zero<1>();
    if constexpr (PANELS > 2) tile_zero<2>(), tile_zero<3>();
    constexpr int SIZE = PANEL * BLOCK * 2;
    for (int b = 0; b < num_blocks; b++) {
        const uint8_t* from = values[b] + panel * SIZE;
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

// The matmuls of some rows over a stretch. Keys and values in 8 bits are unpacked to panels of bfloat16 first, which
// have the codes' very values; scales are applied to scores and weights.
template <KVType TYPE>
class AttentionProducts {
   public:
    typedef AttentionPart<act> Part;

    static size_t unpacked_bytes(int dim) {
        return TYPE == KVType::BF16 ? 0 : size_t(2) * STRETCH_BLOCKS * dim * BLOCK * sizeof(uint16_t);
    }

    // The stretch in bfloat16, in `to` of `unpacked_bytes`.
    static Stretch unpack(const Stretch& stretch, uint16_t* to, int dim) {
        Stretch unpacked = stretch;
        const int size = dim * BLOCK;
        for (int b = 0; b < stretch.num_blocks; b++) {
            unpacked.keys[b] = unpack_panels(stretch.keys[b], to + 2 * b * size, size);
            unpacked.values[b] = unpack_panels(stretch.values[b], to + (2 * b + 1) * size, size);
        }
        return unpacked;
    }

    // scores [16][64] = queries [16][head_dim] x keys; a block of keys is one panel
    static void multiply_keys(const Part& part, int count, const Stretch& stretch, StretchAhead<true>& ahead, int dim) {
        use_tile_shapes(attention_tiles);
        const auto query = [&](int d) { return part.queries + d / SLICE * ITEM_STATES * SLICE + d % SLICE; };
        const int num_blocks = part.num_blocks();
        for (int b = 0; b < num_blocks; b += 2) {
            const bool two = b + 1 < num_blocks;
            const auto score = two ? score_keys<2, decltype(query)> : score_keys<1, decltype(query)>;
            score(query, SLICE * 2, dim, stretch.keys + b, part.scores + b * BLOCK, ahead);
        }
        if constexpr (TYPE == KVType::BF16) return;
        for (int b = 0; b < num_blocks; b++) {
            const vf scales = load_scales(stretch.scales[b]);
            float* scores = part.scores + b * BLOCK;
            for (int r = 0; r < count; r++) store(scores + r * STRETCH, load<vf>(scores + r * STRETCH) * scales);
        }
    }

    // out [count][head_dim] += weights [16][64] x values; a block of values is head_dim / 16 panels
    static void multiply_values(const Part& part, int count, const Stretch& stretch, StretchAhead<true>& ahead, int dim) {
        constexpr int MOST_PANELS = 4;
        alignas(LINE) float sums[TILE_ROWS * MOST_PANELS * PANEL];
        const int num_panels = dim / PANEL;
        for (int panel = 0; panel < num_panels;) {
            const auto add = [&]<int PANELS>() {
                sum_values<PANELS>(part.weights, stretch.values, part.num_blocks(), panel, sums, ahead);
                for (int r = 0; r < count; r++) {
                    float* out = part.out + r * dim + panel * PANEL;
                    for (int i = 0; i < PANELS * PANEL; i += LANES)
                        store(out + i, part.so_far(r, out + i) + load<vf>(sums + r * PANELS * PANEL + i));
                }
                panel += PANELS;
            };
            const int left = num_panels - panel;
            if (left >= 4)
                add.template operator()<4>();
            else if (left >= 2)
                add.template operator()<2>();
            else
                add.template operator()<1>();
        }
    }

   private:
    static const uint8_t* unpack_panels(const uint8_t* codes, uint16_t* to, int size) {
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        for (int i = 0; i < size; i += LANES)
            store(to + i, to_bf16(__builtin_convertvector(__builtin_convertvector(load<bytes>(codes + i), vi), vf)));
        return reinterpret_cast<const uint8_t*>(to);
    }

    static_assert(LANES == BLOCK);
};

#endif
