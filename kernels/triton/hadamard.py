"""The Hadamard transform of heads in registers; kernels/hadamard.py has the formula."""

import triton
import triton.language as tl


@triton.jit
def transform_heads(low, high, N: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr):
    """Both halves of N heads, [N, HALF] float32, after the transform in blocks of SIZE: SIZE / 2 of each half."""
    low = _butterflies(low, N, HALF, SIZE // 2)
    high = _butterflies(high, N, HALF, SIZE // 2)
    factor: tl.constexpr = SIZE**-0.5
    return (low + high) * factor, (low - high) * factor


@triton.jit
def _butterflies(numbers, N: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    step: tl.constexpr = SIZE // 2
    if step >= 1:
        # Pairs that are `step` apart, as the last dimension.
        pairs = tl.permute(tl.reshape(numbers, [N, WIDTH // SIZE, 2, step]), [0, 1, 3, 2])
        first, second = tl.split(pairs)
        joined = tl.join(first + second, first - second)
        numbers = tl.reshape(tl.permute(joined, [0, 1, 3, 2]), [N, WIDTH])
        numbers = _butterflies(numbers, N, WIDTH, step)
    return numbers
