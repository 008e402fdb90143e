// Vectors of one ISA, and the few instructions that a compiler does not find by itself.
//
// The ISA is chosen when this library is compiled: ISA_AVX512 (with VNNI, and with DOT_BF16 also BF16), ISA_AVX2 (with
// FMA and F16C) or ISA_PORTABLE, which is any CPU that GCC or Clang compile for. Arithmetic is written with the
// compilers' vector extensions; what an ISA adds stands in this file, and tile registers (AMX, with DOT_BF16) in amx.h.
// With EMULATE, the AVX-512 ISA does without its instructions, so that its data paths can be tested on any CPU; with
// EMULATE_TILES only AMX does.
//
// No sum is left to the compiler's discretion (-ffp-contract=off, explicit fma), so a number does not depend on how
// many rows are computed beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(ISA_AVX512)
constexpr int LANES = 16;
#elif defined(ISA_AVX2)
constexpr int LANES = 8;
#elif defined(ISA_PORTABLE)
constexpr int LANES = 4;
#else
#error "compile with -DISA_AVX512, -DISA_AVX2 or -DISA_PORTABLE"
#endif

#if (defined(ISA_AVX512) && !defined(EMULATE)) || defined(ISA_AVX2) || (defined(ISA_PORTABLE) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Before a function's outermost loops over an array of vectors that registers should hold: GCC takes registers for an
// array only if all its indices are constants early, and unrolls inner loops by itself then, but not the outermost. With
// one such loop, each product of bf16 weights stored all sums, and took 1.6 times as long (GCC 12, AVX-512).
#define IN_REGISTERS _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef float f8 __attribute__((vector_size(32)));  // Eight numbers on every ISA: half a panel.
typedef int32_t i8 __attribute__((vector_size(32)));

// What half a panel is computed with if there are comparisons in it: GCC makes scalar code of those between vectors that
// are wider than the CPU's.
#if defined(ISA_PORTABLE)
typedef vf half_panel;
#else
typedef f8 half_panel;
#endif
constexpr int HALF_PANEL = sizeof(half_panel) / 4;

// The same bits as another type of the same size.
template <class To, class From>
INLINE To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Loads and stores need no alignment.
template <class Vector>
INLINE Vector load(const void* from) {
    Vector vector;
    memcpy(&vector, from, sizeof vector);
    return vector;
}

template <class Vector>
INLINE void store(void* to, Vector vector) {
    memcpy(to, &vector, sizeof vector);
}

INLINE vf splat(float value) { return value - vf{}; }
INLINE f8 splat8(float value) { return value - f8{}; }

// a * b + c, rounded once where the CPU has that instruction: at ISA_PORTABLE on aarch64, and on x86 with -mfma, which
// computes the same numbers as aarch64.
INLINE vf fma(vf a, vf b, vf c) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vf>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#elif defined(ISA_AVX2)
    return bits<vf>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#elif defined(ISA_PORTABLE) && defined(__aarch64__)
    return bits<vf>(vfmaq_f32(bits<float32x4_t>(c), bits<float32x4_t>(a), bits<float32x4_t>(b)));
#elif defined(ISA_PORTABLE) && defined(__FMA__)
    return bits<vf>(_mm_fmadd_ps(bits<__m128>(a), bits<__m128>(b), bits<__m128>(c)));
#else
    return a * b + c;
#endif
}

// Whether `fma` rounds once.
#if (defined(ISA_AVX512) && !defined(EMULATE)) || defined(ISA_AVX2) || \
    (defined(ISA_PORTABLE) && (defined(__aarch64__) || defined(__FMA__)))
constexpr bool FUSES = true;
#else
constexpr bool FUSES = false;
#endif

#if defined(ISA_AVX512)
INLINE f8 fma(f8 a, f8 b, f8 c) {
#if defined(EMULATE)
    return a * b + c;
#else
    return bits<f8>(_mm256_fmadd_ps(bits<__m256>(a), bits<__m256>(b), bits<__m256>(c)));
#endif
}
#endif

template <class Vector>
INLINE Vector max(Vector a, Vector b) {
    return a > b ? a : b;
}
// GCC makes a comparison and a selection of it; this instruction is the same, also of NaN and of zeros.
#if defined(ISA_AVX512) && !defined(EMULATE)
INLINE vf max(vf a, vf b) { return bits<vf>(_mm512_max_ps(bits<__m512>(a), bits<__m512>(b))); }
#elif defined(ISA_AVX2)
INLINE vf max(vf a, vf b) { return bits<vf>(_mm256_max_ps(bits<__m256>(a), bits<__m256>(b))); }
#endif

#if defined(ISA_AVX512)
// The lower, or upper, eight numbers of two vectors.
INLINE vf low_halves(vf a, vf b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}
INLINE vf high_halves(vf a, vf b) {
    return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
#endif

// Sum and maximum over lanes, always in the same order: halves are folded onto each other.
#if defined(ISA_AVX2) || (defined(ISA_AVX512) && !defined(EMULATE))
INLINE float sum_of_8(__m256 all) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE float largest_of_8(__m256 all) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

#if defined(ISA_AVX512)
INLINE float sum(vf vector) {
    const __m512 all = bits<__m512>(vector);
    return sum_of_8(_mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
}

INLINE float largest(vf vector) {
    const __m512 all = bits<__m512>(vector);
    return largest_of_8(_mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
}
#else
INLINE float sum(vf vector) { return sum_of_8(bits<__m256>(vector)); }
INLINE float largest(vf vector) { return largest_of_8(bits<__m256>(vector)); }
#endif
#else
template <class Fold>
INLINE float fold(vf vector, Fold fold) {
    float lanes[LANES];
    memcpy(lanes, &vector, sizeof vector);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = fold(lanes[i], lanes[i + width]);
    return lanes[0];
}

INLINE float sum(vf vector) {
    return fold(vector, [](float a, float b) { return a + b; });
}

INLINE float largest(vf vector) {
    return fold(vector, [](float a, float b) { return a > b ? a : b; });
}
#endif

// exp for x <= 88, 0 below -87, NaN of NaN; relative error under 2e-7. The argument is cut into n ln 2 + r with |r| <= ln 2 / 2,
// and exp(r) is the polynomial of Cephes' expf (Moshier, 1989).
template <class Vector, class Integers>
INLINE Vector exp_of(Vector x) {
    const auto constant = [](float value) { return value - Vector{}; };
    constexpr float round = 12582912.0f;  // Adding 1.5 * 2^23 leaves no bits for a fraction.
    const Vector cut = max(constant(-87.0f), x);  // in this order NaN stays
    const Vector n = fma(cut, constant(1.44269504f), constant(round)) - round;
    Vector r = fma(n, constant(-0.693359375f), cut);
    r = fma(n, constant(2.12194440e-4f), r);
    Vector p = fma(r, constant(1.9875691500e-4f), constant(1.3981999507e-3f));
    p = fma(p, r, constant(8.3334519073e-3f));
    p = fma(p, r, constant(4.1665795894e-2f));
    p = fma(p, r, constant(1.6666665459e-1f));
    p = fma(p, r, constant(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
#if defined(ISA_AVX512) && !defined(EMULATE)
    if constexpr (sizeof(Vector) == sizeof(vf)) {  // the same in one instruction
        const __mmask16 is_zero = _mm512_cmp_ps_mask(bits<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
        return bits<Vector>(_mm512_maskz_scalef_ps(_knot_mask16(is_zero), bits<__m512>(p), bits<__m512>(n)));
    }
#endif
    const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
    return x < -87.0f ? Vector{} : p * bits<Vector>(power);
}
INLINE vf exp_of(vf x) { return exp_of<vf, vi>(x); }
#if defined(ISA_AVX512)
INLINE f8 exp_of(f8 x) { return exp_of<f8, i8>(x); }
#endif

// The same for x <= 0 with a third fewer operations, relative error under 2e-7 + 2e-8 |x| where `fma` rounds once: of
// 2^(n + f) with |f| <= 1/2, 2^f is a polynomial that was fitted to the least relative error, and n is added to its
// exponent. For softmax, whose weights are the smaller the larger |x| is. 0 for -INFINITY, NaN for NaN.
INLINE vf exp_of_negative(vf x) {
    constexpr float round = 12582912.0f, log2e = 1.44269504f;  // Adding 1.5 * 2^23 leaves no bits for a fraction.
    const vf cut = max(splat(-87.0f), x);  // in this order NaN stays
    const vf shifted = fma(cut, splat(log2e), splat(round));
    const vf f = fma(cut, splat(log2e), -(shifted - round));
    vf p = fma(f, splat(1.326472731e-3f), splat(9.671512991e-3f));
    p = fma(p, f, splat(5.550733581e-2f));
    p = fma(p, f, splat(2.402224243e-1f));
    p = fma(p, f, splat(6.931470037e-1f));
    p = fma(p, f, splat(1.0f));
    const vi power = bits<vi>(shifted) << 23;  // the lowest bits are those of n
#if defined(ISA_AVX512) && !defined(EMULATE)
    const __mmask16 is_any = _mm512_cmp_ps_mask(bits<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return bits<vf>(_mm512_maskz_add_epi32(is_any, bits<__m512i>(p), bits<__m512i>(power)));
#else
    return x < -87.0f ? vf{} : bits<vf>(bits<vi>(p) + power);
#endif
}

// bfloat16 is the upper half of a float32.
INLINE float from_bf16(uint16_t half) { return bits<float>(uint32_t(half) << 16); }

INLINE uint16_t to_bf16(float value) {  // Rounded to nearest even; NaN does not occur in activations that mean anything.
    const uint32_t word = bits<uint32_t>(value);
    return uint16_t((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
}

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE vf from_bf16(halves values) { return bits<vf>(__builtin_convertvector(values, vu) << 16); }

// The same for LANES numbers; AVX512-BF16 makes zeros of numbers below 2^-126.
INLINE halves to_bf16(vf values) {
#if defined(DOT_BF16) && !defined(EMULATE)
    return bits<halves>(_mm512_cvtneps_pbh(bits<__m512>(values)));
#else
    const vu words = bits<vu>(values);
    return __builtin_convertvector((words + 0x7FFF + ((words >> 16) & 1)) >> 16, halves);
#endif
}

// LANES consecutive float16 numbers.
INLINE vf load_f16(const uint16_t* from) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vf>(_mm512_cvtph_ps(load<__m256i>(from)));
#elif defined(ISA_AVX2)
    return bits<vf>(_mm256_cvtph_ps(load<__m128i>(from)));
#elif defined(ISA_PORTABLE) && defined(__aarch64__)
    return bits<vf>(vcvt_f32_f16(load<float16x4_t>(from)));
#else
    // Exponent and fraction are moved into place and the bias is mended by a product, which also does subnormals.
    // Infinities and NaN don't occur: no format admits them.
    vu word;
    for (int i = 0; i < LANES; i++) word[i] = from[i];
    const vf magnitude = bits<vf>((word & 0x7FFF) << 13) * bits<float>(0x77800000u);
    return bits<vf>(bits<vu>(magnitude) | ((word & 0x8000) << 16));
#endif
}

// LANES unsigned bytes.
INLINE vi load_bytes(const uint8_t* from) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_cvtepu8_epi32(load<__m128i>(from)));
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load<bytes>(from), vi);
#endif
}

// LANES signed bytes. GCC converts vectors of bytes to floats one by one, so that these are converted to integers first.
INLINE vi load_signed_bytes(const int8_t* from) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load<bytes>(from), vi);
#endif
}

// LANES numbers of 16 bits.
INLINE vi load_words(const int16_t* from) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_cvtepi16_epi32(load<__m256i>(from)));
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_cvtepi16_epi32(load<__m128i>(from)));
#else
    typedef int16_t words __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector(load<words>(from), vi);
#endif
}

// 32 numbers that fit into bytes.
INLINE void store_bytes(int8_t* to, const vi (&numbers)[32 / LANES]) {
#if defined(ISA_AVX2)
    const __m256i low = _mm256_packs_epi32(bits<__m256i>(numbers[0]), bits<__m256i>(numbers[1]));
    const __m256i high = _mm256_packs_epi32(bits<__m256i>(numbers[2]), bits<__m256i>(numbers[3]));
    // Packing works within halves of 128 bits; the fours that it leaves are put in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store(to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    for (int i = 0; i < 32 / LANES; i++) store(to + i * LANES, __builtin_convertvector(numbers[i], bytes));
#endif
}

INLINE float one_f16(uint16_t half) {
    const float magnitude = bits<float>(uint32_t(half & 0x7FFF) << 13) * bits<float>(0x77800000u);
    return bits<float>(bits<uint32_t>(magnitude) | uint32_t(half & 0x8000) << 16);
}

// 2 * LANES signed bytes as pairs of 16 bits, a pair in each lane.
INLINE vi sign_extend_bytes(const int8_t* from) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_cvtepi8_epi16(load<__m256i>(from)));
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_cvtepi8_epi16(load<__m128i>(from)));
#elif defined(ISA_PORTABLE) && defined(__aarch64__)
    return bits<vi>(vmovl_s8(load<int8x8_t>(from)));
#else
    typedef int8_t bytes __attribute__((vector_size(2 * LANES)));
    typedef int16_t words __attribute__((vector_size(4 * LANES)));
    return bits<vi>(__builtin_convertvector(load<bytes>(from), words));
#endif
}

// acc + the two products of signed 16-bit numbers in each lane; `finish_words` gives the sums.
#if defined(ISA_PORTABLE) && defined(__aarch64__)
// These instructions widen while they add, but leave the products of a pair in two lanes.
struct word_sums {
    vi low, high;
};
INLINE word_sums dot_words(word_sums acc, vi a, vi b) {
    const int16x8_t x = bits<int16x8_t>(a), y = bits<int16x8_t>(b);
    const int32x4_t low = vmlal_s16(bits<int32x4_t>(acc.low), vget_low_s16(x), vget_low_s16(y));
    return {bits<vi>(low), bits<vi>(vmlal_high_s16(bits<int32x4_t>(acc.high), x, y))};
}
INLINE vi finish_words(word_sums acc) {
    return bits<vi>(vpaddq_s32(bits<int32x4_t>(acc.low), bits<int32x4_t>(acc.high)));
}
#else
typedef vi word_sums;
INLINE word_sums dot_words(word_sums acc, vi a, vi b) {
#if defined(ISA_AVX512) && !defined(EMULATE)
    return bits<vi>(_mm512_dpwssd_epi32(bits<__m512i>(acc), bits<__m512i>(a), bits<__m512i>(b)));
#elif defined(ISA_AVX2)
    __m256i added = _mm256_add_epi32(bits<__m256i>(acc), _mm256_madd_epi16(bits<__m256i>(a), bits<__m256i>(b)));
    asm("" : "+x"(added));  // As in dot_nibbles.
    return bits<vi>(added);
#else
    return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
INLINE vi finish_words(word_sums acc) { return acc; }
#endif

// acc + the products of two bfloat16 pairs in each lane.
#if defined(DOT_BF16)
INLINE vf dot_bf16(vf acc, vu a, vu b) {
#if defined(EMULATE)
    acc += bits<vf>(a & 0xFFFF0000u) * bits<vf>(b & 0xFFFF0000u);
    return acc + bits<vf>(a << 16) * bits<vf>(b << 16);
#else
    return bits<vf>(_mm512_dpbf16_ps(bits<__m512>(acc), bits<__m512bh>(a), bits<__m512bh>(b)));
#endif
}
#endif

// acc + the four products of unsigned bytes of `a` and signed bytes of `b` in each lane.
#if defined(ISA_AVX512)
INLINE vi dot_bytes(vi acc, vu a, vu b) {
#if defined(EMULATE)
    for (int shift = 0; shift < 32; shift += 8)
        acc += bits<vi>((a >> shift) & 0xFF) * (bits<vi>(b << (24 - shift)) >> 24);
    return acc;
#else
    return bits<vi>(_mm512_dpbusd_epi32(bits<__m512i>(acc), bits<__m512i>(a), bits<__m512i>(b)));
#endif
}
#endif

// Whether `dot_nibbles` takes any bytes.
#if defined(ISA_AVX512)
constexpr bool ADDS_BYTES = true;
#else
constexpr bool ADDS_BYTES = false;
#endif

// Whether `dot_nibbles` keeps sums as pairs of 16 bits.
#if defined(ISA_AVX512) || (defined(ISA_PORTABLE) && defined(__ARM_FEATURE_DOTPROD))
constexpr bool SUMS_ARE_PAIRS = false;
#else
constexpr bool SUMS_ARE_PAIRS = true;
#endif

// The same for bytes of `a` that are 15 at most, eight times before `finish_nibbles` gives the sums: on CPUs without an
// instruction for this they are kept as pairs of 16 bits meanwhile, which holds 8 x 2 x 15 x 128. For bytes of 31 these are
// four times, for bytes of 63 two.
INLINE vi dot_nibbles(vi acc, vu a, vu b) {
#if defined(ISA_AVX512)
    return dot_bytes(acc, a, b);
#elif defined(ISA_PORTABLE) && defined(__ARM_FEATURE_DOTPROD)
    return bits<vi>(vdotq_s32(bits<int32x4_t>(acc), bits<int8x16_t>(a), bits<int8x16_t>(b)));
#elif defined(ISA_AVX2)
    const __m256i pairs = _mm256_maddubs_epi16(bits<__m256i>(a), bits<__m256i>(b));
    __m256i added = _mm256_add_epi16(bits<__m256i>(acc), pairs);
    // Else GCC makes a tree of the sums and runs out of registers for its leaves.
    asm("" : "+x"(added));
    return bits<vi>(added);
#else
    typedef int16_t vs __attribute__((vector_size(4 * LANES)));
    const vs codes = bits<vs>(a), values = bits<vs>(b);
    const vs even = (codes & 0xFF) * ((values << 8) >> 8), odd = (codes >> 8) * (values >> 8);
    return bits<vi>(bits<vs>(acc) + even + odd);
#endif
}

INLINE vi finish_nibbles(vi acc) {
#if defined(ISA_AVX512) || (defined(ISA_PORTABLE) && defined(__ARM_FEATURE_DOTPROD))
    return acc;
#elif defined(ISA_AVX2)
    return bits<vi>(_mm256_madd_epi16(bits<__m256i>(acc), _mm256_set1_epi16(1)));
#else
    return ((acc << 16) >> 16) + (acc >> 16);
#endif
}

// total + 2^SHIFT x the sums that `finish_nibbles` gives.
template <int SHIFT>
INLINE vi add_shifted_nibbles(vi total, vi acc) {
#if defined(ISA_AVX2)
    return total + bits<vi>(_mm256_madd_epi16(bits<__m256i>(acc), _mm256_set1_epi16(1 << SHIFT)));
#else
    return total + (finish_nibbles(acc) << SHIFT);
#endif
}
