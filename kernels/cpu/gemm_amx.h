// The matmul of gemm.h by the tile registers of AMX: sixteen rows times a panel by one instruction.
//
// Integer products are the same to the bit as without AMX. A bf16 output adds 32 products of depth at a time.
#pragma once

#include "amx.h"
#include "gemm.h"

#if defined(AMX)

// Every register has 16 rows of 64 bytes: 0 to 3 for sums, the others for activations and weights.
static const TileShapes full_tiles = [] {
    TileShapes shapes;
    std::fill_n(shapes.rows, 8, TILE_ROWS);
    std::fill_n(shapes.bytes, 8, TILE_BYTES);
    return shapes;
}();

// Rows that a matmul takes together, so that 4-bit weights are unpacked for all of them at once.
constexpr int AMX_ROWS = 4 * TILE_ROWS;
// Rows below which 4-bit weights are multiplied without AMX: its products take the same time for one row as for 16.
constexpr int AMX_LEAST_ROWS_4 = 5;

// --- bf16 -------------------------------------------------------------------------------------------------------------

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

// --- groups of 32 -----------------------------------------------------------------------------------------------------
//
// A group fills half of a register: 32 of its 64 bytes of depth. Rather than another shape, the other half is multiplied
// with zeros:
//
//     activations   PLANES: [lower bytes | upper bytes]      BYTES: [a group | the next one]
//     weights       [group | zeros] for the first half, [zeros | group] for the second
//
// So one load of activations serves two products.

constexpr int GROUPS_AT_ONCE = 8;  // that are unpacked together
constexpr int GROUP_LINES = 8;     // of an unpacked group: [8][16][4]

// Unpacked groups of a panel. What lies between them stays zero.
struct Unpacked {
    alignas(LINE) uint8_t lines[(2 * GROUPS_AT_ONCE + 1) * GROUP_LINES][LINE];
    float scales[GROUPS_AT_ONCE][PANEL], minimums[GROUPS_AT_ONCE][PANEL];

    uint8_t* group(int g) { return lines[(2 * g + 1) * GROUP_LINES]; }
    const uint8_t* first_half(int g) { return group(g); }
    const uint8_t* second_half(int g) { return group(g) - GROUP_LINES * LINE; }
};
static thread_local Unpacked unpacked_groups;

template <Format F>
INLINE void unpack_group(const uint8_t* from, Unpacked& to, int g) {
    uint8_t* lines = to.group(g);
    if constexpr (F == Format::Q8_0) {
        for (int i = 0; i < GROUP_LINES; i++) store(lines + i * LINE, load<vu>(from + i * LINE));
    } else {
        for (int j = 0; j < GROUP_LINES / 2; j++) {
            const vu word = load<vu>(from + j * LINE);
            store(lines + 2 * j * LINE, word & 0x0F0F0F0Fu);
            store(lines + (2 * j + 1) * LINE, (word >> 4) & 0x0F0F0F0Fu);
        }
    }
    const uint16_t* factors = reinterpret_cast<const uint16_t*>(from + (F == Format::Q8_0 ? 512 : 256));
    store(to.scales[g], load_f16(factors));
    if constexpr (F == Format::Q4_1) store(to.minimums[g], load_f16(factors + PANEL));
}

// The integer products of 16 rows with a group of a panel, and adding them to the outputs, for every other group: while
// one half of the registers and of `dots` is read, the other is computed.
template <Format F, Form FORM, int R>
__attribute__((noinline)) static void add_groups(const Rows& rows, int row, int depth, Unpacked& unpacked, int first,
                                                 int count, float* out, int out_stride) {
    constexpr bool PLANES = FORM == Form::PLANES;
    alignas(LINE) int32_t dots[2][TILE_ROWS][2][PANEL];
    const uint8_t* const codes = rows.data + row * rows.stride;
    const size_t stride = rows.stride, floats = stride / 4;
    const float* const scales = rows.scales(row, (PLANES ? 2 : 1) * depth) + first;
    const int groups = depth / GROUP;

    // Unpacked group g, with half of the registers.
    const auto multiply_group = [&]<int HALF>(int g) __attribute__((always_inline)) {
        constexpr int LOW = 2 * HALF, HIGH = LOW + 1, CODES = 4 + HALF;
        const int group = first + g;
        tile_zero<LOW>();
        if constexpr (PLANES) {
            tile_load<CODES>(codes + group * 2 * GROUP, stride);
            tile_load<6>(unpacked.first_half(g), LINE);
            tile_load<7>(unpacked.second_half(g), LINE);
            tile_zero<HIGH>();
            if constexpr (F == Format::Q8_0) {
                tile_dot_us<LOW, CODES, 6>();
                tile_dot_ss<HIGH, CODES, 7>();
            } else {
                tile_dot_uu<LOW, CODES, 6>();
                tile_dot_su<HIGH, CODES, 7>();
            }
        } else {
            tile_load<CODES>(codes + group / 2 * 2 * GROUP, stride);
            tile_load<6 + HALF>(group % 2 ? unpacked.second_half(g) : unpacked.first_half(g), LINE);
            tile_dot_su<LOW, CODES, 6 + HALF>();
        }
    };

    vf acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) acc[r] = first ? load<vf>(out + r * out_stride) : vf{};
    const auto store_group = [&]<int HALF>() __attribute__((always_inline)) {
        tile_store<2 * HALF>(dots[HALF][0][0], 2 * LINE);
        if constexpr (PLANES) tile_store<2 * HALF + 1>(dots[HALF][0][1], 2 * LINE);
    };
    const auto add_group = [&](int g) __attribute__((always_inline)) {
        const vf scale = load<vf>(unpacked.scales[g]), minimum = load<vf>(unpacked.minimums[g]);
        const float* at = scales + g;
        const auto& numbers = dots[g % 2];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++, at += floats) {
            vi dot = load<vi>(numbers[r][0]);
            if constexpr (PLANES) dot += load<vi>(numbers[r][1]) << 8;
            if constexpr (F == Format::Q4_0) dot -= 8 * load<int32_t>(at + groups);
            const vf value = __builtin_convertvector(dot, vf) * scale;
            acc[r] = fma(value, splat(*at), acc[r]);
            if constexpr (F == Format::Q4_1) acc[r] = fma(minimum, splat(at[2 * groups]), acc[r]);
        }
    };

    multiply_group.template operator()<0>(0);
    if (count > 1) multiply_group.template operator()<1>(1);
    store_group.template operator()<0>();
    for (int g = 0; g < count; g += 2) {
        if (g + 2 < count) multiply_group.template operator()<0>(g + 2);
        if (g + 1 < count) store_group.template operator()<1>();
        add_group(g);
        if (g + 1 >= count) break;
        if (g + 3 < count) multiply_group.template operator()<1>(g + 3);
        if (g + 2 < count) store_group.template operator()<0>();
        add_group(g + 1);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(out + r * out_stride, acc[r]);
}

template <Format F, Form FORM>
static void multiply_groups_amx(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel,
                                int panels, float* out, int out_stride, const uint8_t* ahead) {
    const size_t bytes = matrix.panel_bytes();
    const int groups = matrix.depth / GROUP, group_size = group_bytes(F);
    Unpacked& unpacked = unpacked_groups;
    for (int p = 0; p < panels; p++) {
        const uint8_t* panel = matrix.panels + (first_panel + p) * bytes;
        for (int first = 0; first < groups; first += GROUPS_AT_ONCE) {
            const int some = std::min(GROUPS_AT_ONCE, groups - first);
            for (int g = 0; g < some; g++) {
                const int at = (first + g) * group_size;
                if (ahead) prefetch<L2>(ahead + p * bytes + at, group_size);
                unpack_group<F>(panel + at, unpacked, g);
            }
            for (int row = 0; row < count; row += TILE_ROWS) {
                float* to = out + row * out_stride + p * PANEL;
                const int left = count - row;
                if (left <= 4)
                    add_groups<F, FORM, 4>(rows, first_row + row, matrix.depth, unpacked, first, some, to, out_stride);
                else if (left <= 8)
                    add_groups<F, FORM, 8>(rows, first_row + row, matrix.depth, unpacked, first, some, to, out_stride);
                else
                    add_groups<F, FORM, 16>(rows, first_row + row, matrix.depth, unpacked, first, some, to, out_stride);
            }
        }
    }
}

#endif

// --- any format -------------------------------------------------------------------------------------------------------

#if defined(AMX)
constexpr int MOST_PART_ROWS = AMX_ROWS;

// Rows that a matmul of `num_rows` rows takes together.
INLINE int part_rows(const Matrix&, int) { return AMX_ROWS; }

// `multiply` of gemm.h, by the instructions that take the least time. `rows` and `out` have padded_rows(count) rows.
static void matmul(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                   float* out, int out_stride, const uint8_t* ahead) {
    const bool four_bits = matrix.format == Format::Q4_0 || matrix.format == Format::Q4_1;
    if (four_bits && count < AMX_LEAST_ROWS_4)
        return multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
    const bool bytes = matrix.form == Form::BYTES;
    const auto multiply_all = matrix.format == Format::BF16   ? multiply_bf16_amx
                              : matrix.format == Format::Q8_0 ? multiply_groups_amx<Format::Q8_0, Form::PLANES>
                              : matrix.format == Format::Q4_0
                                  ? (bytes ? multiply_groups_amx<Format::Q4_0, Form::BYTES>
                                           : multiply_groups_amx<Format::Q4_0, Form::PLANES>)
                                  : (bytes ? multiply_groups_amx<Format::Q4_1, Form::BYTES>
                                           : multiply_groups_amx<Format::Q4_1, Form::PLANES>);
    use_tile_shapes(full_tiles);
    multiply_all(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
}
#else
constexpr int MOST_PART_ROWS = MOST_ROWS;

// Even parts: six and five rows cost less than ten and one.
INLINE int part_rows(const Matrix& matrix, int num_rows) {
    const int parts = (num_rows + most_rows(matrix) - 1) / most_rows(matrix);
    return (num_rows + parts - 1) / parts;
}

static void matmul(const Rows& rows, int first_row, int count, const Matrix& matrix, int first_panel, int panels,
                   float* out, int out_stride, const uint8_t* ahead) {
    multiply(rows, first_row, count, matrix, first_panel, panels, out, out_stride, ahead);
}
#endif
