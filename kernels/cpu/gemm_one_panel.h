// The matmul of K-quants times one panel at AVX-512, for the many rows that leave no registers for a second one (gemm.h).
//
// Without pointers for each row, and with the scales of a block in registers, seven and eight rows of 4-bit codes take 0.95
// of the time.
#pragma once

#include "gemm_groups.h"

// Fewer rows wait for memory, and are as fast in `multiply_bits`.
constexpr bool takes_one_panel([[maybe_unused]] Format format, [[maybe_unused]] int rows) {
    return LANES == 16 && block_groups(format) > 1 && rows > 6;
}

// Where R rows are, from the first one: odd multiples of their stride, times 1, 2, 4 or 8, as addresses have them. Pointers
// for each row's codes, scales and sums are more than there are registers for.
template <int R>
class RowOffsets {
   public:
    explicit RowOffsets(size_t stride) {
        for (int i = 0; i < ODD; i++) strides_[i] = (2 * i + 1) * stride;
    }

    template <class T>
    __attribute__((always_inline)) const T* add(const T* first, int row) const {
        const int twos = row % 8 == 0 ? 8 : row % 4 == 0 ? 4 : row % 2 == 0 ? 2 : 1;
        return row ? reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(first) + twos * strides_[row / twos / 2]) : first;
    }

    // In a loop: otherwise the compiler takes registers for each row's addresses again.
    __attribute__((always_inline)) void hide() {
        for (int i = 0; i < ODD; i++) asm volatile("" : "+r"(strides_[i]));
    }

   private:
    static constexpr int ODD = R / 2;  // of the numbers up to R - 1
    size_t strides_[ODD];
};

// The same place in each row.
template <class T, int R>
struct RowPointers {
    const T* first;
    const RowOffsets<R>& offsets;

    __attribute__((always_inline)) const T* operator[](int row) const { return offsets.add(first, row); }
};

// acc [R] += R rows times a panel: the operations of `multiply_bits`, in the same order. The float16 of a block are converted
// once for its groups.
template <Format F, ActivationForm A, int R>
INLINE void multiply_one_panel(const Rows& rows, int first_row, const uint8_t* panel, int depth, vf (&acc)[R][1][VECTORS],
                               const uint8_t* ahead, Lines* lines) {
    typedef BlockLayout<F> Layout;
    constexpr int CODES = A == ActivationForm::SPLIT ? SPLIT_GROUP_BYTES : GROUP;  // bytes of a group of activations
    const int groups = depth / GROUP;
    RowOffsets<R> offsets(rows.stride);
    RowPointers<int8_t, R> codes{rows.codes(first_row), offsets};
    RowPointers<float, R> scales{rows.scales(first_row, groups * CODES), offsets};
    RowPointers<float, R> row_sums{scales.first + 2 * groups, offsets}, bases{scales.first + 3 * groups, offsets};
    for (int g = 0; g < groups; g += Layout::GROUPS, panel += Layout::BYTES) {
        const uint16_t* halves = Layout::halves(panel, 0);
        const vf block_scale = load_f16(halves), block_minimum = has_minimums(F) ? -load_f16(halves + PANEL) : vf{};
        for (int i = 0; i < Layout::GROUPS; i++, codes.first += CODES, scales.first++, row_sums.first++, bases.first += 2) {
            const uint8_t *group = panel + i * Layout::CODES, *small = Layout::small(panel, i, 0);
            if (lines) lines->fetch();
            if (ahead) {
                prefetch<L2>(ahead + i * Layout::CODES, Layout::CODES);
                if (i == Layout::GROUPS - 1) prefetch<L2>(ahead + Layout::SMALL, Layout::BYTES - Layout::SMALL);
            }
            offsets.hide();
            const auto weights = [&](int, int step) { return load_codes<F>(group, step); };
            if constexpr (F == Format::Q6_K) {
                vf scales_of[2][1], (&sums)[R][1] = reinterpret_cast<vf (&)[R][1]>(acc);
                Layout::half_scales(block_scale, small, scales_of[0][0], scales_of[1][0]);
                add_group6<A>(codes, weights, scales_of, scales, bases, sums);
            } else {
                vi dots[R][1][1];
                IN_REGISTERS
                for (int r = 0; r < R; r++) dots[r][0][0] = empty_sum();
                if constexpr (code_bits(F) == 4) {
                    dot_group4<R, 1, A == ActivationForm::SPLIT>(codes, 0, group, 0, dots);
                    if constexpr (A == ActivationForm::SPLIT) dot_group4<R, 1>(codes, GROUP, group, 0, dots);
                } else {
                    add_dots<code_bits(F), A, 0, 8, R, 1>(codes, weights, reinterpret_cast<vi (&)[R][1]>(dots));
                }
                const vf scale = block_scale * __builtin_convertvector(load_bytes(small), vf), shift = scale * -ROUND;
                const vf minimum = block_minimum * __builtin_convertvector(load_bytes(small + 8 * PANEL), vf);
                for (int r = 0; r < R; r++) {
                    vf& sum = acc[r][0][0];
                    sum = fma(scale_sum<SUMS_ARE_FLOATS>(dots[r][0][0], scale, shift), splat(*scales[r]), sum);
                    sum = fma(minimum, splat(*row_sums[r]), sum);
                }
            }
        }
        if (ahead) ahead += Layout::BYTES;
    }
}
