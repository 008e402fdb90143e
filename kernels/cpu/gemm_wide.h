// The matmul of gemm.h for more than one row, with codes of 4 to 6 bits: a panel is unpacked once for all rows. Unpacking
// takes as long as one to two rows of products, and registers hold few rows: their accumulators, and two sums for each.
//
// An unpacked panel, for each group of depth: [8][16][4] codes as bytes | [16] float scales | [16] float minimums | [16]
// pairs of int16, the scales of the halves of q6_k. The products are those of gemm.h, with the same bits.
#pragma once

#include "gemm.h"

constexpr int WIDE_CODE_BYTES = GROUP * PANEL, WIDE_GROUP_BYTES = WIDE_CODE_BYTES + 3 * 4 * PANEL;
constexpr int WIDE_PART_ROWS = 64;  // rows that share an unpacked panel

// Vectors of outputs and rows per call: as many as fit with two sums for each in registers. A vector of outputs takes as
// many loads as a row, so two of them halve the loads of activations.
constexpr int WIDE_VECTORS = VECTORS < 2 ? VECTORS : 2;
constexpr int most_wide_rows([[maybe_unused]] Format format, ActivationForm form) {
#if defined(EMULATE)  // more take minutes to compile
    return form == ActivationForm::BYTES ? 3 : 2;
#elif defined(ISA_AVX512)
    return form == ActivationForm::BYTES || code_bits(format) == 4 ? 8 : 6;
#else
    // Sums of 16 bits are added up several times in a group of larger codes, which takes a third accumulator.
    const bool is_large = SUMS_ARE_PAIRS && code_bits(format) > 4;
    return form == ActivationForm::BYTES ? (is_large ? 3 : LANES == 8 ? 6 : 4) : is_large ? 2 : 3;
#endif
}

// Whether a matmul of so many rows unpacks its panels first.
INLINE bool takes_wide(const Matrix& matrix, int num_rows) {
    if (!matrix.integer() || matrix.format == Format::Q8_0) return false;
    return num_rows > 1 && (!IN_TWO_PASSES || code_bits(matrix.format) > 4);
}

// Bytes of an unpacked panel.
INLINE size_t wide_bytes(const Matrix& matrix) { return size_t(matrix.depth / GROUP) * WIDE_GROUP_BYTES; }

template <Format F>
static void unpack_panel(const uint8_t* panel, int groups, uint8_t* to) {
    typedef BlockLayout<F> Layout;
    for (int g = 0; g < groups; g += Layout::GROUPS, panel += Layout::BYTES)
        for (int i = 0; i < Layout::GROUPS; i++, to += WIDE_GROUP_BYTES) {
            const uint8_t* codes = panel + i * Layout::CODES;
            for (int v = 0; v < VECTORS; v++) {
#pragma GCC unroll 8
                for (int step = 0; step < 8; step++)
                    store(to + step * 4 * PANEL + v * 4 * LANES, load_codes<F>(codes + v * 4 * LANES, step));
                const uint16_t* halves = Layout::halves(panel, v);
                const uint8_t* small = Layout::small(panel, i, v);
                uint8_t* factors = to + WIDE_CODE_BYTES + v * 4 * LANES;
                store(factors, load_scale<F>(halves, small));
                store(factors + 4 * PANEL, load_minimum<F>(halves, small));
                store(factors + 8 * PANEL, Layout::pairs(panel, i, v));
            }
        }
}

// out [R, 16] = R rows times an unpacked panel. `ahead` is null or a panel of `ahead_bytes` to prefetch; `lines` may be
// null.
template <Format F, ActivationForm A, int R>
__attribute__((noinline)) static void multiply_wide_rows(const Rows& rows, int first_row, const uint8_t* wide, int groups,
                                                         float* out, int out_stride, const uint8_t* ahead,
                                                         int ahead_bytes, Lines* lines) {
    constexpr int CODES = A == ActivationForm::SPLIT ? SPLIT_GROUP_BYTES : GROUP;
    const float* scales = rows.scales(first_row, groups * CODES);
    const size_t stride = rows.stride / 4;
    for (int first = 0; first < VECTORS; first += WIDE_VECTORS) {
        const int8_t* codes[R];
        for (int r = 0; r < R; r++) codes[r] = rows.codes(first_row + r);
        const uint8_t* group = wide + first * 4 * LANES;
        vf acc[R][WIDE_VECTORS] = {};
        for (int g = 0; g < groups; g++, group += WIDE_GROUP_BYTES) {
            if (ahead && first == 0) prefetch<L2>(ahead + g * ahead_bytes, ahead_bytes);
            if (lines && first == 0) lines->fetch();
            const uint8_t* small = group + WIDE_CODE_BYTES;
            vi factors[WIDE_VECTORS][2], dots[R][WIDE_VECTORS];
            if constexpr (code_bits(F) == 6)
                for (int v = 0; v < WIDE_VECTORS; v++)
                    spread_factors(load<vi>(small + 8 * PANEL + v * 4 * LANES), factors[v]);
            const auto weights = [&](int v, int step) { return load<vu>(group + step * 4 * PANEL + v * 4 * LANES); };
            dot_codes<code_bits(F), A, R, WIDE_VECTORS>(codes, weights, factors, dots);
            for (int v = 0; v < WIDE_VECTORS; v++, small += 4 * LANES) {
                const vf scale = load<vf>(small), minimum = load<vf>(small + 4 * PANEL);
                const vi pairs = load<vi>(small + 8 * PANEL);
                for (int r = 0; r < R; r++)
                    acc[r][v] = add_group<zero_code(F), has_minimums(F)>(acc[r][v], dots[r][v], scale, minimum, pairs,
                                                                         scales + r * stride + g, groups);
            }
            for (int r = 0; r < R; r++) codes[r] += CODES;
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < WIDE_VECTORS; v++) store(out + r * out_stride + (first + v) * LANES, acc[r][v]);
    }
}

// Formats whose unpacked panels are of one kind.
constexpr Format unpacked_format(Format format) {
    return format == Format::Q4_K ? Format::Q4_1 : format == Format::Q5_K ? Format::Q5_1 : format;
}

template <Format F, ActivationForm A>
static void multiply_wide_panel(const Rows& rows, int first_row, int count, const uint8_t* wide, int groups, float* out,
                                int out_stride, const uint8_t* ahead, int ahead_bytes, Lines* lines) {
    constexpr int MOST = most_wide_rows(F, A);
    const int parts = (count + MOST - 1) / MOST, most = (count + parts - 1) / parts;
    for (int row = 0; row < count; row += most) {
        float* to = out + row * out_stride;
        const uint8_t* fetched = row ? nullptr : ahead;
        switch (row + most < count ? most : count - row) {
#define CASE(R)                                                                                                          \
    case R:                                                                                                              \
        if constexpr (R <= MOST)                                                                                         \
            multiply_wide_rows<F, A, R>(rows, first_row + row, wide, groups, to, out_stride, fetched, ahead_bytes,       \
                                        lines);                                                                          \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
    }
}

// out [count, panels * 16], as `multiply`. `wide` has room for an unpacked panel.
static void multiply_wide(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                          float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
    const size_t bytes = matrix.panel_bytes();
    const int groups = matrix.depth / GROUP;
    const auto multiply_as = [&]<Format F>() {
        constexpr Format U = unpacked_format(F);
        const auto multiply = matrix.form == ActivationForm::BYTES ? multiply_wide_panel<U, ActivationForm::BYTES>
                                                         : multiply_wide_panel<U, ActivationForm::SPLIT>;
        for (int p = 0; p < panels; p++) {
            unpack_panel<F>(matrix.panels + (first_panel + p) * bytes, groups, wide);
            multiply(rows, first_row, count, wide, groups, out + p * PANEL, out_stride, ahead ? ahead + p * bytes : nullptr,
                     int(bytes / groups), matrix.lines);
        }
    };
    switch (matrix.format) {
        case Format::Q5_0: return multiply_as.template operator()<Format::Q5_0>();
        case Format::Q5_1: return multiply_as.template operator()<Format::Q5_1>();
        case Format::Q5_K: return multiply_as.template operator()<Format::Q5_K>();
        case Format::Q6_K: return multiply_as.template operator()<Format::Q6_K>();
        default: break;
    }
    if constexpr (!IN_TWO_PASSES) {
        switch (matrix.format) {
            case Format::Q4_0: return multiply_as.template operator()<Format::Q4_0>();
            case Format::Q4_1: return multiply_as.template operator()<Format::Q4_1>();
            default: return multiply_as.template operator()<Format::Q4_K>();
        }
    }
}
