// The matmul of gemm.h for several rows, with codes of 4 to 6 bits: they are unpacked once for all rows. Unpacking takes as
// long as one to two rows of products, and registers hold few rows: their accumulators, and two sums for each.
//
// A stretch of depth of N vectors of outputs, unpacked, for each group: [8][N][LANES] codes of four numbers of depth, as
// bytes | [N][LANES] float scales | [N][LANES] float minimums; of q6_k, the scales of both halves. It stays in the L1
// cache. The products are those of gemm.h, with the same bits.
#pragma once

#include "gemm.h"

constexpr int WIDE_PART_ROWS = 64;  // rows that share what is unpacked
constexpr int WIDE_GROUPS = 16;     // of the stretches of all panels that are unpacked together

// Vectors of outputs per call, which share the loads of activations: of one panel, or of two that have one each.
constexpr int WIDE_VECTORS = 2, WIDE_PANELS = VECTORS < WIDE_VECTORS ? 2 : 1;

// Where a panel is one vector, fewer rows than these are faster with one panel at a time and more rows per call.
constexpr int MANY_WIDE_ROWS = 25;

// Rows per call: as many as fit with their accumulators and sums in registers.
constexpr int most_wide_rows([[maybe_unused]] Format format, ActivationForm form, [[maybe_unused]] int vectors) {
#if defined(EMULATE)  // more take minutes to compile
    return form == ActivationForm::BYTES ? 3 : 2;
#elif defined(ISA_AVX512)
    if (vectors == 1) return form == ActivationForm::BYTES || code_bits(format) == 4 ? 8 : 6;
    return form == ActivationForm::BYTES ? 6 : 4;
#else
    // Sums of 16 bits are added up several times in a group of larger codes, which takes a third accumulator.
    const bool is_large = SUMS_ARE_PAIRS && code_bits(format) > 4;
    return form == ActivationForm::BYTES ? (is_large ? 3 : LANES == 8 ? 6 : 4) : is_large ? 2 : 3;
#endif
}

// Panels that are unpacked together for so many rows.
INLINE int wide_panels(int num_rows) { return num_rows < MANY_WIDE_ROWS ? 1 : WIDE_PANELS; }

// Whether a matmul of so many rows unpacks its panels first.
INLINE bool takes_wide(const Matrix& matrix, int num_rows) {
    if (!matrix.integer() || matrix.format == Format::Q8_0) return false;
    return num_rows >= least_wide_rows(matrix.format, matrix.form);
}

// Bytes of a group of so many vectors of outputs, unpacked.
constexpr size_t wide_group_bytes(int vectors) { return size_t(8 + 2) * vectors * 4 * LANES; }

// Bytes of all unpacked stretches.
constexpr size_t wide_bytes() { return WIDE_GROUPS * wide_group_bytes(VECTORS); }

// Unpacks some groups of vector `v` of a panel: vector `at` of the `vectors` of `to`.
template <Format F>
INLINE void unpack_stretch(const uint8_t* panel, int begin, int end, int v, int vectors, int at, uint8_t* to) {
    typedef BlockLayout<F> Layout;
    const size_t row = size_t(vectors) * 4 * LANES;
    to += at * 4 * LANES;
    for (int g = begin; g < end; g++) {
        const int in_block = g % Layout::GROUPS;
        const uint8_t* block = panel + g / Layout::GROUPS * Layout::BYTES;
        const uint8_t* codes = block + in_block * Layout::CODES + v * 4 * LANES;
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++, to += row) store(to, load_codes<F>(codes, step));
        const uint16_t* halves = Layout::halves(block, v);
        const uint8_t* small = Layout::small(block, in_block, v);
        if constexpr (code_bits(F) == 6) {
            vf first, second;
            Layout::half_scales(block, in_block, v, first, second);
            store(to, first), store(to + row, second);
        } else {
            store(to, load_scale<F>(halves, small));
            store(to + row, load_minimum<F>(halves, small));
        }
        to += 2 * row;
    }
}

// The panels that this thread probably reads next, or none.
struct NextPanels {
    const uint8_t* panels;
    int count, group_bytes;
    size_t panel_bytes;

    // Fetches a group of each.
    void fetch(int group) const {
        for (int p = 0; panels && p < count; p++) prefetch<L2>(panels + p * panel_bytes + group * group_bytes, group_bytes);
    }
};

// out [R, N * LANES] += R rows times an unpacked stretch; = if it is the first one. `lines` may be null.
template <Format F, ActivationForm A, int R, int N>
__attribute__((noinline)) static void multiply_wide_rows(const Rows& rows, int first_row, const uint8_t* wide, int groups,
                                                         int begin, int end, float* out, int out_stride,
                                                         const NextPanels& ahead, Lines* lines) {
    constexpr int CODES = A == ActivationForm::SPLIT ? SPLIT_GROUP_BYTES : GROUP, ROW = N * 4 * LANES;
    const float* scales = rows.scales(first_row, groups * CODES);
    const size_t stride = rows.stride / 4;
    const int8_t* codes[R];
    for (int r = 0; r < R; r++) codes[r] = rows.codes(first_row + r) + begin * CODES;
    vf acc[R][N];
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = begin ? load<vf>(out + r * out_stride + n * LANES) : vf{};
    for (int g = begin; g < end; g++, wide += wide_group_bytes(N)) {
        ahead.fetch(g);
        if (lines) lines->fetch();
        const uint8_t* small = wide + 8 * ROW;
        const auto weights = [&](int n, int step) { return load<vu>(wide + step * ROW + n * 4 * LANES); };
        if constexpr (code_bits(F) == 6) {
            vf scales_of[2][N];
            for (int n = 0; n < N; n++)
                for (int half = 0; half < 2; half++) scales_of[half][n] = load<vf>(small + half * ROW + n * 4 * LANES);
            add_group6<A>(codes, weights, scales_of, StridedFloats{scales + g, stride},
                          StridedFloats{scales + 3 * groups + 2 * g, stride}, acc);
        } else {
            vi dots[R][N];
            IN_REGISTERS
            for (int r = 0; r < R; r++)
                for (int n = 0; n < N; n++) dots[r][n] = empty_sum();
            add_dots<code_bits(F), A, 0, 8>(codes, weights, dots);
            for (int n = 0; n < N; n++, small += 4 * LANES) {
                const vf scale = load<vf>(small), minimum = load<vf>(small + ROW), shift = scale * -ROUND;
                for (int r = 0; r < R; r++)
                    acc[r][n] = add_group<zero_code(F), has_minimums(F)>(acc[r][n], dots[r][n], scale, shift, minimum,
                                                                         scales + r * stride + g, groups);
            }
        }
        for (int r = 0; r < R; r++) codes[r] += CODES;
    }
    IN_REGISTERS
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(out + r * out_stride + n * LANES, acc[r][n]);
}

// Formats whose unpacked panels are of one kind.
constexpr Format unpacked_format(Format format) {
    return format == Format::Q4_K ? Format::Q4_1 : format == Format::Q5_K ? Format::Q5_1 : format;
}

// As many rows as there are times an unpacked stretch.
template <Format F, ActivationForm A, int N>
static void multiply_wide_stretch(const Rows& rows, int first_row, int count, const uint8_t* wide, int groups, int begin,
                                  int end, float* out, int out_stride, const NextPanels& ahead, Lines* lines) {
    constexpr int MOST = most_wide_rows(F, A, N);
    const int parts = (count + MOST - 1) / MOST, most = (count + parts - 1) / parts;
    for (int row = 0; row < count; row += most) {
        float* to = out + row * out_stride;
        const NextPanels fetched = row ? NextPanels{} : ahead;
        switch (std::min(most, count - row)) {
#define CASE(R)                                                                                                          \
    case R:                                                                                                              \
        if constexpr (R <= MOST)                                                                                         \
            multiply_wide_rows<F, A, R, N>(rows, first_row + row, wide, groups, begin, end, to, out_stride, fetched,     \
                                           lines);                                                                       \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
        }
    }
}

template <Format F, ActivationForm A>
static void multiply_wide_as(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                             float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
    constexpr Format U = unpacked_format(F);
    const size_t bytes = matrix.panel_bytes();
    const uint8_t* panel = matrix.panels + first_panel * bytes;
    const int groups = matrix.depth / GROUP, at_once = wide_panels(count), stretch = WIDE_GROUPS / at_once;
    for (int p = 0; p < panels; p += at_once) {
        const int num = std::min(at_once, panels - p);
        const int vectors = std::min(num * VECTORS, WIDE_VECTORS), calls = num * VECTORS / vectors;
        const NextPanels next{ahead ? ahead + p * bytes : nullptr, num, int(bytes / groups), bytes};
        for (int begin = 0; begin < groups; begin += stretch) {
            const int end = std::min(begin + stretch, groups);
            const size_t call_bytes = (end - begin) * wide_group_bytes(vectors);
            for (int i = 0; i < num * VECTORS; i++) {
                const size_t place = (p + i / VECTORS) * bytes;
                unpack_stretch<F>(panel + place, begin, end, i % VECTORS, vectors, i % vectors, wide + i / vectors * call_bytes);
            }
            const auto multiply = vectors == WIDE_VECTORS ? multiply_wide_stretch<U, A, WIDE_VECTORS> : multiply_wide_stretch<U, A, 1>;
            for (int call = 0; call < calls; call++)
                multiply(rows, first_row, count, wide + call * call_bytes, groups, begin, end,
                         out + p * PANEL + call * vectors * LANES, out_stride, call ? NextPanels{} : next, matrix.lines);
        }
    }
}

// How often `multiply_wide` fetches lines for so many rows and panels.
INLINE int wide_line_fetches(const Matrix& matrix, int count, int panels) {
    int fetches = 0;
    const int at_once = wide_panels(count);
    for (int p = 0; p < panels; p += at_once) {
        const int outputs = std::min(at_once, panels - p) * VECTORS, vectors = std::min(outputs, WIDE_VECTORS);
        const int most = most_wide_rows(unpacked_format(matrix.format), matrix.form, vectors);
        fetches += matrix.depth / GROUP * (outputs / vectors) * ((count + most - 1) / most);
    }
    return fetches;
}

// out [count, panels * 16], as `multiply`. `wide` has room for `wide_bytes`.
static void multiply_wide(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                          float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
    const auto multiply_as = [&]<Format F>() {
        const auto multiply = matrix.form == ActivationForm::BYTES ? multiply_wide_as<F, ActivationForm::BYTES>
                                                                   : multiply_wide_as<F, ActivationForm::SPLIT>;
        multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead, wide);
    };
    switch (matrix.format) {
        case Format::Q4_0: return multiply_as.template operator()<Format::Q4_0>();
        case Format::Q4_1: return multiply_as.template operator()<Format::Q4_1>();
        case Format::Q5_0: return multiply_as.template operator()<Format::Q5_0>();
        case Format::Q5_1: return multiply_as.template operator()<Format::Q5_1>();
        case Format::Q5_K: return multiply_as.template operator()<Format::Q5_K>();
        case Format::Q6_K: return multiply_as.template operator()<Format::Q6_K>();
        default: return multiply_as.template operator()<Format::Q4_K>();
    }
}
