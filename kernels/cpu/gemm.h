// Rows of activations times a packed matrix: the matmul for weights, keys and values.
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
//
// An output is one accumulator that adds its products in the order of depth, so a row has the same bits in any batch.
#pragma once

#include <cstddef>

#include "vec.h"

constexpr int PANEL = 16;
constexpr int GROUP = 32;
constexpr int VECTORS = PANEL / LANES;  // of a panel's outputs

enum class Format : int { BF16 = 0, Q8_0 = 1, Q4_0 = 2, Q4_1 = 3 };

enum class Form : int;

struct Matrix {
    Format format;
    Form form;    // of the activations that it is multiplied with
    int columns;  // outputs; a multiple of 16
    int depth;
    const uint8_t* panels;
    const float* bias;  // [columns] or null

    size_t panel_bytes() const {
        const size_t groups = depth / GROUP;
        switch (format) {
            case Format::BF16: return size_t(depth) * PANEL * 2;
            case Format::Q8_0: return groups * (512 + 32);
            case Format::Q4_0: return groups * (256 + 32);
            case Format::Q4_1: return groups * (256 + 64);
        }
        return 0;
    }
    bool integer() const { return format != Format::BF16; }
};

// What a bf16 product reads: the instruction of AVX512-BF16 takes pairs of bfloat16; elsewhere the weights are
// converted to float32 and the activations stay as they are.
#if defined(DOT_BF16)
typedef uint16_t act;
INLINE act to_act(float value) { return to_bf16(value); }
INLINE void store_acts(act* to, vf values) {
    const vu words = bits<vu>(values);
    typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
    store(to, __builtin_convertvector((words + 0x7FFF + ((words >> 16) & 1)) >> 16, halves));
}
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
//     PAIRS  like BYTES, with int16 codes, each eight in the order 0 2 4 6 1 3 5 7: the pairs of depth that one shift
//            and mask of 4-bit codes leaves in a lane                       for 4-bit weights, in groups of 32
//
// Activations should lose less precision than the weights, so int8 is only for throughput: with 4-bit weights it changes
// 3 % of the most likely ids, int16 none.
enum class Form : int { PLAIN = 0, BYTES = 1, WORDS = 2, PAIRS = 3 };

struct Rows {
    uint8_t* data;
    size_t stride;  // bytes

    act* plain(int row) const { return reinterpret_cast<act*>(data + row * stride); }
    int8_t* codes(int row) const { return reinterpret_cast<int8_t*>(data + row * stride); }
    float* scales(int row, int depth) const { return reinterpret_cast<float*>(data + row * stride + depth); }
    int16_t* words(int row) const { return reinterpret_cast<int16_t*>(data + row * stride); }
    float* word_scales(int row, int depth) const { return scales(row, 2 * depth); }
};

// Bytes of a row: whole cache lines.
INLINE size_t row_bytes(Form form, int width) {
    const size_t groups = width / GROUP;
    const size_t bytes = form == Form::PLAIN   ? width * sizeof(act)
                         : form == Form::BYTES ? width + groups * 12
                         : form == Form::WORDS ? 2 * width + groups * 4
                                               : 2 * width + groups * 12;
    return (bytes + 63) / 64 * 64;
}

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

struct Group4 {  // q4_0
    static constexpr int BYTES = 256 + 32, OFFSET = 8;
    static constexpr bool MINIMUM = false;
};
struct Group4Min {  // q4_1
    static constexpr int BYTES = 256 + 64, OFFSET = 0;
    static constexpr bool MINIMUM = true;
};
constexpr int GROUP_8_BYTES = 512 + 32;  // q8_0

// The dot products of one group, for R rows and P panels, as int32: exact on every ISA.
template <int R, int P>
INLINE void dot_group4(const int8_t* const (&codes)[R], const uint8_t* panel, size_t panel_bytes,
                       vi (&dots)[R][P][VECTORS]) {
    vi acc[R][P][VECTORS] = {};
    for (int j = 0; j < 4; j++) {
        for (int half = 0; half < 2; half++) {
            vu weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const vu word = load<vu>(panel + p * panel_bytes + j * 64 + v * 4 * LANES);
                    weights[p][v] = (half ? word >> 4 : word) & 0x0F0F0F0Fu;
                }
            for (int r = 0; r < R; r++) {
                const vu four = load<uint32_t>(codes[r] + 8 * j + 4 * half) - vu{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_nibbles(acc[r][p][v], weights[p][v], four);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) dots[r][p][v] = finish_nibbles(acc[r][p][v]);
}

// The same for activations of 16 bits.
template <int R, int P>
INLINE void dot_group4(const int16_t* const (&codes)[R], const uint8_t* panel, size_t panel_bytes,
                       vi (&dots)[R][P][VECTORS]) {
    word_sums acc[R][P][VECTORS] = {};
    for (int j = 0; j < 4; j++)
        for (int quarter = 0; quarter < 4; quarter++) {
            vi weights[P][VECTORS];
            for (int p = 0; p < P; p++)
                for (int v = 0; v < VECTORS; v++) {
                    const vu word = load<vu>(panel + p * panel_bytes + j * 64 + v * 4 * LANES);
                    weights[p][v] = bits<vi>((word >> (4 * quarter)) & 0x000F000Fu);
                }
            for (int r = 0; r < R; r++) {
                const vi pair = load<int32_t>(codes[r] + 8 * j + 2 * quarter) - vi{};
                for (int p = 0; p < P; p++)
                    for (int v = 0; v < VECTORS; v++) acc[r][p][v] = dot_words(acc[r][p][v], weights[p][v], pair);
            }
        }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) dots[r][p][v] = finish_words(acc[r][p][v]);
}

// `Code` is int8_t for activations as BYTES, int16_t for PAIRS.
template <class G, class Code, int R, int P>
INLINE void multiply_4(const Rows& rows, int first_row, const uint8_t* panel, size_t panel_bytes, int depth,
                       vf (&acc)[R][P][VECTORS], const uint8_t* ahead) {
    const Code* codes[R];
    for (int r = 0; r < R; r++) codes[r] = reinterpret_cast<const Code*>(rows.data + (first_row + r) * rows.stride);
    const float* scales = rows.scales(first_row, int(depth * sizeof(Code)));
    const size_t stride = rows.stride / 4;
    const int groups = depth / GROUP;
    for (int g = 0; g < groups; g++, panel += G::BYTES) {
        if (ahead)
            for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * panel_bytes + g * G::BYTES, G::BYTES);
        vi dots[R][P][VECTORS];
        dot_group4<R, P>(codes, panel, panel_bytes, dots);
        for (int p = 0; p < P; p++)
            for (int v = 0; v < VECTORS; v++) {
                const uint16_t* factors = reinterpret_cast<const uint16_t*>(panel + p * panel_bytes + 256) + v * LANES;
                const vf scale = load_f16(factors);
                vf minimum{};
                if constexpr (G::MINIMUM) minimum = load_f16(factors + PANEL);
                for (int r = 0; r < R; r++) {
                    vi dot = dots[r][p][v];
                    if constexpr (G::OFFSET != 0) dot -= G::OFFSET * load<int32_t>(scales + r * stride + groups + g);
                    const vf value = __builtin_convertvector(dot, vf) * scale;
                    acc[r][p][v] = fma(value, splat(scales[r * stride + g]), acc[r][p][v]);
                    if constexpr (G::MINIMUM)
                        acc[r][p][v] = fma(minimum, splat(scales[r * stride + 2 * groups + g]), acc[r][p][v]);
                }
            }
        for (int r = 0; r < R; r++) codes[r] += GROUP;
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
        const bool minimums = matrix.format == Format::Q4_1;
        if (matrix.form == Form::BYTES && minimums)
            multiply_4<Group4Min, int8_t, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
        else if (matrix.form == Form::BYTES)
            multiply_4<Group4, int8_t, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
        else if (minimums)
            multiply_4<Group4Min, int16_t, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
        else
            multiply_4<Group4, int16_t, R, P>(rows, first_row, panel, bytes, matrix.depth, acc, ahead);
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
    const bool is_half = sizeof(word_sums) > sizeof(vi) && matrix.integer() && matrix.form != Form::BYTES;
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
        panel += bytes ? GROUP_8_BYTES : minimums ? Group4Min::BYTES : Group4::BYTES;
    }
}

// Quantizes a row of floats: the largest magnitude of a group becomes the largest code. Groups that are nearly zero
// become zero.
static void quantize(const float* from, const Rows& to, int row, int depth, Form form) {
    const int groups = depth / GROUP;
    const bool is_bytes = form == Form::BYTES;
    const float most = is_bytes ? 127.0f : 32767.0f;
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
        } else {
            typedef int16_t words __attribute__((vector_size(2 * LANES)));
            int16_t* codes = to.words(row) + g * GROUP;
            for (int i = 0; i < GROUP / LANES; i++) store(codes + i * LANES, __builtin_convertvector(numbers[i], words));
            if (form == Form::WORDS) continue;
            typedef int16_t eight __attribute__((vector_size(16)));
            const eight order = {0, 2, 4, 6, 1, 3, 5, 7};
            for (int i = 0; i < GROUP; i += 8) store(codes + i, __builtin_shuffle(load<eight>(codes + i), order));
        }
        // The sum is exact in floats: at most 2^20.
        const float count = sum(__builtin_convertvector(total, vf));
        scales[groups + g] = bits<float>(int32_t(count));
        scales[2 * groups + g] = scale * count;
    }
}
