"""The Hadamard transform of heads in registers, as kernels/attention/hadamard.py defines it."""

import triton
import triton.language as tl


@triton.jit
def transform_heads(heads, others, is_second, N: tl.constexpr, DIMS: tl.constexpr, SIZE: tl.constexpr):
    """N heads, or halves of them, after the transform: [N, DIMS] float32. `others` has, for each dimension, the one
    that it rotates with, and `is_second` says which dimensions are in the second half. Blocks have SIZE / 2 dimensions
    of each half."""
    heads = _butterflies(heads, N, DIMS, SIZE // 2)
    others = _butterflies(others, N, DIMS, SIZE // 2)
    factor: tl.constexpr = SIZE**-0.5
    return tl.where(is_second, others - heads, heads + others) * factor


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
