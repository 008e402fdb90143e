// The matmul of gemm.h with 8-bit floats (e4m3). They are widened to bfloat16, which is exact: for few rows in registers;
// for more, a block of panels, 128 deep, is widened into memory that stays in the L1 cache, and the matmul for bf16
// multiplies it. The block's scales multiply the sums.
//
// Sums of a block are one accumulator in the order of depth, and so are the scaled sums of blocks, for any number of rows.
#pragma once

#include "gemm.h"

constexpr int FP8_PANELS = 4;  // widened at once; as many as one row multiplies at once
constexpr int FP8_WIDE_BYTES = 2 * FP8_CODE_BYTES;

// --- widening ---------------------------------------------------------------------------------------------------------
//
//     e4m3   s eeee mmm              bf16   s eeeeeeee mmm 0000
//
// Exponents are moved and get the other bias. Codes without exponent, m x 2^-9, are normal numbers in bfloat16 and come
// from a table.

constexpr uint16_t FP8_SMALL[8] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};

// AVX2 widens few rows by the instruction for float16, whose bias makes numbers 2^-8 times as large. All of its numbers of
// rows compute with those, and scales get the factor.
#if defined(ISA_AVX2)
constexpr int FP8_SHIFT = 8;
#else
constexpr int FP8_SHIFT = 0;
#endif
constexpr float FP8_UNIT = 1 << FP8_SHIFT;
constexpr int FP8_BIAS = (127 - 7 - FP8_SHIFT) << 7, FP8_MAGNITUDE = 0x7F << 4;

// `from` has a pair of neighbours in depth for each of LANES outputs; the pairs become bfloat16.
#if defined(ISA_AVX512) && !defined(EMULATE)
#define WIDENS_SEVERAL

// Shifts and shuffles have few ports, so the sign is extended, and a product moves the rest.
template <int N>
INLINE void widen_pairs(const uint8_t* const (&from)[N], vu (&to)[N]) {
    __m512i codes[N], values[N];
    __mmask32 is_small[N], any = 0;
    for (int n = 0; n < N; n++) {
        codes[n] = _mm512_cvtepi8_epi16(load<__m256i>(from[n]));
        values[n] = _mm512_mullo_epi16(codes[n], _mm512_set1_epi16(16));
        values[n] = _mm512_and_si512(values[n], _mm512_set1_epi16(FP8_MAGNITUDE));
        values[n] = _mm512_add_epi16(values[n], _mm512_set1_epi16(FP8_BIAS));
        is_small[n] = _mm512_testn_epi16_mask(codes[n], _mm512_set1_epi16(0x78));
        any = _kor_mask32(any, is_small[n]);
    }
    if (__builtin_expect(!_kortestz_mask32_u8(any, any), 0)) {
        // The lowest five bits of a code without exponent are its index.
        const __m512i small = _mm512_zextsi128_si512(load<__m128i>(FP8_SMALL));
        for (int n = 0; n < N; n++)
            values[n] = _mm512_mask_permutexvar_epi16(values[n], is_small[n], codes[n], small);
    }
    for (int n = 0; n < N; n++)  // a | (b & c)
        to[n] = bits<vu>(_mm512_ternarylogic_epi32(values[n], codes[n], _mm512_set1_epi16(short(0x8000)), 0xF8));
}

#elif defined(ISA_AVX2)

// The lower bytes of the table, and the upper ones, times 2^-8.
alignas(16) constexpr uint8_t FP8_SMALL_BYTES[16] = {0, 0, 0x80, 0xC0, 0, 0x20, 0x40, 0x60,
                                                     0, 0x37, 0x37, 0x37, 0x38, 0x38, 0x38, 0x38};

// The two neighbours of eight outputs as floats. e4m3 is the upper half of a float16 but for a bit of exponent.
INLINE void widen_to_floats(const uint8_t* from, vf (&to)[2]) {
    const __m128i pairs = load<__m128i>(from), mask = _mm_set1_epi16(short(0xBF80));
    const __m128i first = _mm_and_si128(_mm_srai_epi16(_mm_slli_epi16(pairs, 8), 1), mask);
    const __m128i second = _mm_and_si128(_mm_srai_epi16(pairs, 1), mask);
    to[0] = bits<vf>(_mm256_cvtph_ps(first)), to[1] = bits<vf>(_mm256_cvtph_ps(second));
}

INLINE vu widen_pairs(const uint8_t* from) {
    const __m256i codes = _mm256_cvtepi8_epi16(load<__m128i>(from));
    __m256i values = _mm256_and_si256(_mm256_slli_epi16(codes, 4), _mm256_set1_epi16(FP8_MAGNITUDE));
    values = _mm256_add_epi16(values, _mm256_set1_epi16(FP8_BIAS));
    const __m256i exponents = _mm256_and_si256(codes, _mm256_set1_epi16(0x78));
    const __m256i is_small = _mm256_cmpeq_epi16(exponents, _mm256_setzero_si256());
    if (!_mm256_testz_si256(is_small, is_small)) {  // rare
        const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi16(7));
        const __m256i both = _mm256_or_si256(_mm256_or_si256(index, _mm256_slli_epi16(index, 8)),
                                             _mm256_set1_epi16(0x0800));
        const __m256i small = _mm256_broadcastsi128_si256(load<__m128i>(FP8_SMALL_BYTES));
        values = _mm256_blendv_epi8(values, _mm256_shuffle_epi8(small, both), is_small);
    }
    const __m256i signs = _mm256_and_si256(codes, _mm256_set1_epi16(short(0x8000)));
    return bits<vu>(_mm256_or_si256(values, signs));
}

#else

INLINE vu widen_pairs(const uint8_t* from) {
    typedef uint8_t bytes __attribute__((vector_size(2 * LANES)));
    typedef uint16_t words __attribute__((vector_size(4 * LANES)));
    const words codes = __builtin_convertvector(load<bytes>(from), words), index = codes & 7;
    const words values = ((codes << 4) & FP8_MAGNITUDE) + FP8_BIAS;
    // The table as arithmetic: m is below 2, 2 or 3, or above.
    const words above = index >= 4 ? 0x3C00 + ((index - 4) << 5) : 0x3B80 + ((index - 2) << 6);
    const words small = index >= 2 ? above : index * 0x3B00;
    return bits<vu>(((codes & 0x78) == 0 ? small : values) | ((codes << 8) & 0x8000));
}

#endif

// The same for several vectors.
#if !defined(WIDENS_SEVERAL)
template <int N>
INLINE void widen_pairs(const uint8_t* const (&from)[N], vu (&to)[N]) {
    for (int n = 0; n < N; n++) to[n] = widen_pairs(from[n]);
}
#endif

static void widen_fp8(const uint8_t* from, uint16_t* to) {
    for (int i = 0; i < FP8_CODE_BYTES; i += 4 * LANES) {
        const uint8_t* const places[2] = {from + i, from + i + 2 * LANES};
        vu values[2];
        widen_pairs(places, values);
        for (int n = 0; n < 2; n++) store(to + i + n * 2 * LANES, values[n]);
    }
}

// --- few rows ---------------------------------------------------------------------------------------------------------

#if defined(EMULATE)
constexpr int FP8_DIRECT_ROWS = 1;
#else
constexpr int FP8_DIRECT_ROWS = LANES == 16 ? 4 : 2;  // that fit into registers beside the weights of FP8_PANELS panels
#endif

// out [R, P * 16] = R rows times P panels, widened in registers. The products and sums are those of `add_fp8_block`.
template <int R, int P>
__attribute__((noinline)) static void multiply_fp8_rows(const Rows& rows, int first_row, const uint8_t* panel, size_t bytes,
                                                        int depth, float* out, int out_stride, const uint8_t* ahead) {
    const act* plain[R];
    for (int r = 0; r < R; r++) plain[r] = rows.plain(first_row + r);
    vf total[R][P][VECTORS] = {};
    for (int k = 0; k < depth; k += FP8_DEPTH, panel += FP8_BLOCK_BYTES) {
        vf acc[R][P][VECTORS] = {};
        for (int pair = 0; pair < FP8_DEPTH / 2; pair++) {
            if (ahead && pair % 8 == 0)
                for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * bytes + pair * 2 * PANEL, 4 * LINE);
            const uint8_t* places[P * VECTORS];
            for (int i = 0; i < P * VECTORS; i++)
                places[i] = panel + i / VECTORS * bytes + pair * 2 * PANEL + i % VECTORS * 2 * LANES;
#if defined(ISA_AVX2)
            vf weights[P * VECTORS][2];
            for (int i = 0; i < P * VECTORS; i++) widen_to_floats(places[i], weights[i]);
#else
            vu weights[P * VECTORS];
            widen_pairs(places, weights);
#endif
#if defined(DOT_BF16)
            for (int r = 0; r < R; r++) {
                const vu numbers = load<uint32_t>(plain[r] + k + 2 * pair) - vu{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_bf16(acc[r][p][v], weights[p * VECTORS + v], numbers);
            }
#else
            for (int half = 0; half < 2; half++)
                for (int r = 0; r < R; r++) {
                    const vf value = splat(plain[r][k + 2 * pair + half]);
                    for (int p = 0; p < P; p++)
                        for (int v = 0; v < VECTORS; v++) {
#if defined(ISA_AVX2)
                            const vf weight = weights[p * VECTORS + v][half];
#else
                            const vu both = weights[p * VECTORS + v];
                            const vf weight = bits<vf>(half ? both & 0xFFFF0000u : both << 16);
#endif
                            acc[r][p][v] = fma(value, weight, acc[r][p][v]);
                        }
                }
#endif
        }
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const vf scale = load<vf>(panel + p * bytes + FP8_CODE_BYTES + v * 4 * LANES) * FP8_UNIT;
                for (int r = 0; r < R; r++) total[r][p][v] = fma(acc[r][p][v], scale, total[r][p][v]);
            }
        if (ahead) {
            for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * bytes + FP8_CODE_BYTES, LINE);
            ahead += FP8_BLOCK_BYTES;
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) store(out + r * out_stride + p * PANEL + v * LANES, total[r][p][v]);
}

template <int R>
static void multiply_fp8_panels(const Rows& rows, int first_row, const Matrix& matrix, int first_panel, int panels,
                                float* out, int out_stride, const uint8_t* ahead) {
    constexpr int AT_ONCE = LANES == 16 ? (R == 1 ? 4 : 2) : R == 1 && LANES == 8 ? 2 : 1;
    const size_t bytes = matrix.panel_bytes();
    int p = 0;
    const auto multiply_some = [&]<int P>() {
        for (; p + P <= panels; p += P)
            multiply_fp8_rows<R, P>(rows, first_row, matrix.panels + (first_panel + p) * bytes, bytes, matrix.depth,
                                    out + p * PANEL, out_stride, ahead ? ahead + p * bytes : nullptr);
    };
    multiply_some.template operator()<AT_ONCE>();
    if constexpr (AT_ONCE > 2) multiply_some.template operator()<2>();
    if constexpr (AT_ONCE > 1) multiply_some.template operator()<1>();
}

// --- several rows -----------------------------------------------------------------------------------------------------

// Widens blocks of `panels` panels and calls multiply(panel, num, block, widened, codes) for each block of up to
// FP8_PANELS of them: `widened` has FP8_WIDE_BYTES for each, and `codes` where they come from.
template <class Multiply>
INLINE void for_fp8_blocks(const Matrix& matrix, int first_panel, int panels, const uint8_t* ahead, uint8_t* wide,
                           const Multiply& multiply) {
    const size_t bytes = matrix.panel_bytes();
    uint16_t* widened = reinterpret_cast<uint16_t*>(wide);
    for (int panel = 0; panel < panels; panel += FP8_PANELS) {
        const int num = panels - panel < FP8_PANELS ? panels - panel : FP8_PANELS;
        for (int block = 0; block < matrix.depth / FP8_DEPTH; block++) {
            const uint8_t* codes[FP8_PANELS];
            for (int p = 0; p < num; p++) {
                const size_t place = (panel + p) * bytes + size_t(block) * FP8_BLOCK_BYTES;
                codes[p] = matrix.panels + first_panel * bytes + place;
                if (ahead) prefetch<L2>(ahead + place, FP8_BLOCK_BYTES);
                widen_fp8(codes[p], widened + p * FP8_CODE_BYTES);
            }
            multiply(panel, num, block, widened, codes);
        }
    }
}

#if defined(EMULATE)
constexpr int FP8_ROWS = 2;  // more take long to compile
#else
constexpr int FP8_ROWS = MOST_ROWS < 8 ? MOST_ROWS : 8;
#endif

// out [R, P * 16] += R rows, from `depth` on, times P widened blocks with their scales; without the sum if `is_first`.
template <int R, int P>
__attribute__((noinline)) static void add_fp8_block(const Rows& rows, int first_row, int depth, const uint16_t* widened,
                                                    const uint8_t* const* codes, float* out, int out_stride,
                                                    bool is_first) {
    const act* plain[R];
    const uint32_t* panels[P];
    for (int r = 0; r < R; r++) plain[r] = rows.plain(first_row + r) + depth;
    for (int p = 0; p < P; p++) panels[p] = reinterpret_cast<const uint32_t*>(widened + p * FP8_CODE_BYTES);
    vf acc[R][P][VECTORS] = {};
    multiply_bf16<R, P>(plain, panels, FP8_DEPTH / 2, acc, nullptr);
    for (int p = 0; p < P; p++)
        for (int v = 0; v < VECTORS; v++) {
            const vf scale = load<vf>(codes[p] + FP8_CODE_BYTES + v * 4 * LANES) * FP8_UNIT;
            for (int r = 0; r < R; r++) {
                float* to = out + r * out_stride + p * PANEL + v * LANES;
                store(to, fma(acc[r][p][v], scale, is_first ? vf{} : load<vf>(to)));
            }
        }
}

// out [R, num * 16] += R rows times `num` widened blocks, as `multiply_rows` divides them.
template <int R>
static void add_fp8_rows(const Rows& rows, int first_row, int depth, const uint16_t* widened, const uint8_t* const* codes,
                         int num, float* out, int out_stride) {
    constexpr int AT_ONCE = R == 1 ? FP8_PANELS : R == 2 || LANES == 16 ? 2 : 1;
    int p = 0;
    const auto add_some = [&]<int P>() {
        for (; p + P <= num; p += P)
            add_fp8_block<R, P>(rows, first_row, depth, widened + p * FP8_CODE_BYTES, codes + p, out + p * PANEL,
                                out_stride, depth == 0);
    };
    add_some.template operator()<AT_ONCE>();
    if constexpr (AT_ONCE > 2) add_some.template operator()<2>();
    if constexpr (AT_ONCE > 1) add_some.template operator()<1>();
}

// out [count, panels * 16], as `multiply`. `wide` has room for FP8_PANELS widened blocks.
[[maybe_unused]] static void multiply_fp8(const Rows& rows, int first_row, int count, const Matrix& matrix,
                                          int first_panel, int panels, float* out, int out_stride, const uint8_t* ahead,
                                          uint8_t* wide) {
    const auto direct = [&]<int R>() {
        multiply_fp8_panels<R>(rows, first_row, matrix, first_panel, panels, out, out_stride, ahead);
    };
    if (count == 1) return direct.template operator()<1>();
    if constexpr (FP8_DIRECT_ROWS >= 2)
        if (count == 2) return direct.template operator()<2>();
    if constexpr (FP8_DIRECT_ROWS >= 4) {
        if (count == 3) return direct.template operator()<3>();
        if (count == 4) return direct.template operator()<4>();
    }
    const int parts = (count + FP8_ROWS - 1) / FP8_ROWS, most = (count + parts - 1) / parts;
    for_fp8_blocks(matrix, first_panel, panels, ahead, wide, [&](int panel, int num, int block, const uint16_t* widened,
                                                                const uint8_t* const* codes) {
        for (int row = 0; row < count; row += most) {
            float* to = out + row * out_stride + panel * PANEL;
            switch (row + most < count ? most : count - row) {
#define CASE(R)                                                                                                       \
    case R:                                                                                                           \
        if constexpr (R <= FP8_ROWS)                                                                                  \
            add_fp8_rows<R>(rows, first_row + row, block * FP8_DEPTH, widened, codes, num, to, out_stride);           \
        break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
            }
        }
    });
}
