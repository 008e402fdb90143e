// The matmul of K-quants with activations of 16 bits that have one scale for a block of 256 (`Form::BLOCKS`).
//
// A K-quant's weight is d x (scale x code) - m, where scale and code are small integers. Their product fits into 16 bits,
// so a panel is first unpacked to such products: then the sum over a block is one of integers, and floats are needed once
// for 256 numbers of depth instead of for each group of 32. `quantize` limits the magnitudes of a block's codes so that
// these sums fit into 32 bits, so they are exact, and a row has the same bits in any batch.
//
// A block of N vectors of outputs, unpacked: [128][N][LANES] pairs of int16 | [N][LANES] float scales | [N][LANES] float
// scales of the minimums | [8][N][LANES] float minimums. It stays in the L1 cache, for up to 64 rows at a time.
#pragma once

#include <utility>

#include "gemm.h"

constexpr int BLOCK_GROUPS = 8, BLOCK_PAIRS = BLOCK_DEPTH / 2;
constexpr int BLOCK_PANELS = 2;  // unpacked at once

// Rows per call: as many as fit with their sums in registers.
#if defined(EMULATE)  // more take minutes to compile
constexpr int MOST_BLOCK_ROWS = 3;
#elif defined(ISA_AVX512)
constexpr int MOST_BLOCK_ROWS = 12;
#elif defined(ISA_AVX2)
constexpr int MOST_BLOCK_ROWS = 5;
#else
constexpr int MOST_BLOCK_ROWS = 4;
#endif

// Vectors of outputs per call.
constexpr int BLOCK_VECTORS = 2;

constexpr size_t unpacked_block_bytes(int vectors) { return size_t(BLOCK_PAIRS + 2 + BLOCK_GROUPS) * vectors * 4 * LANES; }

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

// Calls use(pair, weights) for the 16 pairs of a group's depth, in the order of Form::BLOCKS: scale x code, twice as int16
// in each lane.
template <Format F, class Use>
INLINE void unpack_group(const uint8_t* codes, const uint8_t* small, const Use& use) {
    vi factors[2], even[2];
    word_vector zeros[2];
    load_factors<F>(small, factors);
    for (int half = 0; half < 2; half++) {
        const vi byte = factors[half] & 0xFF;
        even[half] = byte | byte << 16;
        zeros[half] = bits<word_vector>(factors[half] << 16 | (factors[half] & 0xFFFF)) * int16_t(zero_code(F));
    }
    const auto take_step = [&]<int STEP>() __attribute__((always_inline)) {  // so that shifts are constants
        const vu four = load_codes<F>(codes, STEP);
        word_vector first = bits<word_vector>(multiply_bytes(four, even[STEP / 4]));
        word_vector second = bits<word_vector>(multiply_bytes(four, even[STEP / 4] << 8));
        if constexpr (zero_code(F) != 0) first -= zeros[STEP / 4], second -= zeros[STEP / 4];
        use(2 * STEP, bits<vi>(first)), use(2 * STEP + 1, bits<vi>(second));
    };
    [&]<int... STEP>(std::integer_sequence<int, STEP...>) __attribute__((always_inline)) {
        (take_step.template operator()<STEP>(), ...);
    }(std::make_integer_sequence<int, 8>());
}

// Unpacks vector `v` of a panel's block: vector `at` of the `vectors` of `to`.
template <Format F>
static void unpack_block(const uint8_t* block, int v, int vectors, int at, uint8_t* to) {
    typedef BlockLayout<F> Layout;
    const size_t row = size_t(vectors) * 4 * LANES;
    uint8_t* out = to + at * 4 * LANES;
    for (int g = 0; g < BLOCK_GROUPS; g++, out += GROUP / 2 * row)
        unpack_group<F>(block + g * Layout::CODES + v * 4 * LANES, Layout::small(block, g, v),
                        [&](int pair, vi weights) { store(out + pair * row, weights); });
    const uint16_t* halves = Layout::halves(block, v);
    store(out, load_f16(halves));
    if constexpr (has_minimums(F)) {
        store(out + row, load_f16(halves + PANEL));
        for (int g = 0; g < BLOCK_GROUPS; g++)
            store(out + (2 + g) * row, __builtin_convertvector(load_bytes(Layout::small(block, 8 + g, v)), vf));
    }
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

// out [R, N * LANES] += R rows times an unpacked block; = if it is the first one.
template <int R, int N>
__attribute__((noinline)) static void multiply_block(const Rows& rows, int first_row, Format format, int depth, int block,
                                                     const uint8_t* wide, float* out, int out_stride) {
    constexpr int ROW = N * 4 * LANES;
    const int exact_pairs = exact_groups(format) * GROUP / 2;
    const int16_t* codes[R];
    for (int r = 0; r < R; r++) codes[r] = rows.words(first_row + r) + block * BLOCK_DEPTH;
    const float* scales = rows.block_scales(first_row, depth) + block;
    const float* sums = rows.block_sums(first_row, depth) + block * BLOCK_GROUPS;
    const size_t stride = rows.stride / 4;
    const uint8_t* factors = wide + BLOCK_PAIRS * ROW;
    for (int first = 0; first < BLOCK_PAIRS; first += exact_pairs) {
        word_sums acc[R][N] = {};
        for (int k = first; k < first + exact_pairs; k++) {
            vi weights[N];
            for (int n = 0; n < N; n++) weights[n] = load<vi>(wide + k * ROW + n * 4 * LANES);
            for (int r = 0; r < R; r++) {
                const vi pair = load<int32_t>(codes[r] + 2 * k) - vi{};
                for (int n = 0; n < N; n++) acc[r][n] = dot_words(acc[r][n], weights[n], pair);
            }
        }
        for (int n = 0; n < N; n++) {
            const vf scale = load<vf>(factors + n * 4 * LANES);
            for (int r = 0; r < R; r++) {
                float* to = out + r * out_stride + n * LANES;
                const vf before = block || first ? load<vf>(to) : vf{};
                store(to, add_block(before, finish_words(acc[r][n]), scale, scales[r * stride]));
            }
        }
    }
    if (has_minimums(format))
        for (int n = 0; n < N; n++) {
            const uint8_t* minimums = factors + ROW + n * 4 * LANES;
            const vf scale = load<vf>(minimums);
            const auto minimum = [&](int g) { return load<vf>(minimums + (1 + g) * ROW); };
            for (int r = 0; r < R; r++) {
                float* to = out + r * out_stride + n * LANES;
                store(to, subtract_minimums(load<vf>(to), minimum, scale, sums + r * stride));
            }
        }
}

// As many rows as there are times an unpacked block.
template <int N>
static void multiply_block_rows(const Rows& rows, int first_row, int count, Format format, int depth, int block,
                                const uint8_t* wide, float* out, int out_stride) {
    constexpr int MOST = MOST_BLOCK_ROWS;
    const int parts = (count + MOST - 1) / MOST, most = (count + parts - 1) / parts;
    for (int row = 0; row < count; row += most) {
        float* to = out + row * out_stride;
        switch (std::min(most, count - row)) {
#define CASE(R)                                                                                            \
    case R:                                                                                                \
        if constexpr (R <= MOST)                                                                           \
            multiply_block<R, N>(rows, first_row + row, format, depth, block, wide, to, out_stride);       \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        }
    }
}

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
__attribute__((noinline)) static void multiply_few_rows(const Rows& rows, int first_row, int depth, const uint8_t* panel,
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
static void multiply_few_rows(const Rows& rows, int first_row, const Matrix& matrix, const uint8_t* panel, int panels,
                              float* out, int out_stride, const uint8_t* ahead) {
    // One row has registers for more panels, and needs them: each sum waits for its previous product.
    constexpr int MOST = R == 1 ? 4 : LANES == 16 ? 2 : 1;
    const size_t bytes = matrix.panel_bytes();
    int p = 0;
    const auto multiply_some = [&]<int P>() {
        for (; p + P <= panels; p += P)
            multiply_few_rows<F, R, P>(rows, first_row, matrix.depth, panel + p * bytes, bytes, out + p * PANEL, out_stride,
                                       ahead ? ahead + p * bytes : nullptr);
    };
    multiply_some.template operator()<MOST>();
    if constexpr (MOST > 2) multiply_some.template operator()<2>();
    if constexpr (MOST > 1) multiply_some.template operator()<1>();
}

constexpr int FEW_BLOCK_ROWS = 4;

template <Format F>
static void multiply_few_rows(const Rows& rows, int first_row, int count, const Matrix& matrix, const uint8_t* panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    switch (count) {
        case 1: return multiply_few_rows<F, 1>(rows, first_row, matrix, panel, panels, out, out_stride, ahead);
        case 2: return multiply_few_rows<F, 2>(rows, first_row, matrix, panel, panels, out, out_stride, ahead);
        case 3: return multiply_few_rows<F, 3>(rows, first_row, matrix, panel, panels, out, out_stride, ahead);
        default: return multiply_few_rows<F, 4>(rows, first_row, matrix, panel, panels, out, out_stride, ahead);
    }
}

// How often `multiply_blocks` fetches lines for so many panels.
INLINE int block_line_fetches(const Matrix& matrix, int count, int panels) {
    if (count <= FEW_BLOCK_ROWS) return 0;
    int fetches = 0;
    for (int p = 0; p < panels; p += BLOCK_PANELS) {
        const int vectors = std::min(BLOCK_PANELS, panels - p) * VECTORS;
        fetches += matrix.depth / BLOCK_DEPTH * (vectors + vectors / std::min(vectors, BLOCK_VECTORS));
    }
    return fetches;
}

// out [count, panels * 16], as `multiply`. `wide` has room for unpacked blocks of BLOCK_PANELS panels.
static void multiply_blocks(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                            float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
    const size_t bytes = matrix.panel_bytes();
    const uint8_t* panel = matrix.panels + first_panel * bytes;
    const Format format = matrix.format;
    if (count <= FEW_BLOCK_ROWS) {
        const auto multiply = format == Format::Q4_K   ? multiply_few_rows<Format::Q4_K>
                              : format == Format::Q5_K ? multiply_few_rows<Format::Q5_K>
                                                       : multiply_few_rows<Format::Q6_K>;
        return multiply(rows, first_row, count, matrix, panel, panels, out, out_stride, ahead);
    }
    const auto unpack = format == Format::Q4_K   ? unpack_block<Format::Q4_K>
                        : format == Format::Q5_K ? unpack_block<Format::Q5_K>
                                                 : unpack_block<Format::Q6_K>;
    for (int p = 0; p < panels; p += BLOCK_PANELS) {
        // A call takes BLOCK_VECTORS vectors: of two panels at AVX-512, of one or a half elsewhere.
        const int num = std::min(BLOCK_PANELS, panels - p);
        const int vectors = std::min(num * VECTORS, BLOCK_VECTORS), calls = num * VECTORS / vectors;
        const size_t call_bytes = unpacked_block_bytes(vectors);
        for (int b = 0; b < matrix.depth / BLOCK_DEPTH; b++) {
            for (int i = 0; i < num * VECTORS; i++) {
                const size_t place = (p + i / VECTORS) * bytes + b * size_t(block_bytes(format));
                if (ahead && i % VECTORS == 0) prefetch<L2>(ahead + place, block_bytes(format));
                if (matrix.lines) matrix.lines->fetch();
                unpack(panel + place, i % VECTORS, vectors, i % vectors, wide + i / vectors * call_bytes);
            }
            for (int call = 0; call < calls; call++) {
                if (matrix.lines) matrix.lines->fetch();
                float* to = out + p * PANEL + call * vectors * LANES;
                const auto multiply = vectors == BLOCK_VECTORS ? multiply_block_rows<BLOCK_VECTORS> : multiply_block_rows<1>;
                multiply(rows, first_row, count, format, matrix.depth, b, wide + call * call_bytes, to, out_stride);
            }
        }
    }
}
