// What the matmuls of codes of 4 to 6 bits share: prefetching, and the products of a group of 32 and their scales.
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

// --- groups of 32 -----------------------------------------------------------------------------------------------------

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
// codes of 4 bits. `codes[r]` are those of a row.
template <int R, int P, bool TIMES_16 = false, class Codes>
INLINE void dot_group4(const Codes& codes, int offset, const uint8_t* panel, size_t panel_bytes,
                       vi (&dots)[R][P][VECTORS]) {
    // Nibbles times 16 are bytes, for which only AVX-512 has an instruction that doesn't overflow.
    constexpr bool SHIFT_WEIGHTS = TIMES_16 && ADDS_BYTES;
    // Sums of their own would take registers.
    constexpr bool ADDS_TO_DOTS = !SUMS_ARE_PAIRS && TIMES_16 == SHIFT_WEIGHTS;
    vi acc[R][P][VECTORS];
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) acc[r][p][v] = ADDS_TO_DOTS ? dots[r][p][v] : vi{};
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
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                if constexpr (ADDS_TO_DOTS) {
                    dots[r][p][v] = acc[r][p][v];
                } else {
                    const vi sums = finish_nibbles(acc[r][p][v]);
                    dots[r][p][v] += TIMES_16 ? sums << 4 : sums;
                }
            }
}

// Adds the dot products of STEPS steps of a group, of the eight that it has, for R rows and N vectors of outputs, to int32:
// exact on every ISA. `weights(n, step)` are codes of BITS bits.
template <int BITS, ActivationForm A, int FIRST, int STEPS, int R, int N, class Codes, class Weights>
INLINE void add_dots(const Codes& codes, const Weights& weights, vi (&dots)[R][N]) {
    constexpr bool SPLIT = A == ActivationForm::SPLIT;
    // Sums of lower halves need none of their own, nor do those of 8 bits.
    constexpr bool ADDS_TO_DOTS = !SUMS_ARE_PAIRS;
    // Steps before 16 bits overflow with larger codes.
    constexpr int MOST = ADDS_TO_DOTS || BITS == 4 ? STEPS : BITS == 5 ? 4 : 2;
    vi high[R][N] = {}, low[R][N] = {};
#if !defined(EMULATE)  // which would take minutes to compile
#pragma GCC unroll 8
#endif
    for (int step = FIRST; step < FIRST + STEPS; step++) {
        vu fours[N];
        for (int n = 0; n < N; n++) fours[n] = weights(n, step);
        for (int r = 0; r < R; r++) {
            const vu four = load<uint32_t>(codes[r] + 4 * step) - vu{};
            for (int n = 0; n < N; n++) {
                vi& sum = ADDS_TO_DOTS && !SPLIT ? dots[r][n] : high[r][n];
                sum = dot_nibbles(sum, fours[n], four);
            }
            if constexpr (SPLIT) {
                const vu rest = load<uint32_t>(codes[r] + GROUP + 4 * step) - vu{};
                for (int n = 0; n < N; n++) {
                    vi& sum = ADDS_TO_DOTS ? dots[r][n] : low[r][n];
                    sum = dot_nibbles(sum, fours[n], rest);
                }
            }
        }
        if ((SPLIT || !ADDS_TO_DOTS) && (step - FIRST) % MOST == MOST - 1)
            for (int n = 0; n < N; n++)
                for (int r = 0; r < R; r++) {
                    dots[r][n] = add_shifted_nibbles<SPLIT ? 4 : 0>(dots[r][n], high[r][n]);
                    high[r][n] = vi{};
                }
    }
    if constexpr (SPLIT && !ADDS_TO_DOTS)
        for (int n = 0; n < N; n++)
            for (int r = 0; r < R; r++) dots[r][n] = add_shifted_nibbles<0>(dots[r][n], low[r][n]);
}

// Sums that start with the bits of ROUND instead of zero are floats, ROUND more than their integers, as magnitudes below
// 2^22 keep the exponent. So their product with a scale is one operation, `shift` = -ROUND x scale, instead of two: both
// round once. All sums of groups are small enough. Sums of 6-bit codes always start so (`bases` in matrix.h), those of
// others where starting with something else than zero costs nothing.
constexpr bool SUMS_ARE_FLOATS = FUSES && !SUMS_ARE_PAIRS;
INLINE vi empty_sum() { return SUMS_ARE_FLOATS ? bits<int32_t>(ROUND) - vi{} : vi{}; }

template <bool ARE_FLOATS>
INLINE vf scale_sum(vi sum, vf scale, vf shift) {
    if constexpr (!ARE_FLOATS) return __builtin_convertvector(sum, vf) * scale;
    return FUSES ? fma(bits<vf>(sum), scale, shift) : (bits<vf>(sum) - ROUND) * scale;
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

// acc + the dot products of a group, scaled. `row` points to the scale of the group's activations. Not of 6-bit codes.
template <int ZERO, bool MINIMUMS>
INLINE vf add_group(vf acc, vi dot, vf scale, vf shift, vf minimum, const float* row, int groups) {
    if constexpr (ZERO != 0) dot -= ZERO * load<int32_t>(row + groups);
    acc = fma(scale_sum<SUMS_ARE_FLOATS>(dot, scale, shift), splat(*row), acc);
    return MINIMUMS ? fma(minimum, splat(row[2 * groups]), acc) : acc;
}

// The same place in each row.
struct StridedFloats {
    const float* first;
    size_t stride;

    const float* operator[](int row) const { return first + row * stride; }
};

// acc += the products of a group of 6-bit codes, whose halves have scales of their own. Each row has codes, a scale and two
// `bases` of the group.
template <ActivationForm A, int R, int N, class Codes, class Weights, class Floats>
INLINE void add_group6(const Codes& codes, const Weights& weights, const vf (&scales)[2][N], const Floats& row_scales,
                       const Floats& bases, vf (&acc)[R][N]) {
    const auto add_half = [&]<int HALF>() __attribute__((always_inline)) {
        vi dots[R][N];
        IN_REGISTERS
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) dots[r][n] = load<int32_t>(bases[r] + HALF) - vi{};
        add_dots<6, A, 4 * HALF, 4, R, N>(codes, weights, dots);
        for (int n = 0; n < N; n++) {
            const vf scale = scales[HALF][n], shift = scale * -ROUND;
            for (int r = 0; r < R; r++)
                acc[r][n] = fma(scale_sum<true>(dots[r][n], scale, shift), splat(*row_scales[r]), acc[r][n]);
        }
    };
    add_half.template operator()<0>();
    add_half.template operator()<1>();
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
    // The scales of both halves of group `g` of 6-bit codes.
    static void half_scales(const uint8_t* block, int g, int v, vf& first, vf& second) {
        half_scales(load_f16(halves(block, v)), small(block, g, v), first, second);
    }
    static void half_scales(vf scale, const uint8_t* small, vf& first, vf& second) {
        const vi pairs = sign_extend_bytes(reinterpret_cast<const int8_t*>(small));
        first = scale * __builtin_convertvector((pairs << 16) >> 16, vf);
        second = scale * __builtin_convertvector(pairs >> 16, vf);
    }
};
