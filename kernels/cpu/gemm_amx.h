// The matmul of gemm.h with bf16 weights by the tile registers of AMX: sixteen rows times a panel, 32 deep, by one
// instruction. One row takes as long as sixteen, which is still less than its weights take to be read.
//
// gemm_amx_int4.h does the same with 4-bit weights. q8_0 uses vectors: its activations have 16 bits, and two products
// for each group of 32 and the scaling of their sums would take as long.
#pragma once

#include "gemm_amx_int4.h"
#include "gemm_blocks.h"
#include "gemm_fp8.h"
#include "gemm_wide.h"

#if defined(AMX)

// Every register has 16 rows of 64 bytes: 0 to 3 for sums, the others for activations and weights.
static const TileShapes full_tiles = [] {
    TileShapes shapes;
    std::fill_n(shapes.rows, 8, TILE_ROWS);
    std::fill_n(shapes.bytes, 8, TILE_BYTES);
    return shapes;
}();

constexpr int AMX_ROWS = 4 * TILE_ROWS;

constexpr int PAIRS_AT_ONCE = TILE_BYTES / 4;  // of depth

// out [A * 16, P * 16] = A times 16 rows x P panels, the rows `stride` and the panels `bytes` apart. A * P <= 4.
template <int A, int P>
__attribute__((noinline)) static void multiply_bf16_tiles(const uint8_t* rows, size_t stride, const uint8_t* panel,
                                                          size_t bytes, int depth, float* out, int out_stride,
                                                          const uint8_t* ahead) {
    static_assert(A * P <= 4 && (A == 1 || P <= 2));
    const auto add = [&](const uint8_t* a, size_t a_stride, const uint8_t* b, size_t b_bytes) {
        tile_load<4>(a, a_stride);
        if constexpr (A == 2) {
            tile_load<5>(a + TILE_ROWS * a_stride, a_stride);
            tile_load<6>(b, LINE);
            tile_dot_bf16<0, 4, 6>();
            tile_dot_bf16<P, 5, 6>();
            if constexpr (P == 2) {
                tile_load<7>(b + b_bytes, LINE);
                tile_dot_bf16<1, 4, 7>();
                tile_dot_bf16<3, 5, 7>();
            }
        } else {
            tile_load<5>(b, LINE);
            tile_dot_bf16<0, 4, 5>();
            if constexpr (P > 1) {
                tile_load<6>(b + b_bytes, LINE);
                tile_dot_bf16<1, 4, 6>();
            }
            if constexpr (P > 2) {
                tile_load<7>(b + 2 * b_bytes, LINE);
                tile_dot_bf16<2, 4, 7>();
                tile_load<5>(b + 3 * b_bytes, LINE);
                tile_dot_bf16<3, 4, 5>();
            }
        }
    };
    tile_zero<0>();
    if constexpr (A * P > 1) tile_zero<1>();
    if constexpr (A * P > 2) tile_zero<2>(), tile_zero<3>();
    const int whole = depth / 2 / PAIRS_AT_ONCE, rest = depth / 2 % PAIRS_AT_ONCE;
    for (int k = 0; k < whole; k++) {
        if (ahead)
            for (int p = 0; p < P; p++) prefetch<L2>(ahead + p * bytes + k * TILE_ROWS * LINE, TILE_ROWS * LINE);
        add(rows + k * TILE_BYTES, stride, panel + k * TILE_ROWS * LINE, bytes);
    }
    if (rest) {  // zeros behind the last pairs of depth, in both: what stands behind them may be no number
        alignas(LINE) uint8_t a[A * TILE_ROWS][TILE_BYTES] = {}, b[P][TILE_ROWS][LINE] = {};
        for (int r = 0; r < A * TILE_ROWS; r++) memcpy(a[r], rows + r * stride + whole * TILE_BYTES, 4 * rest);
        for (int p = 0; p < P; p++) memcpy(b[p], panel + p * bytes + whole * TILE_ROWS * LINE, rest * LINE);
        add(a[0], TILE_BYTES, b[0][0], TILE_ROWS * LINE);
    }
    const size_t row = out_stride * 4;
    tile_store<0>(out, row);
    if constexpr (A == 2) {
        if constexpr (P == 2) tile_store<1>(out + PANEL, row);
        tile_store<P>(out + TILE_ROWS * out_stride, row);
        if constexpr (P == 2) tile_store<3>(out + TILE_ROWS * out_stride + PANEL, row);
    } else {
        if constexpr (P > 1) tile_store<1>(out + PANEL, row);
        if constexpr (P > 2) tile_store<2>(out + 2 * PANEL, row), tile_store<3>(out + 3 * PANEL, row);
    }
}

static void multiply_bf16_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                              int panels, float* out, int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    const uint8_t* panel = matrix.panels + first_panel * bytes;
    for (int row = 0; row < count;) {
        const uint8_t* from = rows.data + (first_row + row) * rows.stride;
        float* to = out + row * out_stride;
        const bool two = count - row > TILE_ROWS;
        const uint8_t* fetch = row ? nullptr : ahead;
        for (int p = 0; p < panels;) {
            const auto multiply_some = [&]<int A, int P>() {
                multiply_bf16_tiles<A, P>(from, rows.stride, panel + p * bytes, bytes, matrix.depth, to + p * PANEL,
                                          out_stride, fetch ? fetch + p * bytes : nullptr);
                p += P;
            };
            const int left = panels - p;
            if (two && left >= 2)
                multiply_some.template operator()<2, 2>();
            else if (two)
                multiply_some.template operator()<2, 1>();
            else if (left >= 4)
                multiply_some.template operator()<1, 4>();
            else if (left >= 2)
                multiply_some.template operator()<1, 2>();
            else
                multiply_some.template operator()<1, 1>();
        }
        row += two ? 2 * TILE_ROWS : TILE_ROWS;
    }
}

// `multiply_fp8` with widened blocks as tiles. `sums` are of 32 rows and as many outputs as panels have at once.
static void multiply_fp8_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                             float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
    constexpr int WIDTH = FP8_PANELS * PANEL;
    alignas(LINE) float sums[2 * TILE_ROWS * WIDTH];
    for_fp8_blocks(matrix, first_panel, panels, ahead, wide, [&](int panel, int num, int block, const uint16_t* widened,
                                                                const uint8_t* const* codes) {
        for (int row = 0; row < count; row += 2 * TILE_ROWS) {
            const uint8_t* from = rows.data + (first_row + row) * rows.stride + block * FP8_DEPTH * sizeof(act);
            const int left = std::min(count - row, 2 * TILE_ROWS);
            for (int p = 0; p < num;) {
                const auto multiply_some = [&]<int A, int P>() {
                    multiply_bf16_tiles<A, P>(from, rows.stride, reinterpret_cast<const uint8_t*>(widened) + p * FP8_WIDE_BYTES,
                                              FP8_WIDE_BYTES, FP8_DEPTH, sums + p * PANEL, WIDTH, nullptr);
                    p += P;
                };
                const bool two = left > TILE_ROWS;
                if (two && num - p >= 2)
                    multiply_some.template operator()<2, 2>();
                else if (two)
                    multiply_some.template operator()<2, 1>();
                else if (num - p >= 4)
                    multiply_some.template operator()<1, 4>();
                else if (num - p >= 2)
                    multiply_some.template operator()<1, 2>();
                else
                    multiply_some.template operator()<1, 1>();
            }
            for (int p = 0; p < num; p++) {
                const vf scale = load<vf>(codes[p] + FP8_CODE_BYTES);
                for (int r = 0; r < left; r++) {
                    float* to = out + (row + r) * out_stride + (panel + p) * PANEL;
                    store(to, fma(load<vf>(sums + r * WIDTH + p * PANEL), scale, block ? load<vf>(to) : vf{}));
                }
            }
        }
    });
}

#endif

// --- any format -------------------------------------------------------------------------------------------------------

constexpr int MOST_PART_ROWS = WIDE_PART_ROWS;
#if defined(AMX)
static_assert(AMX_ROWS <= MOST_PART_ROWS);
#endif

// Rows that a matmul of `num_rows` rows takes together.
INLINE int part_rows(const Matrix& matrix, int num_rows) {
#if defined(AMX)
    if (matrix.format == Format::BF16) return AMX_ROWS;
    if (takes_int4_tiles(matrix, num_rows)) {
        const int parts = (num_rows + AMX_ROWS - 1) / AMX_ROWS;
        return (num_rows + parts - 1) / parts;
    }
#endif
    const bool is_unpacked = matrix.format == Format::FP8 || matrix.form == ActivationForm::BLOCKS || takes_wide(matrix, num_rows);
    const int most = is_unpacked ? WIDE_PART_ROWS : most_rows(matrix, num_rows);
#if defined(ISA_AVX2)
    // Sums of three or four rows wait for each other, so six rows and then one or two cost less than even parts.
    const int rest = num_rows % most;
    if (matrix.format == Format::BF16 && num_rows > most && (rest == 1 || rest == 2)) return most;
#endif
    // Even parts: six and five rows cost less than ten and one.
    const int parts = (num_rows + most - 1) / most;
    return (num_rows + parts - 1) / parts;
}

INLINE int quotient_up(int a, int b) { return (a + b - 1) / b; }

// How often a matmul of so many rows and panels fetches some of `matrix.lines`; 0 if it does not.
INLINE int line_fetches([[maybe_unused]] const Matrix& matrix, [[maybe_unused]] int num_rows, [[maybe_unused]] int panels) {
#if defined(AMX)
    return 0;
#else
    const int most = part_rows(matrix, num_rows), groups = matrix.depth / GROUP;
    const bool is_wide = takes_wide(matrix, most), is_4_bit = matrix.integer() && code_bits(matrix.format) == 4;
    if (matrix.form != ActivationForm::BLOCKS && matrix.format != Format::BF16 && !is_wide && !is_4_bit) return 0;
    int fetches = 0;
    for (int row = 0; row < num_rows; row += most) {
        const int count = std::min(most, num_rows - row);
        if (matrix.form == ActivationForm::BLOCKS)
            fetches += block_line_fetches(matrix, count, panels);
        else if (is_wide)
            fetches += wide_line_fetches(matrix, count, panels);
        else
            fetches += groups * quotient_up(panels, panels_at_once(count));
    }
    return fetches;
#endif
}

// Bytes that a matmul unpacks to at once.
INLINE size_t unpacked_bytes(const Matrix& matrix) {
    if (matrix.form == ActivationForm::BLOCKS) return unpacked_block_bytes(BLOCK_PANELS * VECTORS);
    return matrix.format == Format::FP8 ? FP8_PANELS * FP8_WIDE_BYTES : wide_bytes();
}

// `multiply` of gemm.h for count <= part_rows. `rows` and `out` have padded_rows(count) rows, `wide` has `unpacked_bytes`.
static void matmul(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                   float* out, int out_stride, const uint8_t* ahead, uint8_t* wide) {
#if defined(AMX)
    if (matrix.format == Format::BF16) {
        use_tile_shapes(full_tiles);
        return multiply_bf16_amx(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
    }
    if (matrix.format == Format::FP8) {
        use_tile_shapes(full_tiles);
        return multiply_fp8_amx(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead, wide);
    }
    if (takes_int4_tiles(matrix, count))
        return multiply_int4_amx(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
#endif
    if (matrix.format == Format::FP8)
        return multiply_fp8(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead, wide);
    if (matrix.form == ActivationForm::BLOCKS)
        return multiply_blocks(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead, wide);
    if (takes_wide(matrix, count))
        return multiply_wide(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead, wide);
    multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
}
