// From the rows of a checkpoint to panels (matrix.h).
#pragma once

#include <algorithm>
#include <vector>

#include "matrix.h"

// Blocks of rows as ggml lays them out (kernels/stored_matrix.py describes them), as far as packing needs that.
struct FileBlock {
    int bytes, codes, above;  // size; offsets of the lower bits of codes, and of the upper ones
};

constexpr FileBlock file_block(Format format) {
    switch (format) {
        case Format::Q8_0: return {34, 2, 0};
        case Format::Q4_0: return {18, 2, 0};
        case Format::Q4_1: return {20, 4, 0};
        case Format::Q5_0: return {22, 6, 2};
        case Format::Q5_1: return {24, 8, 4};
        case Format::Q4_K: return {144, 16, 0};
        case Format::Q5_K: return {176, 48, 16};
        case Format::Q6_K: return {210, 0, 128};
        default: return {0, 0, 0};
    }
}

// Four codes of a block, from depth k on, a multiple of 4: a byte each.
INLINE uint32_t four_codes(Format format, const uint8_t* block, int k) {
    const FileBlock layout = file_block(format);
    const uint8_t *codes = block + layout.codes, *above = block + layout.above;
    if (format == Format::Q6_K) {  // 64 bytes have 128 codes
        const int half = k / 128, i = k % 128;
        const uint32_t low = load<uint32_t>(codes + 64 * half + i % 64) >> (i / 64 * 4) & 0x0F0F0F0Fu;
        return low | (load<uint32_t>(above + 32 * half + i % 32) >> (i / 32 * 2) & 0x03030303u) << 4;
    }
    if (block_groups(format) > 1) {  // 32 bytes have 64 codes
        const uint32_t low = load<uint32_t>(codes + k / 64 * 32 + k % 32) >> (k / 32 % 2 * 4) & 0x0F0F0F0Fu;
        return format == Format::Q4_K ? low
                                      : low | (load<uint32_t>(above + k % 32) >> (k / 32) & 0x01010101u) << 4;
    }
    const uint32_t low = load<uint32_t>(codes + k % 16) >> (k / 16 * 4) & 0x0F0F0F0Fu;
    if (code_bits(format) == 4) return low;
    const uint32_t four = load<uint32_t>(above) >> k & 15;
    return low | (four * 0x00204081u & 0x01010101u) << 4;  // bit i goes to byte i
}

// The scales and minimums of q4_k and q5_k, each of 6 bits (`get_scale_min_k4` in ggml-quants.c).
INLINE void six_bits(const uint8_t* packed, int group, uint8_t& scale, uint8_t& minimum) {
    if (group < 4) {
        scale = packed[group] & 63, minimum = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
        minimum = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
    }
}

// One row's block into its lane of a panel's block.
template <Format format>
INLINE void pack_block(const uint8_t* from, uint8_t* to, int lane) {
    constexpr int groups = block_groups(format);
    uint8_t* small = to + groups * code_bytes(format);
    for (int g = 0; g < groups; g++, to += code_bytes(format)) {
        if constexpr (format == Format::Q8_0) {
            for (int k = 0; k < GROUP; k += 2) memcpy(to + (k / 2 * PANEL + lane) * 2, from + 2 + k, 2);
            continue;
        }
        uint32_t above[2] = {};
        for (int k = 0; k < GROUP; k += 8) {
            const uint32_t first = four_codes(format, from, g * GROUP + k);
            const uint32_t second = four_codes(format, from, g * GROUP + k + 4);
            store(to + (k / 8 * PANEL + lane) * 4, (first & 0x0F0F0F0Fu) | (second & 0x0F0F0F0Fu) << 4);
            if (code_bits(format) == 5)
                above[0] |= (first >> 4 & 0x01010101u) << (k / 4) | (second >> 4 & 0x01010101u) << (k / 4 + 1);
            else
                above[k / 16] |= (first >> 4 & 0x03030303u) << (k % 16 / 2) | (second >> 4 & 0x03030303u) << (k % 16 / 2 + 2);
        }
        for (int i = 0; i < code_bits(format) - 4; i++) store(to + ((4 + i) * PANEL + lane) * 4, above[i]);
    }
    uint8_t* factors = small + small_scale_bytes(format);
    if (format == Format::Q6_K) {
        memcpy(factors + 2 * lane, from + 208, 2);
        for (int g = 0; g < groups; g++) memcpy(small + (g * PANEL + lane) * 2, from + 192 + 2 * g, 2);
        return;
    }
    memcpy(factors + 2 * lane, from, 2);
    if (has_minimums(format)) memcpy(factors + 2 * (PANEL + lane), from + 2, 2);
    if (groups > 1)
        for (int g = 0; g < groups; g++)
            six_bits(from + 4, g, small[g * PANEL + lane], small[(8 + g) * PANEL + lane]);
}

// A panel of `blocks` blocks, one behind the other: each is written while it is in the cache.
template <Format format>
static void pack_blocks(int blocks, const uint8_t* const* rows, uint8_t* to) {
    for (int block = 0; block < blocks; block++, to += block_bytes(format))
        for (int lane = 0; lane < PANEL; lane++)
            if (rows[lane]) pack_block<format>(rows[lane] + size_t(block) * file_block(format).bytes, to, lane);
}

// Output n is the row at rows[n]: bfloat16, or blocks (kernels/stored_matrix.py describes them). Null stands for zeros.
static void pack_panel(const Matrix& matrix, uint8_t* panels, const uint8_t* const* all_rows, int panel) {
    uint8_t* to = panels + panel * matrix.panel_bytes();
    const uint8_t* const* rows = all_rows + panel * PANEL;
    // Without a null row, each byte is written below.
    if (std::any_of(rows, rows + PANEL, [](const uint8_t* row) { return !row; })) memset(to, 0, matrix.panel_bytes());
    const int blocks = matrix.depth / GROUP / block_groups(matrix.format);
    switch (matrix.format) {
        case Format::Q8_0: return pack_blocks<Format::Q8_0>(blocks, rows, to);
        case Format::Q4_0: return pack_blocks<Format::Q4_0>(blocks, rows, to);
        case Format::Q4_1: return pack_blocks<Format::Q4_1>(blocks, rows, to);
        case Format::Q5_0: return pack_blocks<Format::Q5_0>(blocks, rows, to);
        case Format::Q5_1: return pack_blocks<Format::Q5_1>(blocks, rows, to);
        case Format::Q4_K: return pack_blocks<Format::Q4_K>(blocks, rows, to);
        case Format::Q5_K: return pack_blocks<Format::Q5_K>(blocks, rows, to);
        case Format::Q6_K: return pack_blocks<Format::Q6_K>(blocks, rows, to);
        case Format::BF16:
        case Format::FP8: break;
    }
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* from = rows[lane];
        if (!from) continue;
        if (matrix.format == Format::BF16) {
            for (int k = 0; k < matrix.depth / 2; k++) memcpy(to + (k * PANEL + lane) * 4, from + 4 * k, 4);
            continue;
        }
        uint8_t* block = to;
        for (int k = 0; k < matrix.depth; k += FP8_DEPTH, from += 4 + FP8_DEPTH, block += FP8_BLOCK_BYTES) {
            memcpy(block + FP8_CODE_BYTES + 4 * lane, from, 4);
            for (int i = 0; i < FP8_DEPTH; i += 2) memcpy(block + (i / 2 * PANEL + lane) * 2, from + 4 + i, 2);
        }
    }
}

// Floats that checkpoints may have instead of bfloat16.
enum class Source : int { F32 = 1, F16 = 2 };

// `count` floats as bfloat16, rounded to nearest even. The same bits on every ISA, also of the smallest numbers.
static void round_floats(Source source, const uint8_t* from, uint16_t* to, int count) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vf values = source == Source::F32 ? load<vf>(from + 4 * i)
                                                : load_f16(reinterpret_cast<const uint16_t*>(from) + i);
        const vu words = bits<vu>(values);
        const vu rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16;
        // Rounding would carry the fraction of a NaN into its sign.
        const vu is_nan = bits<vu>((words & 0x7FFFFFFFu) > 0x7F800000u);
        store(to + i, __builtin_convertvector((rounded & ~is_nan) | (0x7FC0u & is_nan), halves));
    }
    for (; i < count; i++)
        to[i] = to_bf16(source == Source::F32 ? load<float>(from + 4 * i) : one_f16(load<uint16_t>(from + 2 * i)));
}

// A bf16 panel of rows of other floats.
static void pack_float_panel(const Matrix& matrix, uint8_t* panels, const uint8_t* const* rows, Source source, int panel) {
    std::vector<uint16_t> rounded(size_t(PANEL) * matrix.depth);
    const uint8_t* as_bf16[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        const uint8_t* from = rows[panel * PANEL + lane];
        uint16_t* to = rounded.data() + size_t(lane) * matrix.depth;
        if (from) round_floats(source, from, to, matrix.depth);
        as_bf16[lane] = from ? reinterpret_cast<const uint8_t*>(to) : nullptr;
    }
    pack_panel(matrix, panels + panel * matrix.panel_bytes(), as_bf16, 0);
}
