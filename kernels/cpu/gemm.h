// Rows of activations times a packed matrix: the matmul for weights, keys and values.
//
// An output is one accumulator that adds its products in the order of depth, so a row has the same bits in any batch.
#pragma once

#include <algorithm>

#include "matrix.h"

// --- prefetching ------------------------------------------------------------------------------------------------------
//
// A step reads each weight, key and value once, in panels of 2 to 6 KB. The hardware prefetcher starts again at each
// panel, so the time of memory would add to that of computing. So a matmul prefetches while it computes: for every line
// that it reads of a panel, the same line of `ahead`, the panel that this thread probably reads next, or nothing where
// `ahead` is null. The prefetches are spread over the products; all at once they would wait for each other.

constexpr int LINE = 64;
enum Level : int { L2 = 2, L1 = 3 };  // the nearest cache that gets the line

template <Level LEVEL>
INLINE void prefetch(const uint8_t* at, int bytes) {
    for (int i = 0; i < bytes; i += LINE) __builtin_prefetch(at + i, 0, LEVEL);
}

// Other memory that is needed soon, besides the next panel: a matmul with 4-bit or bf16 weights fetches a few lines of it
// for every group of depth. All at once, they would keep the core from computing.
struct Lines {
    static constexpr int MOST = 128, MOST_AT_ONCE = 12;

    void add(const void* from, int64_t bytes) {
        if (bytes <= 0 || count == MOST) return;
        const int lines = int((bytes + LINE - 1) / LINE);
        parts[count++] = {static_cast<const uint8_t*>(from), lines};
        total += lines;
    }

    // Over so many groups.
    void spread(int groups) { each = std::min((total + groups - 1) / groups, MOST_AT_ONCE); }

    void fetch() { fetch(each); }
    void fetch_rest() { fetch(total); }

   private:
    struct Part {
        const uint8_t* from;
        int lines;
    };

    void fetch(int lines) {
        while (lines > 0 && at < count) {
            Part& part = parts[at];
            const int some = std::min(lines, part.lines);
            for (int i = 0; i < some; i++) __builtin_prefetch(part.from + i * LINE, 0, L2);
            part.from += some * LINE, lines -= some;
            if (!(part.lines -= some)) at++;
        }
    }

    int count = 0, at = 0, total = 0, each = 0;
    Part parts[MOST];
};

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
//
// Whether several rows are done like this, too. At AVX-512 two panels of six rows fit into registers, while elsewhere
// unpacking takes too long.
constexpr bool IN_TWO_PASSES = LANES == 16;

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

// The dot products of one group, for R rows and N vectors of outputs, to int32: exact on every ISA. `weights(n, step)` are
// codes of BITS bits. 6-bit codes have factors for both halves of the group, twice as 16 bits in a lane.
template <int BITS, ActivationForm A, int R, int N, class Weights>
INLINE void dot_codes(const int8_t* const (&codes)[R], const Weights& weights, const vi (&factors)[N][2],
                      vi (&dots)[R][N]) {
    typedef int16_t words __attribute__((vector_size(4 * LANES)));
    constexpr bool SPLIT = A == ActivationForm::SPLIT;
    constexpr int SHIFT = SPLIT ? 4 : 0;
    // Steps after which sums are added to `dots`: those of large codes before 16 bits overflow.
    constexpr int LOW_STEPS = BITS == 6 ? 4 : 8;
    constexpr int STEPS = !SUMS_ARE_PAIRS ? LOW_STEPS : BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
    vi high[R][N] = {}, low[R][N] = {};
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) dots[r][n] = vi{};
#if !defined(EMULATE)  // which would take minutes to compile
#pragma GCC unroll 8
#endif
    for (int step = 0; step < 8; step++) {
        vu fours[N];
        for (int n = 0; n < N; n++) fours[n] = weights(n, step);
        for (int r = 0; r < R; r++) {
            const vu four = load<uint32_t>(codes[r] + 4 * step) - vu{};
            for (int n = 0; n < N; n++) high[r][n] = dot_nibbles(high[r][n], fours[n], four);
            if constexpr (SPLIT) {
                const vu rest = load<uint32_t>(codes[r] + GROUP + 4 * step) - vu{};
                for (int n = 0; n < N; n++) low[r][n] = dot_nibbles(low[r][n], fours[n], rest);
            }
        }
        if (step % STEPS == STEPS - 1)
            for (int n = 0; n < N; n++) {
                const vi factor = bits<vi>(bits<words>(factors[n][step / 4]) << SHIFT);
                for (int r = 0; r < R; r++) {
                    dots[r][n] = BITS == 6 ? add_nibbles(dots[r][n], high[r][n], factor)
                                           : add_shifted_nibbles<SHIFT>(dots[r][n], high[r][n]);
                    high[r][n] = vi{};
                }
            }
        if (SPLIT && step % LOW_STEPS == LOW_STEPS - 1)
            for (int n = 0; n < N; n++)
                for (int r = 0; r < R; r++) {
                    dots[r][n] = BITS == 6 ? add_nibbles(dots[r][n], low[r][n], factors[n][step / 4])
                                           : add_shifted_nibbles<0>(dots[r][n], low[r][n]);
                    low[r][n] = vi{};
                }
    }
}

// Pairs of factors of a group's halves, for LANES outputs, to factors of each half twice.
INLINE void spread_factors(vi pairs, vi (&factors)[2]) {
    const vu words = bits<vu>(pairs);
    factors[0] = bits<vi>(words << 16 | (words & 0xFFFFu));
    factors[1] = bits<vi>(words >> 16 | (words & 0xFFFF0000u));
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

// acc + the dot products of a group, scaled. `row` points to the scale of the group's activations; `pairs` are the factors
// of 6-bit codes.
template <int ZERO, bool MINIMUMS>
INLINE vf add_group(vf acc, vi dot, vf scale, vf minimum, vi pairs, const float* row, int groups) {
    if constexpr (ZERO == zero_code(Format::Q6_K)) {
        const vi sums = load<int32_t>(row + 3 * groups) - vi{};
        dot -= finish_words(dot_words(word_sums{}, pairs, sums)) << 5;
    } else if constexpr (ZERO != 0) {
        dot -= ZERO * load<int32_t>(row + groups);
    }
    acc = fma(__builtin_convertvector(dot, vf) * scale, splat(*row), acc);
    return MINIMUMS ? fma(minimum, splat(row[2 * groups]), acc) : acc;
}

// Places in a panel.
template <Format F>
struct BlockLayout {
    static constexpr int GROUPS = block_groups(F), CODES = code_bytes(F), SMALL = GROUPS * CODES;
    static constexpr int HALVES = SMALL + small_scale_bytes(F), BYTES = block_bytes(F);
    static constexpr int SMALL_BYTES = F == Format::Q6_K ? 2 : 1;  // of an output

    // Vector `v` of the outputs of group `g` of a block.
    static const uint8_t* small(const uint8_t* block, int g, int v) {
        return block + SMALL + (g * PANEL + v * LANES) * SMALL_BYTES;
    }
    static const uint16_t* halves(const uint8_t* block, int v) {
        return reinterpret_cast<const uint16_t*>(block + HALVES) + v * LANES;
    }
    static vi pairs(const uint8_t* block, int g, int v) {
        if constexpr (F != Format::Q6_K) return vi{};
        return sign_extend_bytes(reinterpret_cast<const int8_t*>(small(block, g, v)));
    }
};

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
        vi pairs[P][VECTORS], dots[R][P][VECTORS] = {};
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) pairs[p][v] = Layout::pairs(panel + p * panel_bytes, in_block, v);
        if constexpr (code_bits(F) == 4) {
            dot_group4<R, P, A == ActivationForm::SPLIT>(codes, 0, group, panel_bytes, dots);
            if constexpr (A == ActivationForm::SPLIT) dot_group4<R, P>(codes, GROUP, group, panel_bytes, dots);
        } else {
            for (int p = 0; p < P; p++) {
                vi factors[VECTORS][2], found[R][VECTORS];
                for (int v = 0; v < VECTORS; v++) spread_factors(pairs[p][v], factors[v]);
                const auto weights = [&](int v, int step) {
                    return load_codes<F>(group + p * panel_bytes + v * 4 * LANES, step);
                };
                dot_codes<code_bits(F), A, R, VECTORS>(codes, weights, factors, found);
                for (int r = 0; r < R; r++)
                    for (int v = 0; v < VECTORS; v++) dots[r][p][v] = found[r][v];
            }
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t* block = panel + p * panel_bytes;
                const uint16_t* halves = Layout::halves(block, v);
                const uint8_t* small = Layout::small(block, in_block, v);
                const vf scale = load_scale<F>(halves, small), minimum = load_minimum<F>(halves, small);
                for (int r = 0; r < R; r++)
                    acc[r][p][v] = add_group<zero_code(F), has_minimums(F)>(
                        acc[r][p][v], dots[r][p][v], scale, minimum, pairs[p][v], scales + r * stride + g, groups);
            }
        for (int r = 0; r < R; r++) codes[r] += CODES;
        if (is_last) {
            panel += Layout::BYTES;
            if (ahead) ahead += Layout::BYTES;
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
        multiply_bf16<R, P>(plain, panels, matrix.depth / 2, acc, ahead ? next : nullptr, matrix.lines);
    } else if (matrix.format == Format::Q8_0) {
        if constexpr (R <= MOST_ROWS_8)
            multiply_8<R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
    } else if constexpr (R == 1 || (IN_TWO_PASSES && R <= MOST_ROWS_4)) {
        const auto multiply_as = [&]<Format F>() {
            if constexpr (R > 1 && code_bits(F) > 4) return;  // gemm_wide.h does these
            else if (matrix.form == ActivationForm::BYTES)
                multiply_bits<F, ActivationForm::BYTES, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead, matrix.lines);
            else
                multiply_bits<F, ActivationForm::SPLIT, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead, matrix.lines);
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
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + p * PANEL + v * LANES, acc[r][p][v]);
}

// One row has registers for more panels, and needs them: each accumulator waits for its previous product.
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows == 2 || LANES == 16 ? 2 : 1; }

template <int R>
static void multiply_rows(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, int panels, float* out,
                          int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    constexpr int AT_ONCE = panels_at_once(R);
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
