// The Hadamard transform of the numbers of a head, for keys and values in 8 bits.
#pragma once

#include <utility>

#include "vec.h"

template <int STEP, int... I>
INLINE vf butterfly(vf numbers, std::integer_sequence<int, I...>) {
    const vf other = {numbers[I ^ STEP]...}, sign = {(I & STEP ? -1.0f : 1.0f)...};
    return other + numbers * sign;  // the products are exact
}

// Multiplies a head's numbers with an orthonormal Hadamard matrix (Sylvester's; the fast transform of Fino and Algazi,
// 1976), in place. A large number is spread over all of the others, so a scale for the largest of them loses less of the
// rest (Ashkboos et al., 2024, arXiv:2404.00456). Queries are transformed like keys, so their products stay what they
// were; what attention makes of transformed values is transformed again, which undoes it. A head whose size is no power
// of two is cut into blocks of the largest one that divides it. The additions have the same order at every ISA.
INLINE void hadamard(float* values, int dim) {
    const int size = dim & -dim;
    constexpr std::make_integer_sequence<int, LANES> lanes;
    for (int d = 0; d < dim; d += LANES) {
        vf numbers = load<vf>(values + d);
        numbers = butterfly<1>(numbers, lanes);
        numbers = butterfly<2>(numbers, lanes);
        if constexpr (LANES > 4) numbers = butterfly<4>(numbers, lanes);
        if constexpr (LANES > 8) numbers = butterfly<8>(numbers, lanes);
        store(values + d, numbers);
    }
    for (int step = LANES; step < size; step *= 2)
        for (int first = 0; first < dim; first += 2 * step)
            for (int d = first; d < first + step; d += LANES) {
                const vf a = load<vf>(values + d), b = load<vf>(values + d + step);
                store(values + d, a + b);
                store(values + d + step, a - b);
            }
    const float factor = 1.0f / std::sqrt(float(size));
    for (int d = 0; d < dim; d += LANES) store(values + d, load<vf>(values + d) * factor);
}
