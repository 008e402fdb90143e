// Packed matrices of weights, and rows of activations in the forms that matmuls read.
//
// A matrix [columns, depth] (as checkpoints have it: one row an output) is cut into panels of 16 outputs, and a panel
// is laid out in the order in which it is read:
//
//     bf16   [depth / 2][16][2]            a pair of neighbours in depth, for each output
//     q8_0   [depth / 32]{ [16][16][2] codes | [16] scales }
//     q4_0   [depth / 32]{ [4][16][4] codes, two in a byte | [16] scales }
//     q4_1   [depth / 32]{ [4][16][4] codes, two in a byte | [16] scales | [16] minimums }
//
// In the 4-bit formats byte b of chunk j holds depth 8j + b in its lower half and 8j + 4 + b in its upper one. Scales
// and minimums are float16, as in the file.
#pragma once

#include <cstddef>

#include "vec.h"

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int VECTORS = PANEL / LANES;  // of a panel's outputs

enum class Format : int { BF16 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3 };

// Bytes of a group of a panel.
constexpr int group_bytes(Format format) {
    return format == Format::Q8_0 ? 512 + 32 : format == Format::Q4_0 ? 256 + 32 : 256 + 64;
}

enum class Form : int;

struct Matrix {
    Format format;
    Form form;    // of the activations that it is multiplied with
    int columns;  // outputs; a multiple of 16
    int depth;
    const uint8_t* panels;
    const float* bias;  // [columns] or null

    size_t panel_bytes() const {
        return format == Format::BF16 ? size_t(depth) * PANEL * 2 : size_t(depth / GROUP) * group_bytes(format);
    }
    bool integer() const { return format != Format::BF16; }
};

// What a bf16 product reads: the instruction of AVX512-BF16 takes pairs of bfloat16; elsewhere the weights are
// converted to float32 and the activations stay as they are.
#if defined(DOT_BF16)
typedef uint16_t act;
INLINE act to_act(float value) { return to_bf16(value); }
INLINE void store_acts(act* to, vf values) { store(to, to_bf16(values)); }
#else
typedef float act;
INLINE act to_act(float value) { return value; }
INLINE void store_acts(act* to, vf values) { store(to, values); }
#endif

// Forms of activations, by the weights that they are multiplied with:
//
//     PLAIN  [depth] act                                                    for bf16
//     BYTES  [depth] int8 codes | [groups] float scale | [groups] int32 sum of codes | [groups] float scale x sum
//                                                                           for 4-bit weights, in groups of 32
//     WORDS  [depth] int16 codes | [groups] float scale                     for q8_0, in groups of 32
//     SPLIT  like BYTES, with codes of 12 bits: [groups]{ [32] int8 codes / 16 | [32] int8 codes % 16 }, rounded down, so
//            that instructions for bytes multiply both halves               for 4-bit weights, in groups of 32
//
// Activations should lose less precision than the weights, so int8 is only for throughput: with 4-bit weights it changes
// 3 % of the most likely ids, 12 bits as many as 16.
enum class Form : int { PLAIN = 0, BYTES = 1, WORDS = 2, SPLIT = 3 };

constexpr int SPLIT_GROUP_BYTES = 2 * GROUP;

// Rows of activations; as many as `padded_rows` says are readable.
struct Rows {
    uint8_t* data;
    size_t stride;  // bytes

    act* plain(int row) const { return reinterpret_cast<act*>(data + row * stride); }
    int8_t* codes(int row) const { return reinterpret_cast<int8_t*>(data + row * stride); }
    float* scales(int row, int depth) const { return reinterpret_cast<float*>(data + row * stride + depth); }
    int16_t* words(int row) const { return reinterpret_cast<int16_t*>(data + row * stride); }
    float* word_scales(int row, int depth) const { return scales(row, 2 * depth); }
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
INLINE size_t row_bytes(Form form, int width) {
    const size_t groups = width / GROUP;
    const size_t bytes = form == Form::PLAIN   ? width * sizeof(act)
                         : form == Form::BYTES ? width + groups * 12
                         : form == Form::WORDS ? 2 * width + groups * 4
                                               : 2 * width + groups * 12;
    return (bytes + 63) / 64 * 64;
}

// Column n of a packed matrix, which was row n of the checkpoint's, as float: [depth].
static void unpack(const Matrix& matrix, int n, float* out) {
    const uint8_t* panel = matrix.panels + (n / PANEL) * matrix.panel_bytes();
    const int lane = n % PANEL;
    if (matrix.format == Format::BF16) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel);
        for (int k = 0; k < matrix.depth; k++) out[k] = from_bf16(halves[(k / 2 * PANEL + lane) * 2 + k % 2]);
        return;
    }
    const bool bytes = matrix.format == Format::Q8_0, minimums = matrix.format == Format::Q4_1;
    for (int g = 0; g < matrix.depth / GROUP; g++) {
        const uint16_t* factors = reinterpret_cast<const uint16_t*>(panel + (bytes ? 512 : 256));
        const float scale = one_f16(factors[lane]), minimum = minimums ? one_f16(factors[PANEL + lane]) : 0.0f;
        for (int k = 0; k < GROUP; k++) {
            int code;
            if (bytes)
                code = int8_t(panel[(k / 2 * PANEL + lane) * 2 + k % 2]);
            else
                code = (panel[(k / 8 * PANEL + lane) * 4 + k % 4] >> (k % 8 / 4 * 4) & 15) - (minimums ? 0 : 8);
            out[g * GROUP + k] = float(code) * scale + minimum;
        }
        panel += group_bytes(matrix.format);
    }
}

// Quantizes a row of floats: the largest magnitude of a group becomes the largest code. Groups that are nearly zero
// become zero.
static void quantize(const float* from, const Rows& to, int row, int depth, Form form) {
    const int groups = depth / GROUP;
    const bool is_bytes = form == Form::BYTES;
    const float most = is_bytes ? 127.0f : form == Form::SPLIT ? 2047.0f : 32767.0f;
    float* scales = is_bytes ? to.scales(row, depth) : to.word_scales(row, depth);
    for (int g = 0; g < groups; g++, from += GROUP) {
        vf values[GROUP / LANES], tops{};
        for (int i = 0; i < GROUP / LANES; i++) {
            values[i] = load<vf>(from + i * LANES);
            tops = max(tops, max(values[i], -values[i]));
        }
        const float top = largest(tops), inverse = top > 1e-30f ? most / top : 0.0f;
        constexpr float round = 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
        vi numbers[GROUP / LANES], total{};
        for (int i = 0; i < GROUP / LANES; i++) {
            numbers[i] = bits<vi>(values[i] * inverse + round) - bits<int32_t>(round);
            total += numbers[i];
        }
        const float scale = top / most;
        scales[g] = scale;
        if (is_bytes) {
            store_bytes(to.codes(row) + g * GROUP, numbers);
        } else if (form == Form::SPLIT) {
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
        // The sum is exact in floats: at most 2^20.
        const float count = sum(__builtin_convertvector(total, vf));
        scales[groups + g] = bits<float>(int32_t(count));
        scales[2 * groups + g] = scale * count;
    }
}
