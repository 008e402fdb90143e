// The matmul of gemm.h with 4-bit weights by the tile registers of AMX: sixteen rows times a group of 32 of a panel by
// one instruction. Sums of integers are exact, so it gives the same bits as vectors, which take less time for few rows. It
// is for activations of 12 bits: with 8 bits half of a register would be empty, and vectors are as fast.
//
// A register's row is a group of activations as they are stored, [32 codes / 16 | 32 codes % 16], and the weights beside
// it are [16 x weights | weights], so one product has both. The next group's product runs while vectors scale the last
// group's sums.
#pragma once

#include "amx.h"
#include "gemm.h"

#if defined(AMX)

constexpr int LEAST_INT4_ROWS = 7;

// A group of a panel as a tile: a row is four numbers of depth, of 16 outputs each.
INLINE void unpack_group4(const uint8_t* group, uint8_t (&tile)[TILE_ROWS][TILE_BYTES]) {
    for (int j = 0; j < 4; j++) {
        const vu words = load<vu>(group + j * LINE);
        const vu low = words & 0x0F0F0F0Fu, high = words >> 4 & 0x0F0F0F0Fu;
        store(tile[2 * j], words << 4 & 0xF0F0F0F0u), store(tile[2 * j + 1], words & 0xF0F0F0F0u);
        store(tile[TILE_ROWS / 2 + 2 * j], low), store(tile[TILE_ROWS / 2 + 2 * j + 1], high);
    }
}

// Registers: 0 and 1 are sums of 16 rows with two panels, 2 and 3 those of the next 16 rows; 4 and 5 are the activations of
// these rows; 6 and 7 are for the panels.
static TileShapes int4_shapes(int rows) {
    TileShapes shapes;
    std::fill_n(shapes.rows, 6, rows), std::fill_n(shapes.rows + 6, 2, TILE_ROWS);
    std::fill_n(shapes.bytes, 8, TILE_BYTES);
    return shapes;
}
static const TileShapes int4_tiles = int4_shapes(TILE_ROWS), int4_half_tiles = int4_shapes(TILE_ROWS / 2);

// out [count, P * 16] = `count` rows times one or two panels, which are `bytes` apart. `ahead` is null or panels to prefetch.
//
// For each group, 32 rows after the other: what they have read of a group stays in the L1 cache for the second panel.
template <Format F, int P>
__attribute__((noinline)) static void multiply_int4_panels(const Rows& rows, int first_row, int count, const uint8_t* panel,
                                                           size_t bytes, int depth, float* out, int out_stride,
                                                           const uint8_t* ahead) {
    static_assert(P <= 2 && LANES == PANEL);
    constexpr int GROUPS = block_groups(F), SMALL = GROUPS * code_bytes(F), HALVES = SMALL + small_scale_bytes(F);
    constexpr int GROUP_BYTES = block_bytes(F) / GROUPS;  // with its part of the scales
    constexpr int AT_ONCE = 2 * TILE_ROWS, WIDTH = P * PANEL;
    // Tiles are loaded from memory, not from stores under way, so a group is unpacked while the last one is multiplied.
    alignas(LINE) uint8_t weights[2][P][TILE_ROWS][TILE_BYTES];
    alignas(LINE) int32_t sums[2][AT_ONCE][WIDTH];
    const int groups = depth / GROUP;
    const size_t stride = rows.stride / 4;
    const float* scales = rows.scales(first_row, groups * SPLIT_GROUP_BYTES);
    const int8_t* codes = rows.codes(first_row);
    const auto unpack = [&](int g) {
        const uint8_t* group = panel + g / GROUPS * block_bytes(F) + g % GROUPS * code_bytes(F);
        for (int p = 0; p < P; p++) unpack_group4(group + p * bytes, weights[g % 2][p]);
    };
    const auto product = [&](int g, int row) {
        const int8_t* from = codes + row * rows.stride + g * SPLIT_GROUP_BYTES;
        tile_load<4>(from, rows.stride);
        tile_zero<0>(), tile_dot_int8<0, 4, 6>();
        if constexpr (P == 2) tile_zero<1>(), tile_dot_int8<1, 4, 7>();
        if (count - row <= TILE_ROWS) return;
        tile_load<5>(from + TILE_ROWS * rows.stride, rows.stride);
        tile_zero<2>(), tile_dot_int8<2, 5, 6>();
        if constexpr (P == 2) tile_zero<3>(), tile_dot_int8<3, 5, 7>();
    };
    const auto keep = [&](int row, int32_t (*to)[WIDTH]) {
        tile_store<0>(to, WIDTH * 4);
        if constexpr (P == 2) tile_store<1>(to[0] + PANEL, WIDTH * 4);
        if (count - row <= TILE_ROWS) return;
        tile_store<2>(to + TILE_ROWS, WIDTH * 4);
        if constexpr (P == 2) tile_store<3>(to[TILE_ROWS] + PANEL, WIDTH * 4);
    };
    const auto scale_sums = [&](int g, int row, const int32_t (*from)[WIDTH]) {
        vf scale[P], minimum[P];
        for (int p = 0; p < P; p++) {
            const uint8_t* block = panel + p * bytes + g / GROUPS * block_bytes(F);
            const uint8_t* small = block + SMALL + g % GROUPS * PANEL;
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(block + HALVES);
            scale[p] = load_scale<F>(halves, small), minimum[p] = load_minimum<F>(halves, small);
        }
        const int end = std::min(count, row + AT_ONCE);
        for (int r = row; r < end; r++, from++) {
            const float* of_row = scales + r * stride + g;
            float* to = out + r * out_stride;
            for (int p = 0; p < P; p++, to += PANEL) {
                vi dot = load<vi>(from[0] + p * PANEL);
                if constexpr (F == Format::Q4_0) dot -= 8 * load<int32_t>(of_row + groups);
                const vf value = __builtin_convertvector(dot, vf) * scale[p];
                vf sum = fma(value, splat(of_row[0]), g ? load<vf>(to) : vf{});
                if constexpr (has_minimums(F)) sum = fma(minimum[p], splat(of_row[2 * groups]), sum);
                store(to, sum);
            }
        }
    };
    unpack(0);
    int unit = 0, last_g = 0, last_row = 0;  // vectors scale the sums of a unit while tiles multiply the next one
    for (int g = 0; g < groups; g++) {
        for (int p = 0; ahead && p < P; p++) prefetch<L2>(ahead + p * bytes + g * GROUP_BYTES, GROUP_BYTES);
        tile_load<6>(weights[g % 2][0], TILE_BYTES);
        if constexpr (P == 2) tile_load<7>(weights[g % 2][1], TILE_BYTES);
        if (g + 1 < groups) unpack(g + 1);
        for (int row = 0; row < count; row += AT_ONCE, unit++) {
            product(g, row);
            if (unit) scale_sums(last_g, last_row, sums[(unit - 1) % 2]);
            keep(row, sums[unit % 2]);
            last_g = g, last_row = row;
        }
    }
    scale_sums(last_g, last_row, sums[(unit - 1) % 2]);
}

template <Format F>
static void multiply_int4_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    use_tile_shapes(count <= TILE_ROWS / 2 ? int4_half_tiles : int4_tiles);
    for (int p = 0; p < panels;) {
        const auto multiply_some = [&]<int P>() {
            multiply_int4_panels<F, P>(rows, first_row, count, matrix.panels + (first_panel + p) * bytes, bytes, matrix.depth,
                                       out + p * PANEL, out_stride, ahead ? ahead + p * bytes : nullptr);
            p += P;
        };
        if (panels - p >= 2)
            multiply_some.template operator()<2>();
        else
            multiply_some.template operator()<1>();
    }
}

// Whether a matmul of so many rows takes tiles.
INLINE bool takes_int4_tiles(const Matrix& matrix, int num_rows) {
    return matrix.form == ActivationForm::SPLIT && num_rows >= LEAST_INT4_ROWS && code_bits(matrix.format) == 4;
}

static void multiply_int4_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const auto multiply = matrix.format == Format::Q4_K   ? multiply_int4_amx<Format::Q4_K>
                          : matrix.format == Format::Q4_1 ? multiply_int4_amx<Format::Q4_1>
                                                          : multiply_int4_amx<Format::Q4_0>;
    multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
}

#endif
