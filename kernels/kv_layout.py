"""How keys and values lie in memory. Only the ops that write and read them know.

One layer's keys, and its values, are [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]: a block is one piece, so it is
gathered by one copy, and its first two dimensions are one for a slot.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE


class LayerKV(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor
    values: Tensor


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes, over all layers."""
    return 2 * num_layers * BLOCK_SIZE * num_kv_heads * head_dim * dtype.itemsize


def allocate(
    num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[LayerKV]:
    """Memory for all layers, one piece. It is written here, for two reasons: memory that is lacking shows at the
    start, and a masked slot that was never used holds zeros, where a stray NaN would get through the mask."""
    shape = (num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    memory = torch.empty(shape, dtype=dtype, device=device).zero_()
    return [LayerKV(layer[0], layer[1]) for layer in memory]
