// The matmul of K-quants with activations in blocks of 256 (gemm_blocks.h), for few rows: codes are unpacked in registers.
//
// Up to `most_byte_rows` rows multiply bytes, up to MOST_FEW_ROWS the products of codes and their scales. The sums are the
// same integers as those of gemm_blocks.h, and are scaled by the same operations, so also the same bits.
#pragma once

#include <utility>

#include "gemm.h"

constexpr int BLOCK_GROUPS = 8, BLOCK_PAIRS = BLOCK_DEPTH / 2;

// Rows that take less time if the sums of bytes are multiplied with the codes' scales than if all codes are. Without an
// instruction that adds four products of bytes to 32 bits, sums of larger codes have to be widened often.
constexpr int most_byte_rows(Format format) { return SUMS_ARE_PAIRS && code_bits(format) > 4 ? 2 : 4; }

// Rows for which panels are unpacked in registers, and how many of them at once: as many as have registers for their sums.
constexpr int MOST_FEW_ROWS = 8;
#if defined(EMULATE)  // more take minutes to compile
constexpr int MOST_REGISTER_ROWS = 1;
#elif defined(ISA_PORTABLE)
constexpr int MOST_REGISTER_ROWS = 2;
#else
constexpr int MOST_REGISTER_ROWS = 8;
#endif

// Groups whose products with weights of a format add up to at most 2^31 (see `quantize`).
constexpr int exact_groups(Format format) { return code_bits(format) == 4 ? 8 : code_bits(format) == 5 ? 4 : 2; }

typedef int16_t word_vector __attribute__((vector_size(4 * LANES)));

// For each pair of bytes the sum of unsigned ones of `a` times signed ones of `b`, as 16 bits, which it has to fit into.
INLINE vi multiply_bytes(vu a, vi b) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_maddubs_epi16(bits<__m512i>(a), bits<__m512i>(b)));
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_maddubs_epi16(bits<__m256i>(a), bits<__m256i>(b)));
#else
    const word_vector factors = bits<word_vector>(b);
    const word_vector even = bits<word_vector>(a & 0x00FF00FFu) * ((factors << 8) >> 8);
    return bits<vi>(even + bits<word_vector>((a >> 8) & 0x00FF00FFu) * (factors >> 8));
#endif
}

// The scales of LANES outputs' codes in a group, as int32: of both halves.
template <Format F>
INLINE void load_factors(const uint8_t* small, vi (&factors)[2]) {
    if constexpr (F == Format::Q6_K) {
        const vi pairs = sign_extend_bytes(reinterpret_cast<const int8_t*>(small));
        factors[0] = (pairs << 16) >> 16, factors[1] = pairs >> 16;
    } else {
        factors[0] = factors[1] = load_bytes(small);
    }
}

// Unpacks a group of LANES outputs to scale x code, in the order of ActivationForm::BLOCKS.
template <Format F>
struct GroupUnpacker {
    __attribute__((always_inline)) void start(const uint8_t* from, const uint8_t* small) {
        codes = from;
        vi factors[2];
        load_factors<F>(small, factors);
        for (int half = 0; half < (F == Format::Q6_K ? 2 : 1); half++) {
            const vi byte = factors[half] & 0xFF;
            even[half] = byte | byte << 16;
            zeros[half] = bits<word_vector>(factors[half] << 16 | (factors[half] & 0xFFFF)) * int16_t(zero_code(F));
        }
    }

    // Two pairs of depth: twice as int16 in each lane.
    template <int STEP>
    __attribute__((always_inline)) void take(vi (&weights)[2]) const {
        constexpr int HALF = F == Format::Q6_K ? STEP / 4 : 0;
        const vu four = load_codes<F>(codes, STEP);
        word_vector first = bits<word_vector>(multiply_bytes(four, even[HALF]));
        word_vector second = bits<word_vector>(multiply_bytes(four, even[HALF] << 8));
        if constexpr (zero_code(F) != 0) first -= zeros[HALF], second -= zeros[HALF];
        weights[0] = bits<vi>(first), weights[1] = bits<vi>(second);
    }

   private:
    const uint8_t* codes;
    vi even[2];
    word_vector zeros[2];
};

// Calls use<STEP>() for the eight steps of a group, so that shifts are constants.
template <class Use>
INLINE void for_steps(const Use& use) {
    [&]<int... STEP>(std::integer_sequence<int, STEP...>) __attribute__((always_inline)) {
        (use.template operator()<STEP>(), ...);
    }(std::make_integer_sequence<int, 8>());
}

// acc + the sum of integers of a block or a part of it, scaled.
INLINE vf add_block(vf acc, vi sum, vf scale, float row) { return fma(__builtin_convertvector(sum, vf) * scale, splat(row), acc); }

// acc - the minimums of a block. `minimum(g)` are those of a group; `sums` are its activations' scaled sums.
template <class Minimum>
INLINE vf subtract_minimums(vf acc, const Minimum& minimum, vf scale, const float* sums) {
    vf total{};
    for (int g = 0; g < BLOCK_GROUPS; g++) total = fma(minimum(g), splat(sums[g]), total);
    return fma(-scale, total, acc);
}

// --- bytes --------------------------------------------------------------------------------------------------------------

// The sums of a group's codes times R rows' activations, times the codes' scales, are added to `totals`. `weights(n, step)`
// are codes of F, `bytes` those of activations, and `halves` belong to them.
template <Format F, int R, int N, class Weights>
INLINE void dot_bytes_of_group(const int8_t* const (&bytes)[R], const int32_t* const (&halves)[R], const Weights& weights,
                               const vi (&factors)[N][2], vi (&totals)[R][N]) {
    constexpr int BITS = code_bits(F), PARTS = F == Format::Q6_K ? 2 : 1, STEPS = 8 / PARTS;
    // Steps after which sums are widened, before 16 bits overflow.
    constexpr int MOST_STEPS = !SUMS_ARE_PAIRS ? STEPS : BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
    for (int part = 0; part < PARTS; part++) {
        vi dots[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) dots[r][n] = F == Format::Q6_K ? halves[r][part] - vi{} : vi{};
        for (int first = part * STEPS; first < (part + 1) * STEPS; first += MOST_STEPS) {
            vi upper[R][N] = {}, lower[R][N] = {};
#if !defined(EMULATE)  // which would take minutes to compile
#pragma GCC unroll 8
#endif
            for (int step = first; step < first + MOST_STEPS; step++) {
                vu fours[N];
                for (int n = 0; n < N; n++) fours[n] = weights(n, step);
                for (int r = 0; r < R; r++) {
                    const vu high = load<uint32_t>(bytes[r] + 4 * step) - vu{};
                    for (int n = 0; n < N; n++) upper[r][n] = dot_nibbles(upper[r][n], fours[n], high);
                    const vu low = load<uint32_t>(bytes[r] + GROUP + 4 * step) - vu{};
                    for (int n = 0; n < N; n++) lower[r][n] = dot_nibbles(lower[r][n], fours[n], low);
                }
            }
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++)
                    dots[r][n] += (finish_nibbles(upper[r][n]) << 8) + finish_nibbles(lower[r][n]);
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) totals[r][n] += dots[r][n] * factors[n][part];
    }
}

// A few rows times P panels. Codes are multiplied as bytes, as they are unpacked in registers, and the sums of a group then
// with their scale: the same integers as those of `multiply_block`, so also the same bits.
template <Format F, int R, int P>
__attribute__((noinline)) static void multiply_byte_rows(const Rows& rows, int first_row, int depth, const uint8_t* panel,
                                                        size_t panel_bytes, float* out, int out_stride,
                                                        const uint8_t* ahead) {
    typedef BlockLayout<F> Layout;
    constexpr int EXACT = exact_groups(F), N = P * VECTORS;
    const int8_t* bytes[R];
    const int32_t* halves[R];
    for (int r = 0; r < R; r++) {
        bytes[r] = rows.block_bytes(first_row + r, depth);
        halves[r] = rows.block_halves(first_row + r, depth);
    }
    const float *scales = rows.block_scales(first_row, depth), *sums = rows.block_sums(first_row, depth);
    const size_t stride = rows.stride / 4;
    const auto block = [&](int n) { return panel + n / VECTORS * panel_bytes; };
    vf acc[R][N] = {};
    for (int b = 0; b < depth / BLOCK_DEPTH; b++, panel += Layout::BYTES, sums += BLOCK_GROUPS) {
        vi totals[R][N] = {};
        for (int g = 0; g < BLOCK_GROUPS; g++) {
            if (ahead)
                for (int p = 0; p < P; p++) {
                    prefetch<L2>(ahead + p * panel_bytes + g * Layout::CODES, Layout::CODES);
                    if (g == BLOCK_GROUPS - 1) prefetch<L2>(ahead + p * panel_bytes + Layout::SMALL, Layout::BYTES - Layout::SMALL);
                }
            vi factors[N][2];
            for (int n = 0; n < N; n++) load_factors<F>(Layout::small(block(n), g, n % VECTORS), factors[n]);
            const auto weights = [&](int n, int step) {
                return load_codes<F>(block(n) + g * Layout::CODES + n % VECTORS * 4 * LANES, step);
            };
            dot_bytes_of_group<F, R, N>(bytes, halves, weights, factors, totals);
            for (int r = 0; r < R; r++) bytes[r] += SPLIT_GROUP_BYTES, halves[r] += 2;
            if ((g + 1) % EXACT) continue;
            for (int n = 0; n < N; n++) {
                const vf scale = load_f16(Layout::halves(block(n), n % VECTORS));
                for (int r = 0; r < R; r++) {
                    acc[r][n] = add_block(acc[r][n], totals[r][n], scale, scales[r * stride + b]);
                    totals[r][n] = vi{};
                }
            }
        }
        if constexpr (has_minimums(F))
            for (int n = 0; n < N; n++) {
                const auto minimum = [&](int g) {
                    return __builtin_convertvector(load_bytes(Layout::small(block(n), 8 + g, n % VECTORS)), vf);
                };
                const vf scale = load_f16(Layout::halves(block(n), n % VECTORS) + PANEL);
                for (int r = 0; r < R; r++) acc[r][n] = subtract_minimums(acc[r][n], minimum, scale, sums + r * stride);
            }
        if (ahead) ahead += Layout::BYTES;
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(out + r * out_stride + n * LANES, acc[r][n]);
}

template <Format F, int R>
static void multiply_byte_rows(const Rows& rows, int first_row, const Matrix& matrix, const uint8_t* panel, int panels,
                              float* out, int out_stride, const uint8_t* ahead) {
    // One row has registers for more panels, and needs them: each sum waits for its previous product.
    constexpr int MOST = R == 1 ? (LANES == 8 ? 2 : 4) : LANES == 16 ? 2 : 1;
    const size_t bytes = matrix.panel_bytes();
    int p = 0;
    const auto multiply_some = [&]<int P>() {
        for (; p + P <= panels; p += P)
            multiply_byte_rows<F, R, P>(rows, first_row, matrix.depth, panel + p * bytes, bytes, out + p * PANEL, out_stride,
                                       ahead ? ahead + p * bytes : nullptr);
    };
    multiply_some.template operator()<MOST>();
    if constexpr (MOST > 2) multiply_some.template operator()<2>();
    if constexpr (MOST > 1) multiply_some.template operator()<1>();
}

template <Format F>
static void multiply_byte_rows(const Rows& rows, int first_row, int count, const Matrix& matrix, const uint8_t* panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const auto multiply = [&]<int R>() {
        if constexpr (R <= most_byte_rows(F))
            multiply_byte_rows<F, R>(rows, first_row, matrix, panel, panels, out, out_stride, ahead);
    };
    switch (count) {
        case 1: return multiply.template operator()<1>();
        case 2: return multiply.template operator()<2>();
        case 3: return multiply.template operator()<3>();
        default: return multiply.template operator()<4>();
    }
}

// --- 16 bits ------------------------------------------------------------------------------------------------------------

// out [R, N * LANES] += R rows times N vectors of outputs of a block; = if it is the first one. `block(n)` has the block of
// vector n, which is the vector `first + n` of its panels. Storing unpacked codes and loading them again for so few rows would
// take a quarter of the time.
template <Format F, int R, int N, class Block>
INLINE void add_block_in_registers(const int16_t* const (&codes)[R], const Block& block, int first, float* out,
                                   int out_stride, const float* scales, const float* sums, size_t stride, bool is_first) {
    typedef BlockLayout<F> Layout;
    constexpr int EXACT = exact_groups(F);
    const int16_t* from[R];
    for (int r = 0; r < R; r++) from[r] = codes[r];
    const auto vector = [&](int n) { return (first + n) % VECTORS; };
    for (int part = 0; part < BLOCK_GROUPS; part += EXACT) {
        word_sums totals[R][N] = {};
        for (int g = part; g < part + EXACT; g++) {
            GroupUnpacker<F> unpackers[N];
            for (int n = 0; n < N; n++)
                unpackers[n].start(block(n) + g * Layout::CODES + vector(n) * 4 * LANES, Layout::small(block(n), g, vector(n)));
            for_steps([&]<int STEP>() __attribute__((always_inline)) {
                vi weights[N][2];
                for (int n = 0; n < N; n++) unpackers[n].template take<STEP>(weights[n]);
                for (int half = 0; half < 2; half++)
                    for (int r = 0; r < R; r++) {
                        const vi pair = load<int32_t>(from[r] + 4 * STEP + 2 * half) - vi{};
                        for (int n = 0; n < N; n++) totals[r][n] = dot_words(totals[r][n], weights[n][half], pair);
                    }
            });
            for (int r = 0; r < R; r++) from[r] += GROUP;
        }
        for (int n = 0; n < N; n++) {
            const vf scale = load_f16(Layout::halves(block(n), vector(n)));
            for (int r = 0; r < R; r++) {
                float* to = out + r * out_stride + n * LANES;
                const vf before = is_first && !part ? vf{} : load<vf>(to);
                store(to, add_block(before, finish_words(totals[r][n]), scale, scales[r * stride]));
            }
        }
    }
    if constexpr (has_minimums(F))
        for (int n = 0; n < N; n++) {
            const auto minimum = [&](int g) {
                return __builtin_convertvector(load_bytes(Layout::small(block(n), 8 + g, vector(n))), vf);
            };
            const vf scale = load_f16(Layout::halves(block(n), vector(n)) + PANEL);
            for (int r = 0; r < R; r++) {
                float* to = out + r * out_stride + n * LANES;
                store(to, subtract_minimums(load<vf>(to), minimum, scale, sums + r * stride));
            }
        }
}

// R rows times N vectors of outputs: of N panels at AVX-512; elsewhere a panel's, one after the other.
template <Format F, int R, int N>
__attribute__((noinline)) static void multiply_in_registers(const Rows& rows, int first_row, int depth, const uint8_t* panel,
                                                            size_t panel_bytes, float* out, int out_stride,
                                                            const uint8_t* ahead) {
    typedef BlockLayout<F> Layout;
    constexpr int PANELS = (N + VECTORS - 1) / VECTORS;
    const int16_t* codes[R];
    for (int r = 0; r < R; r++) codes[r] = rows.words(first_row + r);
    const float *scales = rows.block_scales(first_row, depth), *sums = rows.block_sums(first_row, depth);
    const size_t stride = rows.stride / 4;
    for (int b = 0; b < depth / BLOCK_DEPTH; b++) {
        if (ahead)
            for (int p = 0; p < PANELS; p++) prefetch<L2>(ahead + p * panel_bytes, Layout::BYTES);
        for (int v = 0; v < PANELS * VECTORS; v += N) {
            const auto block = [&](int n) { return panel + (v + n) / VECTORS * panel_bytes; };
            add_block_in_registers<F, R, N>(codes, block, v, out + v * LANES, out_stride, scales, sums, stride, b == 0);
        }
        for (int r = 0; r < R; r++) codes[r] += BLOCK_DEPTH;
        panel += Layout::BYTES, scales++, sums += BLOCK_GROUPS;
        if (ahead) ahead += Layout::BYTES;
    }
}

template <Format F, int R>
static void multiply_in_registers(const Rows& rows, int first_row, const Matrix& matrix, const uint8_t* panel, int panels,
                                  float* out, int out_stride, const uint8_t* ahead) {
    constexpr int N = LANES == 16 ? 2 : 1, AT_ONCE = LANES == 16 ? N : 1;
    const size_t bytes = matrix.panel_bytes();
    int p = 0;
    const auto multiply_some = [&]<int PANELS, int VECTORS_AT_ONCE>() {
        for (; p + PANELS <= panels; p += PANELS)
            multiply_in_registers<F, R, VECTORS_AT_ONCE>(rows, first_row, matrix.depth, panel + p * bytes, bytes,
                                                         out + p * PANEL, out_stride, ahead ? ahead + p * bytes : nullptr);
    };
    multiply_some.template operator()<AT_ONCE, N>();
    if constexpr (AT_ONCE > 1) multiply_some.template operator()<1, 1>();
}

template <Format F>
static void multiply_in_registers(const Rows& rows, int first_row, int count, const Matrix& matrix, const uint8_t* panel,
                                  int panels, float* out, int out_stride, const uint8_t* ahead) {
    constexpr int MOST = MOST_REGISTER_ROWS;
    const int parts = (count + MOST - 1) / MOST, most = (count + parts - 1) / parts;
    for (int row = 0; row < count; row += most) {
        const int num = std::min(most, count - row);
        const auto multiply = [&]<int R>() {
            // Parts may have fewer rows than `most_byte_rows`, while all rows together never have.
            if constexpr (R <= MOST && (MOST < MOST_FEW_ROWS || R > most_byte_rows(F)))
                multiply_in_registers<F, R>(rows, first_row + row, matrix, panel, panels, out + row * out_stride, out_stride,
                                            row ? nullptr : ahead);
        };
        switch (num) {
            case 1: multiply.template operator()<1>(); break;
            case 2: multiply.template operator()<2>(); break;
            case 3: multiply.template operator()<3>(); break;
            case 4: multiply.template operator()<4>(); break;
            case 5: multiply.template operator()<5>(); break;
            case 6: multiply.template operator()<6>(); break;
            case 7: multiply.template operator()<7>(); break;
            default: multiply.template operator()<8>();
        }
    }
}

// out [count, panels * 16] for count <= MOST_FEW_ROWS.
template <Format F>
static void multiply_few_rows(const Rows& rows, int first_row, int count, const Matrix& matrix, const uint8_t* panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const auto multiply = count <= most_byte_rows(F) ? multiply_byte_rows<F> : multiply_in_registers<F>;
    multiply(rows, first_row, count, matrix, panel, panels, out, out_stride, ahead);
}
