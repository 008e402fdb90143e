// The matmul of K-quants with activations of 16 bits that have one scale for a block of 256 (`ActivationForm::BLOCKS`).
//
// A K-quant's weight is d x (scale x code) - m, where scale and code are small integers. Their product fits into 16 bits,
// so a panel is first unpacked to such products: then the sum over a block is one of integers, and floats are needed once
// for 256 numbers of depth instead of for each group of 32. `quantize` limits the magnitudes of a block's codes so that
// these sums fit into 32 bits, so they are exact, and a row has the same bits in any batch.
//
// A block of N vectors of outputs, unpacked: [128][N][LANES] pairs of int16 | [N][LANES] float scales | [N][LANES] float
// scales of the minimums | [8][N][LANES] float minimums. It stays in the L1 cache, for up to 64 rows at a time.
#pragma once

#include "gemm_blocks_few.h"

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

// Calls use(pair, weights) for the 16 pairs of a group's depth.
template <Format F, class Use>
INLINE void unpack_group(const uint8_t* codes, const uint8_t* small, const Use& use) {
    GroupUnpacker<F> unpacker;
    unpacker.start(codes, small);
    for_steps([&]<int STEP>() __attribute__((always_inline)) {
        vi weights[2];
        unpacker.template take<STEP>(weights);
        use(2 * STEP, weights[0]), use(2 * STEP + 1, weights[1]);
    });
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

// How often `multiply_blocks` fetches lines for so many panels.
INLINE int block_line_fetches(const Matrix& matrix, int count, int panels) {
    if (count <= MOST_FEW_ROWS) return 0;
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
    if (count <= MOST_FEW_ROWS) {
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
