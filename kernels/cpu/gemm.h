// Rows of activations times a packed matrix: the matmul for weights, keys and values.
//
// An output is one accumulator that adds its products in the order of depth, so a row has the same bits in any batch.
#pragma once

#include "gemm_one_panel.h"

// --- bf16 -------------------------------------------------------------------------------------------------------------

// acc[r][p] += row r times panel p, over `pairs` pairs of depth. `ahead` is null or has P panels. V
// vectors of each panel: the first ones.
template <int R, int P, int V>
INLINE void multiply_bf16(const act* const (&rows)[R], const uint32_t* const (&panels)[P], int pairs,
                          vf (&acc)[R][P][V], const uint8_t* const* ahead, Lines* lines = nullptr) {
    for (int k = 0; k < pairs; k++) {
        if (lines && k % (GROUP / 2) == 0) lines->fetch();
        if (ahead)
            for (int p = 0; p < P; p++) prefetch<L2>(ahead[p] + k * LINE, LINE);
#if defined(DOT_BF16)
        vu weights[P][V];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < V; v++) weights[p][v] = load<vu>(panels[p] + k * PANEL + v * LANES);
        for (int r = 0; r < R; r++) {
            const vu pair = load<uint32_t>(rows[r] + 2 * k) - vu{};
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) acc[r][p][v] = dot_bf16(acc[r][p][v], weights[p][v], pair);
        }
#else
        // A few rows are bound by memory, so prefetch half a kilobyte ahead, across page boundaries. More rows don't
        // need it, and have no register for it at AVX2.
        if constexpr (R <= 4)
            for (int p = 0; p < P; p++) __builtin_prefetch(panels[p] + (k + 8) * PANEL);
        for (int half = 0; half < 2; half++) {
            // Keeping the words for their upper halves would take registers from accumulators, so load them again.
            // Without `volatile`, the compiler may take the two statements for one, and the loads too.
            const uint32_t* from[P];
            for (int p = 0; p < P; p++) {
                from[p] = panels[p];
                if constexpr (R * P * V > 8) asm volatile("" : "+r"(from[p]));
            }
            vf weights[P][V];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < V; v++) {
                    const vu word = load<vu>(from[p] + k * PANEL + v * LANES);
                    weights[p][v] = bits<vf>(half ? word & 0xFFFF0000u : word << 16);
                }
            for (int r = 0; r < R; r++) {
                const vf value = splat(rows[r][2 * k + half]);
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < V; v++) acc[r][p][v] = fma(value, weights[p][v], acc[r][p][v]);
            }
        }
#endif
    }
}

// --- codes in groups of 32 ---------------------------------------------------------------------------------------------

// Codes of 4 to 6 bits, unpacked in registers.
template <Format F, ActivationForm A, int R, int P>
INLINE void multiply_bits(const Rows& rows, int first_row, const uint8_t* panel, size_t panel_bytes, int depth,
                          vf (&acc)[R][P][VECTORS], const uint8_t* ahead, Lines* lines) {
    typedef BlockLayout<F> Layout;
    constexpr int CODES = A == ActivationForm::SPLIT ? SPLIT_GROUP_BYTES : GROUP;  // bytes of a group of activations
    const int8_t* codes[R];
    for (int r = 0; r < R; r++) codes[r] = rows.codes(first_row + r);
    const float* scales = rows.scales(first_row, depth / GROUP * CODES);
    const size_t stride = rows.stride / 4;
    const int groups = depth / GROUP;
    for (int g = 0; g < groups; g++) {
        const int in_block = Layout::GROUPS == 1 ? 0 : g % Layout::GROUPS;
        const bool is_last = in_block == Layout::GROUPS - 1;
        const uint8_t* group = panel + in_block * Layout::CODES;
        if (lines) lines->fetch();
        if (ahead)
            for (int p = 0; p < P; p++) {
                prefetch<L2>(ahead + p * panel_bytes + in_block * Layout::CODES, Layout::CODES);
                if (is_last) prefetch<L2>(ahead + p * panel_bytes + Layout::SMALL, Layout::BYTES - Layout::SMALL);
            }
        if constexpr (code_bits(F) == 6) {
            vf scales_of[2][P * VECTORS], (&sums)[R][P * VECTORS] = reinterpret_cast<vf (&)[R][P * VECTORS]>(acc);
            for (int n = 0; n < P * VECTORS; n++)
                Layout::half_scales(panel + n / VECTORS * panel_bytes, in_block, n % VECTORS, scales_of[0][n], scales_of[1][n]);
            const auto weights = [&](int n, int step) {
                return load_codes<F>(group + n / VECTORS * panel_bytes + n % VECTORS * 4 * LANES, step);
            };
            add_group6<A>(codes, weights, scales_of, StridedFloats{scales + g, stride},
                          StridedFloats{scales + 3 * groups + 2 * g, stride}, sums);
        } else {
            vi dots[R][P][VECTORS];
            IN_REGISTERS
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) dots[r][p][v] = empty_sum();
            if constexpr (code_bits(F) == 4) {
                dot_group4<R, P, A == ActivationForm::SPLIT>(codes, 0, group, panel_bytes, dots);
                if constexpr (A == ActivationForm::SPLIT) dot_group4<R, P>(codes, GROUP, group, panel_bytes, dots);
            } else {
                const auto weights = [&](int n, int step) {
                    return load_codes<F>(group + n / VECTORS * panel_bytes + n % VECTORS * 4 * LANES, step);
                };
                add_dots<code_bits(F), A, 0, 8, R, P * VECTORS>(codes, weights, reinterpret_cast<vi (&)[R][P * VECTORS]>(dots));
            }
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const uint8_t* block = panel + p * panel_bytes;
                    const uint16_t* halves = Layout::halves(block, v);
                    const uint8_t* small = Layout::small(block, in_block, v);
                    const vf scale = load_scale<F>(halves, small), minimum = load_minimum<F>(halves, small);
                    const vf shift = scale * -ROUND;
                    for (int r = 0; r < R; r++)
                        acc[r][p][v] = add_group<zero_code(F), has_minimums(F)>(
                            acc[r][p][v], dots[r][p][v], scale, shift, minimum, scales + r * stride + g, groups);
                }
        }
        for (int r = 0; r < R; r++) codes[r] += CODES;
        if (is_last) {
            panel += Layout::BYTES;
            if (ahead) ahead += Layout::BYTES;
        }
    }
}

constexpr int GROUP_8_BYTES = block_bytes(Format::Q8_0);

template <int R, int P>
INLINE void multiply_8(const Rows& rows, int first_row, const uint8_t* panel, size_t panel_bytes, int depth,
                       vf (&acc)[R][P][VECTORS], const uint8_t* ahead) {
    const int16_t* words[R];
    for (int r = 0; r < R; r++) words[r] = rows.words(first_row + r);
    const float* scales = rows.word_scales(first_row, depth);
    const size_t stride = rows.stride / 4;
    for (int g = 0; g < depth / GROUP; g++, panel += GROUP_8_BYTES) {
        if (ahead)
            for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * panel_bytes + g * GROUP_8_BYTES, GROUP_8_BYTES);
        word_sums dots[R][P][VECTORS] = {};
        for (int j = 0; j < GROUP / 2; j++) {
            vi weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++)
                    weights[p][v] = sign_extend_bytes(
                        reinterpret_cast<const int8_t*>(panel + p * panel_bytes + j * 2 * PANEL + v * 2 * LANES));
            for (int r = 0; r < R; r++) {
                const vi pair = load<int32_t>(words[r] + 2 * j) - vi{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) dots[r][p][v] = dot_words(dots[r][p][v], weights[p][v], pair);
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const vf scale =
                    load_f16(reinterpret_cast<const uint16_t*>(panel + p * panel_bytes + 512) + v * LANES);
                for (int r = 0; r < R; r++) {
                    const vf value = __builtin_convertvector(finish_words(dots[r][p][v]), vf) * scale;
                    acc[r][p][v] = fma(value, splat(scales[r * stride + g]), acc[r][p][v]);
                }
            }
        for (int r = 0; r < R; r++) words[r] += GROUP;
    }
}

// out [R, P * 16] = accumulators.
template <int R, int P>
INLINE void store_sums(const vf (&acc)[R][P][VECTORS], float* out, int out_stride) {
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + p * PANEL + v * LANES, acc[r][p][v]);
}

// --- any format -------------------------------------------------------------------------------------------------------

// Rows per call: as many as fit with their accumulators in registers.
#if defined(ISA_AVX512)
constexpr int MOST_ROWS = 12, MOST_ROWS_8 = 6;
#elif defined(ISA_AVX2)
constexpr int MOST_ROWS = 6, MOST_ROWS_8 = 3;
#else
constexpr int MOST_ROWS = 4, MOST_ROWS_8 = 2;
#endif

// Rows per call for which codes of 4 to 6 bits are unpacked in registers; gemm_wide.h unpacks them once for more. At AVX-512
// two panels of six rows fit, or one of up to twelve: that takes less time than two parts of half the rows if unpacking
// takes long. At AVX2 four rows keep their sums elsewhere while others are multiplied, and are still faster.
constexpr int MOST_ROWS_OF_TWO = 6;
constexpr int most_code_rows([[maybe_unused]] Format format, [[maybe_unused]] ActivationForm form) {
    [[maybe_unused]] const bool is_bytes = form == ActivationForm::BYTES;
#if defined(ISA_AVX512)
    if (code_bits(format) == 4) return is_bytes ? 8 : MOST_ROWS_OF_TWO;
#if !defined(EMULATE)  // which would take minutes to compile
    if (format == Format::Q6_K && is_bytes) return 12;
#endif
#elif defined(ISA_AVX2)
    if (is_bytes || format == Format::Q4_0 || format == Format::Q4_1) return 4;
#endif
    return 1;
}

// Rows from which on codes are unpacked once for all.
INLINE int least_wide_rows(Format format, ActivationForm form) {
    if (most_code_rows(format, form) == 1) return 2;
    if (LANES == 16) return 25;
    return code_bits(format) == 4 && form == ActivationForm::BYTES ? 7 : 5;
}

// Panels that so many rows of activations take at once. At AVX2 one row has registers for the sums of two, or of one and
// the unpacking of larger codes.
constexpr int most_code_panels([[maybe_unused]] Format format, int rows) {
    if (LANES == 16) return rows == 1 ? 4 : rows <= MOST_ROWS_OF_TWO ? 2 : 1;
    if (LANES == 8) return rows == 1 && code_bits(format) == 4 ? 2 : 1;
    return 4;
}

// Not inlined: with constant arguments GCC runs out of registers.
template <Format F, ActivationForm A, int R, int P>
__attribute__((noinline)) static void multiply_code_panels(const Rows& rows, int first_row, const Matrix& matrix, const uint8_t* panel,
                                                           float* out, int out_stride, const uint8_t* ahead) {
    vf acc[R][P][VECTORS] = {};
    if constexpr (P == 1 && takes_one_panel(F, R))
        multiply_one_panel<F, A, R>(rows, first_row, panel, matrix.depth, acc, ahead, matrix.lines);
    else
        multiply_bits<F, A, R, P>(rows, first_row, panel, matrix.panel_bytes(), matrix.depth, acc, ahead, matrix.lines);
    store_sums(acc, out, out_stride);
}

template <int R, int P>
__attribute__((noinline)) static void multiply_panels(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, float* out,
                                                      int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    const uint8_t* panel = matrix.panels + first_panel * bytes;
    if (matrix.integer() && matrix.format != Format::Q8_0) {
        const auto multiply_in = [&]<Format F, ActivationForm A>() {
            if constexpr (R <= most_code_rows(F, A) && P <= most_code_panels(F, R))
                multiply_code_panels<F, A, R, P>(rows, first_row, matrix, panel, out, out_stride, ahead);
        };
        const auto multiply_as = [&]<Format F>() {
            if (matrix.form == ActivationForm::BYTES)
                multiply_in.template operator()<F, ActivationForm::BYTES>();
            else
                multiply_in.template operator()<F, ActivationForm::SPLIT>();
        };
        switch (matrix.format) {
            case Format::Q4_0: return multiply_as.template operator()<Format::Q4_0>();
            case Format::Q4_1: return multiply_as.template operator()<Format::Q4_1>();
            case Format::Q5_0: return multiply_as.template operator()<Format::Q5_0>();
            case Format::Q5_1: return multiply_as.template operator()<Format::Q5_1>();
            case Format::Q4_K: return multiply_as.template operator()<Format::Q4_K>();
            case Format::Q5_K: return multiply_as.template operator()<Format::Q5_K>();
            default: return multiply_as.template operator()<Format::Q6_K>();
        }
    }
    vf acc[R][P][VECTORS] = {};
    if (matrix.format == Format::BF16) {
        const act* plain[R];
        const uint32_t* panels[P];
        const uint8_t* next[P];
        for (int p = 0; p < P; p++) next[p] = ahead + p * bytes;
        for (int r = 0; r < R; r++) plain[r] = rows.plain(first_row + r);
        for (int p = 0; p < P; p++) panels[p] = reinterpret_cast<const uint32_t*>(panel + p * bytes);
        multiply_bf16<R, P>(plain, panels, matrix.depth / 2, acc, ahead ? next : nullptr, matrix.lines);
    } else if constexpr (R <= MOST_ROWS_8) {
        multiply_8<R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
    }
    store_sums(acc, out, out_stride);
}

// One row has registers for more panels, and needs them: each accumulator waits for its previous product.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 || LANES == 16 ? 2 : 1; }

template <int R>
static void multiply_rows(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, int panels, float* out,
                          int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    constexpr int AT_ONCE = panels_at_once(R);
    // On aarch64 sums of 16-bit products take two registers each, so half as many panels have them all in registers.
    const int most = !matrix.integer()                ? AT_ONCE
                     : matrix.format != Format::Q8_0 ? most_code_panels(matrix.format, R)
                                                     : AT_ONCE * int(sizeof(vi)) / int(sizeof(word_sums));
    const auto next = [&](int p) { return ahead ? ahead + p * bytes : nullptr; };
    int p = 0;
    for (; AT_ONCE <= most && p + AT_ONCE <= panels; p += AT_ONCE)
        multiply_panels<R, AT_ONCE>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
    if constexpr (AT_ONCE > 2)
        for (; 2 <= most && p + 2 <= panels; p += 2)
            multiply_panels<R, 2>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
    if constexpr (AT_ONCE > 1)
        for (; p < panels; p++)
            multiply_panels<R, 1>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
}

// out [count, panels * 16] = rows first_row .. first_row + count times `panels` panels. count <= most_rows(matrix, count).
// `ahead` is null, or `panels` panels of the matrix to prefetch.
static void multiply(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                     float* out, int out_stride, const uint8_t* ahead) {
    switch (count) {
#define CASE(R)                                                                                     \
    case R:                                                                                         \
        if constexpr (R <= MOST_ROWS)                                                               \
            multiply_rows<R>(rows, first_row, matrix, first_panel, panels, out, out_stride, ahead); \
        return;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

// Rows per call, of so many.
INLINE int most_rows(const Matrix& matrix, int num_rows) {
    if (!matrix.integer()) return MOST_ROWS;
    if (matrix.format == Format::Q8_0) return MOST_ROWS_8;
    const int most = most_code_rows(matrix.format, matrix.form);
    return num_rows <= most || code_bits(matrix.format) > 4 ? most : std::min(most, MOST_ROWS_OF_TWO);
}
