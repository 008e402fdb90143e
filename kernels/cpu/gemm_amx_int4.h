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

constexpr int LEAST_INT4_ROWS = 12;

// A group of a panel as a tile: a row is four numbers of depth, of 16 outputs each.
INLINE void unpack_group4(const uint8_t* group, uint8_t (&tile)[TILE_ROWS][TILE_BYTES]) {
    for (int j = 0; j < 4; j++) {
        const vu words = load<vu>(group + j * LINE);
        const vu low = words & 0x0F0F0F0Fu, high = words >> 4 & 0x0F0F0F0Fu;
        store(tile[2 * j], words << 4 & 0xF0F0F0F0u), store(tile[2 * j + 1], words & 0xF0F0F0F0u);
        store(tile[TILE_ROWS / 2 + 2 * j], low), store(tile[TILE_ROWS / 2 + 2 * j + 1], high);
    }
}

// out [count, 16] = `count` rows, at most TILES * 16, times a panel. `ahead` is null or a panel to prefetch.
template <Format F, int TILES>
__attribute__((noinline)) static void multiply_int4_tiles(const Rows& rows, int first_row, int count, const uint8_t* panel,
                                                          int depth, float* out, int out_stride, const uint8_t* ahead) {
    static_assert(TILES <= 4 && LANES == PANEL);
    constexpr int GROUPS = block_groups(F), SMALL = GROUPS * code_bytes(F), HALVES = SMALL + small_scale_bytes(F);
    constexpr int GROUP_BYTES = block_bytes(F) / GROUPS;  // with its part of the scales
    alignas(LINE) uint8_t weights[TILE_ROWS][TILE_BYTES];
    alignas(LINE) int32_t sums[2][TILES * TILE_ROWS][PANEL];
    const int groups = depth / GROUP;
    const size_t stride = rows.stride / 4;
    const float* scales = rows.scales(first_row, groups * SPLIT_GROUP_BYTES);
    const int8_t* codes = rows.codes(first_row);
    const auto product = [&](int g) {
        unpack_group4(panel + g / GROUPS * block_bytes(F) + g % GROUPS * code_bytes(F), weights);
        tile_load<7>(weights, TILE_BYTES);
        const auto one = [&]<int T>() {
            tile_zero<T>();
            tile_load<4 + T % 3>(codes + T * TILE_ROWS * rows.stride + g * SPLIT_GROUP_BYTES, rows.stride);
            tile_dot_int8<T, 4 + T % 3, 7>();
        };
        one.template operator()<0>();
        if constexpr (TILES > 1) one.template operator()<1>();
        if constexpr (TILES > 2) one.template operator()<2>();
        if constexpr (TILES > 3) one.template operator()<3>();
    };
    const auto keep = [&](int g) {
        int32_t(*to)[PANEL] = sums[g % 2];
        tile_store<0>(to, PANEL * 4);
        if constexpr (TILES > 1) tile_store<1>(to + TILE_ROWS, PANEL * 4);
        if constexpr (TILES > 2) tile_store<2>(to + 2 * TILE_ROWS, PANEL * 4);
        if constexpr (TILES > 3) tile_store<3>(to + 3 * TILE_ROWS, PANEL * 4);
    };
    const auto scale_sums = [&](int g) {
        const uint8_t* block = panel + g / GROUPS * block_bytes(F);
        const uint8_t* small = block + SMALL + g % GROUPS * PANEL;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(block + HALVES);
        const vf scale = load_scale<F>(halves, small), minimum = load_minimum<F>(halves, small);
        for (int r = 0; r < count; r++) {
            vi dot = load<vi>(sums[g % 2][r]);
            if constexpr (F == Format::Q4_0) dot -= 8 * load<int32_t>(scales + r * stride + groups + g);
            const vf value = __builtin_convertvector(dot, vf) * scale;
            vf sum = fma(value, splat(scales[r * stride + g]), g ? load<vf>(out + r * out_stride) : vf{});
            if constexpr (has_minimums(F)) sum = fma(minimum, splat(scales[r * stride + 2 * groups + g]), sum);
            store(out + r * out_stride, sum);
        }
    };
    for (int g = 0; g < groups; g++) {
        if (ahead) prefetch<L2>(ahead + g * GROUP_BYTES, GROUP_BYTES);
        product(g);
        if (g) scale_sums(g - 1);
        keep(g);
    }
    scale_sums(groups - 1);
}

template <Format F>
static void multiply_int4_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    for (int p = 0; p < panels; p++) {
        const auto some = [&]<int TILES>() {
            multiply_int4_tiles<F, TILES>(rows, first_row, count, matrix.panels + (first_panel + p) * bytes,
                                             matrix.depth, out + p * PANEL, out_stride,
                                             ahead ? ahead + p * bytes : nullptr);
        };
        switch ((count + TILE_ROWS - 1) / TILE_ROWS) {
            case 1: some.template operator()<1>(); break;
            case 2: some.template operator()<2>(); break;
            case 3: some.template operator()<3>(); break;
            default: some.template operator()<4>();
        }
    }
}

// Whether a matmul of so many rows takes tiles.
INLINE bool takes_int4_tiles(const Matrix& matrix, int num_rows) {
    return matrix.form == Form::SPLIT && num_rows >= LEAST_INT4_ROWS && code_bits(matrix.format) == 4;
}

static void multiply_int4_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const auto multiply = matrix.format == Format::Q4_K   ? multiply_int4_amx<Format::Q4_K>
                          : matrix.format == Format::Q4_1 ? multiply_int4_amx<Format::Q4_1>
                                                          : multiply_int4_amx<Format::Q4_0>;
    multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
}

#endif
