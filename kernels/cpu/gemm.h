// Rows of activations times a packed matrix: the matmul for weights, keys and values.
//
// An output is one accumulator that adds its products in the order of depth, so a row has the same bits in any batch.
#pragma once

#include "matrix.h"

// --- prefetching ------------------------------------------------------------------------------------------------------
//
// A step reads each weight, key and value once, in panels of 2 to 6 KB. The hardware prefetcher starts again at each
// panel, so the time of memory would add to that of computing. So a matmul prefetches while it computes: for every line
// that it reads of a panel, the same line of `ahead`, the panel that this thread probably reads next, or nothing where
// `ahead` is null. The prefetches are spread over the products; all at once they would wait for each other.

constexpr int LINE = 64;
enum Level : int { L2 = 2, L1 = 3 };  // the nearest cache that gets the line: weights L2, keys and values L1

template <Level LEVEL>
INLINE void prefetch(const uint8_t* at, int bytes) {
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i, 0, LEVEL);
}

// --- bf16 -------------------------------------------------------------------------------------------------------------

// acc[r][p] += row r times panel p, over `pairs` pairs of depth. `ahead` is null or has P panels.
template <int R, int P, Level LEVEL>
INLINE void multiply_bf16(const act* const (&rows)[R], const uint32_t* const (&panels)[P], int pairs,
                          vf (&acc)[R][P][VECTORS], const uint8_t* const* ahead) {
    for (int k = 0; k < pairs; k++) {
        if (ahead)
            for (int p = 0; p < P; p++) prefetch<LEVEL>(ahead[p] + k * LINE, LINE);
#if defined(DOT_BF16)
        vu weights[P][VECTORS];
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) weights[p][v] = load<vu>(panels[p] + k * PANEL + v * LANES);
        for (int r = 0; r < R; r++) {
            const vu pair = load<uint32_t>(rows[r] + 2 * k) - vu{};
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_bf16(acc[r][p][v], weights[p][v], pair);
        }
#else
        // A few rows are bound by memory, so prefetch half a kilobyte ahead, across page boundaries. More rows don't
        // need it, and have no register for it at AVX2.
        if constexpr (R <= 4)
            for (int p = 0; p < P; p++) __builtin_prefetch(panels[p] + (k + 8) * PANEL);
        for (int half = 0; half < 2; half++) {
            // Keeping the words for their upper halves would take registers from accumulators, so load them again.
            const uint32_t* from[P];
            for (int p = 0; p < P; p++) {
                from[p] = panels[p];
                if constexpr (R * P * VECTORS > 8) asm("" : "+r"(from[p]));
            }
            vf weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const vu word = load<vu>(from[p] + k * PANEL + v * LANES);
                    weights[p][v] = bits<vf>(half ? word & 0xFFFF0000u : word << 16);
                }
            for (int r = 0; r < R; r++) {
                const vf value = splat(rows[r][2 * k + half]);
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = fma(value, weights[p][v], acc[r][p][v]);
            }
        }
#endif
    }
}

// --- groups of 32 -----------------------------------------------------------------------------------------------------

constexpr int GROUP_8_BYTES = block_bytes(Format::Q8_0);

// Four numbers of depth, `step` of the eight of a group, for LANES outputs: a byte each.
template <Format F>
INLINE vu load_codes(const uint8_t* codes, int step) {
    constexpr int PLANE = 4 * PANEL;
    const vu word = load<vu>(codes + step / 2 * PLANE);
    vu four = (step % 2 ? word >> 4 : word) & 0x0F0F0F0Fu;
    if constexpr (code_bits(F) == 5) {
        const vu above = load<vu>(codes + 4 * PLANE);
        four |= (step < 4 ? above << (4 - step) : above >> (step - 4)) & 0x10101010u;
    }
    if constexpr (code_bits(F) == 6) {
        const vu above = load<vu>(codes + (4 + step / 4) * PLANE);
        four |= (step % 4 < 2 ? above << (4 - step % 4 * 2) : above >> (step % 4 * 2 - 4)) & 0x30303030u;
    }
    return four;
}

// Adds the dot products of one group, for R rows and P panels, to int32: exact on every ISA. Times 16 if TIMES_16. For
// codes of 4 bits.
template <int R, int P, bool TIMES_16 = false>
INLINE void dot_group4(const int8_t* const (&codes)[R], int offset, const uint8_t* panel, size_t panel_bytes,
                       vi (&dots)[R][P][VECTORS]) {
    // Nibbles times 16 are bytes, for which only AVX-512 has an instruction that doesn't overflow.
    constexpr bool SHIFT_WEIGHTS = TIMES_16 && ADDS_BYTES;
    vi acc[R][P][VECTORS] = {};
    for (int j = 0; j < 4; j++) {
        for (int half = 0; half < 2; half++) {
            vu weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const vu word = load<vu>(panel + p * panel_bytes + j * 64 + v * 4 * LANES);
                    weights[p][v] = SHIFT_WEIGHTS ? (half ? word : word << 4) & 0xF0F0F0F0u
                                                  : (half ? word >> 4 : word) & 0x0F0F0F0Fu;
                }
            for (int r = 0; r < R; r++) {
                const vu four = load<uint32_t>(codes[r] + offset + 8 * j + 4 * half) - vu{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_nibbles(acc[r][p][v], weights[p][v], four);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const vi sums = finish_nibbles(acc[r][p][v]);
                dots[r][p][v] += TIMES_16 && !SHIFT_WEIGHTS ? sums << 4 : sums;
            }
}

// Factors of the sums of a group's two halves, twice as 16 bits in a lane: 1, in q6_k their scales.
template <Format F>
INLINE void load_factors(const uint8_t* scales, vi (&factors)[2]) {
    if constexpr (F == Format::Q6_K) {
        const vu pairs = bits<vu>(sign_extend_bytes(reinterpret_cast<const int8_t*>(scales)));
        factors[0] = bits<vi>(pairs << 16 | (pairs & 0xFFFFu));
        factors[1] = bits<vi>(pairs >> 16 | (pairs & 0xFFFF0000u));
    } else {
        factors[0] = factors[1] = 0x00010001 - vi{};
    }
}

// Adds the dot products of one group to int32, with codes of 5 or 6 bits and each half times its factor; 16 times as much
// if TIMES_16. `ROUNDS` of a half must be added up before 16 bits overflow.
template <Format F, int R, int P, bool TIMES_16>
INLINE void dot_half(const int8_t* const (&codes)[R], int offset, const uint8_t* panel, size_t panel_bytes, int half,
                     const vi (&factors)[P][VECTORS][2], vi (&dots)[R][P][VECTORS]) {
    typedef int16_t words __attribute__((vector_size(4 * LANES)));
    // The lower halves of activations are less than 16.
    constexpr int AT_ONCE = SUMS_ARE_PAIRS && code_bits(F) == 6 && TIMES_16 ? 2 : 4;
#pragma GCC unroll 2
    for (int begin = 4 * half; begin < 4 * half + 4; begin += AT_ONCE) {
        vi acc[R][P][VECTORS] = {};
#pragma GCC unroll 4
        for (int step = begin; step < begin + AT_ONCE; step++) {
            vu weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++)
                    weights[p][v] = load_codes<F>(panel + p * panel_bytes + v * 4 * LANES, step);
            for (int r = 0; r < R; r++) {
                const vu four = load<uint32_t>(codes[r] + offset + 4 * step) - vu{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_nibbles(acc[r][p][v], weights[p][v], four);
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const vi one = factors[p][v][half], factor = TIMES_16 ? bits<vi>(bits<words>(one) << 4) : one;
                for (int r = 0; r < R; r++) dots[r][p][v] = add_nibbles(dots[r][p][v], acc[r][p][v], factor);
            }
    }
}

// What the integers of a group are multiplied with, and what is added to the products: for LANES outputs.
template <Format F>
INLINE vf load_scale(const uint16_t* halves, const uint8_t* small) {
    const vf scale = load_f16(halves);
    if constexpr (F == Format::Q4_K || F == Format::Q5_K) return scale * __builtin_convertvector(load_bytes(small), vf);
    return scale;
}

template <Format F>
INLINE vf load_minimum(const uint16_t* halves, const uint8_t* small) {
    if constexpr (!has_minimums(F)) return vf{};
    const vf minimum = load_f16(halves + PANEL);
    if constexpr (block_groups(F) > 1) return -(minimum * __builtin_convertvector(load_bytes(small + 8 * PANEL), vf));
    return minimum;
}

// Codes of 4 to 6 bits.
template <Format F, Form A, int R, int P>
INLINE void multiply_bits(const Rows& rows, int first_row, const uint8_t* panel, size_t panel_bytes, int depth,
                          vf (&acc)[R][P][VECTORS], const uint8_t* ahead) {
    constexpr int CODES = A == Form::SPLIT ? SPLIT_GROUP_BYTES : GROUP;  // bytes of a group of activations
    constexpr int GROUPS = block_groups(F), WEIGHTS = code_bytes(F), SMALL = GROUPS * WEIGHTS;
    constexpr int HALVES = SMALL + small_scale_bytes(F), BLOCK_BYTES = block_bytes(F);
    constexpr int SMALL_BYTES = F == Format::Q6_K ? 2 : 1;  // of an output
    const int8_t* codes[R];
    for (int r = 0; r < R; r++) codes[r] = rows.codes(first_row + r);
    const float* scales = rows.scales(first_row, depth / GROUP * CODES);
    const size_t stride = rows.stride / 4;
    const int groups = depth / GROUP;
    for (int g = 0; g < groups; g++) {
        const int in_block = GROUPS == 1 ? 0 : g % GROUPS;
        const uint8_t* group = panel + in_block * WEIGHTS;
        if (ahead) {
            const int bytes = GROUPS > 1 ? WEIGHTS : BLOCK_BYTES;
            for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * panel_bytes + in_block * WEIGHTS, bytes);
            if (GROUPS > 1 && in_block == GROUPS - 1)
                for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * panel_bytes + SMALL, BLOCK_BYTES - SMALL);
        }
        vi dots[R][P][VECTORS] = {};
        vi pairs[P][VECTORS];  // of q6_k: the scales of both halves
        if constexpr (code_bits(F) == 4) {
            dot_group4<R, P, A == Form::SPLIT>(codes, 0, group, panel_bytes, dots);
            if constexpr (A == Form::SPLIT) dot_group4<R, P>(codes, GROUP, group, panel_bytes, dots);
        } else {
            vi factors[P][VECTORS][2];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const uint8_t* small = panel + p * panel_bytes + SMALL + (in_block * PANEL + v * LANES) * SMALL_BYTES;
                    load_factors<F>(small, factors[p][v]);
                    if constexpr (F == Format::Q6_K)
                        pairs[p][v] = sign_extend_bytes(reinterpret_cast<const int8_t*>(small));
                }
            for (int half = 0; half < 2; half++) {
                dot_half<F, R, P, A == Form::SPLIT>(codes, 0, group, panel_bytes, half, factors, dots);
                if constexpr (A == Form::SPLIT)
                    dot_half<F, R, P, false>(codes, GROUP, group, panel_bytes, half, factors, dots);
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t* block = panel + p * panel_bytes;
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(block + HALVES) + v * LANES;
                const uint8_t* small = block + SMALL + in_block * PANEL + v * LANES;
                const vf scale = load_scale<F>(halves, small), minimum = load_minimum<F>(halves, small);
                for (int r = 0; r < R; r++) {
                    const float* row = scales + r * stride + g;
                    vi dot = dots[r][p][v];
                    if constexpr (F == Format::Q6_K) {
                        const vi sums = load<int32_t>(row + 3 * groups) - vi{};
                        dot -= finish_words(dot_words(word_sums{}, pairs[p][v], sums)) << 5;
                    } else if constexpr (zero_code(F) != 0) {
                        dot -= zero_code(F) * load<int32_t>(row + groups);
                    }
                    const vf value = __builtin_convertvector(dot, vf) * scale;
                    acc[r][p][v] = fma(value, splat(*row), acc[r][p][v]);
                    if constexpr (has_minimums(F))
                        acc[r][p][v] = fma(minimum, splat(row[2 * groups]), acc[r][p][v]);
                }
            }
        for (int r = 0; r < R; r++) codes[r] += CODES;
        if (in_block == GROUPS - 1) {
            panel += BLOCK_BYTES;
            if (ahead) ahead += BLOCK_BYTES;
        }
    }
}

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

// --- any format -------------------------------------------------------------------------------------------------------

// Rows per call: as many as fit with their accumulators in registers.
#if defined(ISA_AVX512)
constexpr int MOST_ROWS = 12, MOST_ROWS_8 = 6, MOST_ROWS_4 = 6;
#elif defined(ISA_AVX2)
constexpr int MOST_ROWS = 6, MOST_ROWS_8 = 3, MOST_ROWS_4 = 4;
#else
constexpr int MOST_ROWS = 4, MOST_ROWS_8 = 2, MOST_ROWS_4 = 2;
#endif

// Not inlined: with constant arguments GCC runs out of registers.
template <int R, int P>
__attribute__((noinline)) static void multiply_panels(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, float* out,
                            int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    const uint8_t* panel = matrix.panels + first_panel * bytes;
    vf acc[R][P][VECTORS] = {};
    if (matrix.format == Format::BF16) {
        const act* plain[R];
        const uint32_t* panels[P];
        const uint8_t* next[P];
        for (int p = 0; p < P; p++) next[p] = ahead + p * bytes;
        for (int r = 0; r < R; r++) plain[r] = rows.plain(first_row + r);
        for (int p = 0; p < P; p++) panels[p] = reinterpret_cast<const uint32_t*>(panel + p * bytes);
        multiply_bf16<R, P, L2>(plain, panels, matrix.depth / 2, acc, ahead ? next : nullptr);
    } else if (matrix.format == Format::Q8_0) {
        if constexpr (R <= MOST_ROWS_8)
            multiply_8<R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
    } else if constexpr (R <= MOST_ROWS_4) {
        const auto multiply_as = [&]<Format F>() {
            if (matrix.form == Form::BYTES)
                multiply_bits<F, Form::BYTES, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
            else
                multiply_bits<F, Form::SPLIT, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
        };
        switch (matrix.format) {
            case Format::Q4_0: multiply_as.template operator()<Format::Q4_0>(); break;
            case Format::Q4_1: multiply_as.template operator()<Format::Q4_1>(); break;
            case Format::Q5_0: multiply_as.template operator()<Format::Q5_0>(); break;
            case Format::Q5_1: multiply_as.template operator()<Format::Q5_1>(); break;
            case Format::Q4_K: multiply_as.template operator()<Format::Q4_K>(); break;
            case Format::Q5_K: multiply_as.template operator()<Format::Q5_K>(); break;
            default: multiply_as.template operator()<Format::Q6_K>();
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + p * PANEL + v * LANES, acc[r][p][v]);
}

template <int R>
static void multiply_rows(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, int panels, float* out,
                          int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    // One row has registers for more panels, and needs them: each accumulator waits for its previous product.
    constexpr int AT_ONCE = R == 1 ? 4 : R == 2 || LANES == 16 ? 2 : 1;
    // On aarch64 sums of 16-bit products take two registers each, so half as many panels have them all in registers.
    const bool is_half = sizeof(word_sums) > sizeof(vi) && matrix.format == Format::Q8_0;
    const auto next = [&](int p) { return ahead ? ahead + p * bytes : nullptr; };
    int p = 0;
    for (; !is_half && p + AT_ONCE <= panels; p += AT_ONCE)
        multiply_panels<R, AT_ONCE>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
    if constexpr (AT_ONCE > 2)
        for (; p + 2 <= panels; p += 2)
            multiply_panels<R, 2>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
    if constexpr (AT_ONCE > 1)
        for (; p < panels; p++)
            multiply_panels<R, 1>(rows, first_row, matrix, first_panel + p, out + p * PANEL, out_stride, next(p));
}

// out [count, panels * 16] = rows first_row .. first_row + count times `panels` panels. count <= most_rows(matrix).
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

INLINE int most_rows(const Matrix& matrix) {
    return !matrix.integer() ? MOST_ROWS : matrix.format == Format::Q8_0 ? MOST_ROWS_8 : MOST_ROWS_4;
}
