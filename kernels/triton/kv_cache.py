"""The layout of a layer's keys, or values, on a GPU.

They are [num_blocks, K, BLOCK_SIZE, D] in the dtype of the model. In 8 bits they are int8 [num_blocks, K, BLOCK_SIZE *
(D + 2)]: the codes of a block and head, [BLOCK_SIZE, D], are followed by their scales, bfloat16 [BLOCK_SIZE]. A number
is its code times the scale of its token and head. `quantize_heads` in kernels/attention/kv_layout.py has the formula.

Kernels take the same memory twice, as codes and as bfloat16, since a pointer has one type. With SCALE_BYTES = 0 there
are no scales.

Shapes: K key-value heads, D head_dim.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.attention.kv_layout import MOST
from pipeline.kernels.step_inputs import BLOCK_SIZE, KV_SCALE_BYTES

_MOST = tl.constexpr(float(MOST))
_LEAST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
_ROUND = tl.constexpr(12582912.0)  # adding 1.5 * 2^23 rounds to an integer, ties to even


def shape_of(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a layer's keys."""
    if dtype == torch.int8:
        return num_blocks, num_kv_heads, BLOCK_SIZE * (head_dim + KV_SCALE_BYTES)
    return num_blocks, num_kv_heads, BLOCK_SIZE, head_dim


def head_dim_of(cache: Tensor) -> int:
    """D of keys or values."""
    return cache.shape[-1] // BLOCK_SIZE - KV_SCALE_BYTES if is_quantized(cache) else cache.shape[-1]


def is_quantized(cache: Tensor) -> bool:
    """Whether keys or values have 8 bits."""
    return cache.dtype == torch.int8


def scale_bytes_of(cache: Tensor) -> int:
    """SCALE_BYTES for the kernels."""
    return KV_SCALE_BYTES if is_quantized(cache) else 0


def as_scales(cache: Tensor) -> Tensor:
    """The memory as bfloat16, for `scale_place`; unused without scales."""
    return cache.view(torch.bfloat16) if is_quantized(cache) else cache


def codes_and_scales(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys or values in 8 bits: codes [num_blocks, K, BLOCK_SIZE, D] int8, scales [num_blocks, K, BLOCK_SIZE]
    bfloat16."""
    num_codes = BLOCK_SIZE * head_dim_of(cache)
    codes = cache[..., :num_codes].view(*cache.shape[:-1], BLOCK_SIZE, -1)
    return codes, cache[..., num_codes:].view(torch.bfloat16)


@triton.jit
def quantize(numbers, tops, sums):
    """Codes and scales of heads, `kv_layout.quantize_heads`, both float32. `numbers` [N, D]; `tops` and `sums` [N] are
    the largest magnitudes, and the sums of `numbers * 0`: NaN if a number is not finite."""
    word = (tops / _MOST + sums).to(tl.int32, bitcast=True)
    scales = ((word + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    is_zero = scales < _LEAST_SCALE
    inverse = tl.where(is_zero, 0.0, 1.0 / tl.where(is_zero, 1.0, scales))
    codes = (numbers * inverse[:, None] + _ROUND) - _ROUND
    return codes, tl.where(is_zero, 0.0, scales)
