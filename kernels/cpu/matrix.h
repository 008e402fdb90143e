// Packed matrices of weights, and rows of activations in the forms that matmuls read.
//
// A matrix [columns, depth] (as checkpoints have it: one row an output) is cut into panels of 16 outputs, and a panel
// is laid out in the order in which it is read:
//
//     bf16   [depth / 2][16][2]            a pair of neighbours in depth, for each output
//     q8_0   [depth / 32]{ [16][16][2] codes | [16] scales }
//     q4_0   [depth / 32]{ codes | [16] scales }                     also q5_0
//     q4_1   [depth / 32]{ codes | [16] scales | [16] minimums }     also q5_1
//     q4_k   [depth / 256]{ [8] codes | [8][16] scales | [8][16] minimums | [16] scales of the scales | [16] of the
//            minimums }                                              also q5_k
//     q6_k   [depth / 256]{ [8] codes | [8][16][2] scales | [16] scales of the scales }
//     fp8    [depth / 128]{ [64][16][2] codes, in pairs as in bf16 | [16] float scales }
//
// Codes of 32 numbers of depth are cut into planes: the lower four bits [4][16][4], where byte b of chunk j holds depth
// 8j + b in its lower half and 8j + 4 + b in its upper one; of 5-bit codes the highest bits [16][4], where bit i of byte b
// belongs to depth 4i + b; of 6-bit codes the highest two bits [2][16][4], where bits 2i and 2i + 1 of byte b of chunk j
// belong to depth 16j + 4i + b. So all bytes of a word can be multiplied at once with four neighbours in depth.
//
// Scales and minimums are float16 unless said otherwise, as in the file; those of K-quants within a block are bytes. The products of two scales
// are exact in float32, so a packed matrix has the values of the file.
#pragma once

#include <cstddef>

#include "vec.h"

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int VECTORS = PANEL / LANES;  // of a panel's outputs

enum class Format : int { BF16 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 4, Q5_1 = 5, Q4_K = 6, Q5_K = 7, Q6_K = 8, FP8 = 9 };

// Groups of a block: what one scale in float16 covers.
constexpr int block_groups(Format format) { return format >= Format::Q4_K && format <= Format::Q6_K ? 8 : 1; }

constexpr int code_bits(Format format) {
    switch (format) {
        case Format::Q8_0: return 8;
        case Format::Q5_0: case Format::Q5_1: case Format::Q5_K: return 5;
        case Format::Q6_K: return 6;
        default: return 4;
    }
}

constexpr bool has_minimums(Format format) {
    return format == Format::Q4_1 || format == Format::Q5_1 || format == Format::Q4_K || format == Format::Q5_K;
}

// The code of zero, where a format has no minimums.
constexpr int zero_code(Format format) {
    return format == Format::Q4_0 ? 8 : format == Format::Q5_0 ? 16 : format == Format::Q6_K ? 32 : 0;
}

// Bytes of a panel: the codes of a group, the float16 behind the codes of a block, and a block.
constexpr int code_bytes(Format format) { return code_bits(format) * GROUP * PANEL / 8; }
constexpr int half_bytes(Format format) { return (has_minimums(format) ? 2 : 1) * PANEL * 2; }
constexpr int small_scale_bytes(Format format) { return block_groups(format) > 1 ? 2 * 8 * PANEL : 0; }
constexpr int block_bytes(Format format) {
    return block_groups(format) * code_bytes(format) + small_scale_bytes(format) + half_bytes(format);
}

// Panels of 8-bit floats: numbers of depth that share a scale, bytes of their codes, and of a block.
constexpr int FP8_DEPTH = 128, FP8_CODE_BYTES = FP8_DEPTH * PANEL, FP8_BLOCK_BYTES = FP8_CODE_BYTES + 4 * PANEL;

enum class ActivationForm : int;
struct Lines;

struct Matrix {
    Format format;
    ActivationForm form;    // of the activations that it is multiplied with
    int columns;  // outputs; a multiple of 16
    int depth;
    const uint8_t* panels;
    const float* bias;  // [columns] or null
    Lines* lines;       // what a matmul with this copy of the matrix also fetches; null for others

    size_t panel_bytes() const {
        return format == Format::BF16  ? size_t(depth) * PANEL * 2
               : format == Format::FP8 ? size_t(depth / FP8_DEPTH) * FP8_BLOCK_BYTES
                                       : size_t(depth / GROUP / block_groups(format)) * block_bytes(format);
    }
    bool integer() const { return format != Format::BF16 && format != Format::FP8; }
};

// What a bf16 product reads: the instruction of AVX512-BF16 takes pairs of bfloat16; elsewhere the weights are
// converted to float32 and the activations stay as they are.
#if defined(DOT_BF16)
typedef uint16_t act;
INLINE act to_act(float value) { return to_bf16(value); }
INLINE void store_acts(act* to, vf values) { store(to, to_bf16(values)); }
INLINE vf load_acts(const act* from) { return from_bf16(load<halves>(from)); }
#else
typedef float act;
INLINE act to_act(float value) { return value; }
INLINE void store_acts(act* to, vf values) { store(to, values); }
INLINE vf load_acts(const act* from) { return load<vf>(from); }
#endif

// Forms of activations, by the weights that they are multiplied with:
//
//     PLAIN  [depth] act                                                    for bf16 and fp8
//     BYTES  [depth] int8 codes | [groups] float scale | [groups] int32 sum of codes | [groups] float scale x sum
//            | [groups][2] float bases, ROUND - 32 x sum of each half's codes
//                                                                          for 4 to 6 bits, in groups of 32
//     WORDS  [depth] int16 codes | [groups] float scale                     for q8_0, in groups of 32
//     SPLIT  like BYTES, with codes of 12 bits: [groups]{ [32] int8 codes / 16 | [32] int8 codes % 16 }, rounded down, so
//            that instructions for bytes multiply both halves               for 4 to 6 bits, in groups of 32
//     BLOCKS [depth] int16 codes, in the order 0, 2, 1, 3 of each four | [groups]{ [32] int8 upper bytes | [32] int8 lower
//            bytes } of the same codes, code = 256 x upper + lower | [blocks] float scale | [groups] float scale x sum of
//            codes | [groups][2] int32 -32 x sum of each half's codes       for K-quants, in blocks of 256
//
// So the sum of a half's products with codes of q6_k, in integers, starts with the bits of its base, and ends as the bits of
// ROUND + the sum of products with codes - 32.
//
// Activations should lose less precision than the weights, so int8 is only for throughput: with 4-bit weights it changes
// 3 % of the most likely ids, 12 bits as many as 16.
constexpr float ROUND = 12582912.0f;  // 1.5 x 2^23: a float from half to twice of it is an integer; adding it rounds
enum class ActivationForm : int { PLAIN = 0, BYTES = 1, WORDS = 2, SPLIT = 3, BLOCKS = 4 };

constexpr int SPLIT_GROUP_BYTES = 2 * GROUP;
constexpr int BLOCK_DEPTH = 256;

// Whether K-quants are multiplied with ActivationForm::BLOCKS rather than with ActivationForm::SPLIT, where activations have more than 8 bits.
// AMX and aarch64 have instructions for bytes alone, or faster ones.
#if defined(ISA_PORTABLE) || defined(AMX)
constexpr bool PREFERS_BLOCKS = false;
#else
constexpr bool PREFERS_BLOCKS = true;
#endif

// Largest sum of magnitudes of 64 codes in a row, in ActivationForm::BLOCKS. A code of Q6_K times its scale has a magnitude of 4,096
// at most, one of Q5_K 1,953 and one of Q4_K 945, so sums of 64, 128 and 256 products are less than 2^31.
constexpr int MOST_BLOCK_SUM = 1 << 19;

// Rows of activations; as many as `padded_rows` says are readable.
struct Rows {
    uint8_t* data;
    size_t stride;  // bytes

    act* plain(int row) const { return reinterpret_cast<act*>(data + row * stride); }
    int8_t* codes(int row) const { return reinterpret_cast<int8_t*>(data + row * stride); }
    float* scales(int row, int depth) const { return reinterpret_cast<float*>(data + row * stride + depth); }
    int16_t* words(int row) const { return reinterpret_cast<int16_t*>(data + row * stride); }
    float* word_scales(int row, int depth) const { return scales(row, 2 * depth); }
    int8_t* block_bytes(int row, int depth) const { return codes(row) + 2 * depth; }
    float* block_scales(int row, int depth) const { return scales(row, 4 * depth); }
    float* block_sums(int row, int depth) const { return block_scales(row, depth) + depth / BLOCK_DEPTH; }
    int32_t* block_halves(int row, int depth) const {
        return reinterpret_cast<int32_t*>(block_sums(row, depth) + depth / GROUP);
    }
};

// AMX reads rows sixteen at a time, whatever the last ones of them contain.
INLINE int padded_rows(int rows) {
#if defined(AMX)
    return (rows + 15) / 16 * 16;
#else
    return rows;
#endif
}

// Bytes of a row: whole cache lines.
INLINE size_t row_bytes(ActivationForm form, int width) {
    const size_t groups = width / GROUP;
    const size_t bytes = form == ActivationForm::PLAIN   ? width * sizeof(act)
                         : form == ActivationForm::BYTES ? width + groups * 20
                         : form == ActivationForm::WORDS ? 2 * width + groups * 4
                         : form == ActivationForm::BLOCKS ? 4 * width + width / BLOCK_DEPTH * 4 + groups * 12
                                               : 2 * width + groups * 20;
    return (bytes + 63) / 64 * 64;
}

// The code of depth k of a group, of 4 to 6 bits.
INLINE int code_at(Format format, const uint8_t* codes, int lane, int k) {
    int code = (codes[(k / 8 * PANEL + lane) * 4 + k % 4] >> (k % 8 / 4 * 4)) & 15;
    const uint8_t* above = codes + 4 * PANEL * 4;
    if (code_bits(format) == 5) code |= (above[lane * 4 + k % 4] >> (k / 4) & 1) << 4;
    if (code_bits(format) == 6) code |= (above[(k / 16 * PANEL + lane) * 4 + k % 4] >> (k % 16 / 4 * 2) & 3) << 4;
    return code;
}

// An 8-bit float (e4m3fn: 4 bits of exponent with bias 7, no infinities). NaN does not occur: prepare refuses it.
INLINE float from_fp8(uint8_t code) {
    const float magnitude = bits<float>(uint32_t(code & 0x7F) << 20) * bits<float>(0x7B800000u);  // x 2^120
    return bits<float>(bits<uint32_t>(magnitude) | uint32_t(code & 0x80) << 24);
}

// Column n of a packed matrix, which was row n of the checkpoint's, as float: [depth]. The same operations as ggml's, so
// also the same bits.
static void unpack(const Matrix& matrix, int n, float* out) {
    const uint8_t* panel = matrix.panels + (n / PANEL) * matrix.panel_bytes();
    const int lane = n % PANEL;
    if (matrix.format == Format::BF16) {
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(panel);
        for (int k = 0; k < matrix.depth; k++) out[k] = from_bf16(pairs[(k / 2 * PANEL + lane) * 2 + k % 2]);
        return;
    }
    if (matrix.format == Format::FP8) {
        for (int block = 0; block < matrix.depth / FP8_DEPTH; block++, panel += FP8_BLOCK_BYTES) {
            const float scale = load<float>(panel + FP8_CODE_BYTES + 4 * lane);
            for (int k = 0; k < FP8_DEPTH; k++) *out++ = from_fp8(panel[(k / 2 * PANEL + lane) * 2 + k % 2]) * scale;
        }
        return;
    }
    const Format format = matrix.format;
    const int groups = block_groups(format), small_bytes = small_scale_bytes(format);
    const bool minimums = has_minimums(format);
    for (int block = 0; block < matrix.depth / GROUP / groups; block++, panel += block_bytes(format)) {
        const uint8_t* small = panel + groups * code_bytes(format);
        const uint16_t* factors = reinterpret_cast<const uint16_t*>(small + small_bytes);
        for (int g = 0; g < groups; g++) {
            const uint8_t* codes = panel + g * code_bytes(format);
            float scales[2], minimum = minimums ? one_f16(factors[PANEL + lane]) : 0.0f;
            scales[0] = scales[1] = one_f16(factors[lane]);
            if (format == Format::Q6_K) {
                for (int half = 0; half < 2; half++)
                    scales[half] *= float(int8_t(small[(g * PANEL + lane) * 2 + half]));
            } else if (small_bytes) {
                scales[0] = scales[1] = scales[0] * float(small[g * PANEL + lane]);
                minimum = -(minimum * float(small[(8 + g) * PANEL + lane]));
            }
            for (int k = 0; k < GROUP; k++) {
                const int code = format == Format::Q8_0 ? int8_t(codes[(k / 2 * PANEL + lane) * 2 + k % 2])
                                                        : code_at(format, codes, lane, k) - zero_code(format);
                *out++ = float(code) * scales[k / 16] + minimum;
            }
        }
    }
}

// Of each four numbers the second and the third change places.
INLINE vi swap_middle(vi numbers) {
#if defined(ISA_AVX512)
    return __builtin_shufflevector(numbers, numbers, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#elif defined(ISA_AVX2)
    return __builtin_shufflevector(numbers, numbers, 0, 2, 1, 3, 4, 6, 5, 7);
#else
    return __builtin_shufflevector(numbers, numbers, 0, 2, 1, 3);
#endif
}

// Makes the first scale of a row NaN, and so all products with the row, if one of its numbers is not finite: codes and
// largest magnitudes would lose that. `nothing` is the sum of the numbers, each times 0.
INLINE void keep_nan(vf nothing, float& scale) { scale += sum(nothing); }

// Quantizes a row of floats to ActivationForm::BLOCKS. The largest magnitude of a block becomes the largest code, unless the sum of
// the magnitudes of 64 numbers would be too large. The largest code has an upper byte of 127.
static void quantize_blocks(const float* from, const Rows& to, int row, int depth) {
    typedef int16_t words __attribute__((vector_size(2 * LANES)));
    constexpr float MOST = 32639.0f, MOST_SUM = MOST_BLOCK_SUM - 64;  // rounding adds half of one to each of the 64
    int16_t* codes = to.words(row);
    int8_t* bytes = to.block_bytes(row, depth);
    float *scales = to.block_scales(row, depth), *sums = to.block_sums(row, depth);
    int32_t* halves = to.block_halves(row, depth);
    vf nothing{};
    for (int block = 0; block < depth / BLOCK_DEPTH; block++, from += BLOCK_DEPTH) {
        vf tops{};
        float most_sum = 0;
        for (int part = 0; part < BLOCK_DEPTH; part += 64) {
            vf totals[16 / LANES] = {};  // the same sums at every ISA
            for (int i = 0; i < 64; i += LANES) {
                const vf value = load<vf>(from + part + i), magnitude = max(value, -value);
                nothing = fma(value, vf{}, nothing);
                tops = max(tops, magnitude), totals[i / LANES % (16 / LANES)] += magnitude;
            }
            for (int half = 8 / LANES; half; half /= 2)
                for (int i = 0; i < half; i++) totals[i] += totals[i + half];
            most_sum = max(most_sum, sum(totals[0]));
        }
        const float top = largest(tops), steps = max(top / MOST, most_sum / MOST_SUM);
        const float inverse = top > 1e-30f ? 1.0f / steps : 0.0f;
        scales[block] = steps;
        for (int g = 0; g < BLOCK_DEPTH / GROUP; g++, codes += GROUP, bytes += SPLIT_GROUP_BYTES, halves += 2) {
            vi upper[GROUP / LANES], lower[GROUP / LANES], total{}, half{};
            for (int i = 0; i < GROUP / LANES; i++) {
                const vf scaled = load<vf>(from + g * GROUP + i * LANES) * inverse;
                const vi number = bits<vi>(scaled + ROUND) - bits<int32_t>(ROUND);
                total += number;
                if (i == GROUP / LANES / 2 - 1) half = total;
                upper[i] = (number + 128) >> 8, lower[i] = number - (upper[i] << 8);
                store(codes + i * LANES, __builtin_convertvector(swap_middle(number), words));
            }
            store_bytes(bytes, upper), store_bytes(bytes + GROUP, lower);
            // Exact in floats: less than 2^20.
            const float count = sum(__builtin_convertvector(total, vf)), first = sum(__builtin_convertvector(half, vf));
            *sums++ = steps * count;
            halves[0] = -32 * int32_t(first), halves[1] = -32 * int32_t(count - first);
        }
    }
    keep_nan(nothing, *to.block_scales(row, depth));
}

// Quantizes a row of floats: the largest magnitude of a group becomes the largest code. Groups that are nearly zero
// become zero.
static void quantize(const float* from, const Rows& to, int row, int depth, ActivationForm form) {
    if (form == ActivationForm::BLOCKS) return quantize_blocks(from, to, row, depth);
    const int groups = depth / GROUP;
    const bool is_bytes = form == ActivationForm::BYTES;
    const float most = is_bytes ? 127.0f : form == ActivationForm::SPLIT ? 2047.0f : 32767.0f;
    float* scales = is_bytes ? to.scales(row, depth) : to.word_scales(row, depth);
    vf nothing{};
    for (int g = 0; g < groups; g++, from += GROUP) {
        vf values[GROUP / LANES], tops{};
        for (int i = 0; i < GROUP / LANES; i++) {
            values[i] = load<vf>(from + i * LANES);
            nothing = fma(values[i], vf{}, nothing);
            tops = max(tops, max(values[i], -values[i]));
        }
        const float top = largest(tops), inverse = top > 1e-30f ? most / top : 0.0f;
        vi numbers[GROUP / LANES], total{}, half{};
        for (int i = 0; i < GROUP / LANES; i++) {
            numbers[i] = bits<vi>(values[i] * inverse + ROUND) - bits<int32_t>(ROUND);
            total += numbers[i];
            if (i == GROUP / LANES / 2 - 1) half = total;
        }
        const float scale = top / most;
        scales[g] = scale;
        if (is_bytes) {
            store_bytes(to.codes(row) + g * GROUP, numbers);
        } else if (form == ActivationForm::SPLIT) {
            vi high[GROUP / LANES], low[GROUP / LANES];
            for (int i = 0; i < GROUP / LANES; i++) high[i] = numbers[i] >> 4, low[i] = numbers[i] & 15;
            store_bytes(to.codes(row) + g * SPLIT_GROUP_BYTES, high);
            store_bytes(to.codes(row) + g * SPLIT_GROUP_BYTES + GROUP, low);
        } else {
            typedef int16_t words __attribute__((vector_size(2 * LANES)));
            int16_t* codes = to.words(row) + g * GROUP;
            for (int i = 0; i < GROUP / LANES; i++) store(codes + i * LANES, __builtin_convertvector(numbers[i], words));
            continue;
        }
        // Sums are exact in floats: at most 2^20, also 32 times that of a half.
        const float count = sum(__builtin_convertvector(total, vf)), first = sum(__builtin_convertvector(half, vf));
        scales[groups + g] = bits<float>(int32_t(count));
        scales[2 * groups + g] = scale * count;
        float* bases = scales + 3 * groups + 2 * g;
        bases[0] = ROUND - 32 * first, bases[1] = ROUND - 32 * (count - first);
    }
    keep_nan(nothing, *scales);
}
