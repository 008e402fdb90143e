"""The layout of keys and values in memory. Only the ops that write and read them depend on it.

One layer's keys, and its values, are [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]: a block is contiguous, so one
copy gathers it, and a slot indexes the first two dimensions. In swap space the layers of a block are adjacent.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE


class LayerKV(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor
    values: Tensor


def allocate(
    num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Memory for all layers: [num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]. It is zeroed, so that a
    lack of memory shows at the start, and unused slots have no NaN, which would pass the attention mask."""
    shape = (num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    return torch.empty(shape, dtype=dtype, device=device).zero_()


def layers_of(memory: Tensor) -> list[LayerKV]:
    """The layers of what `allocate` returned."""
    return [LayerKV(layer[0], layer[1]) for layer in memory]


def swap_blocks(swap: Tensor, memory: Tensor) -> Tensor:
    """Swap space, uint8 [num_swap_blocks, bytes of a block], as blocks of `memory`: [num_swap_blocks, num_layers, 2,
    BLOCK_SIZE, num_kv_heads, head_dim]."""
    num_layers, parts, _, *block = memory.shape
    return swap.view(memory.dtype).view(len(swap), num_layers, parts, *block)


def copy_blocks(memory: Tensor, swapped: Tensor | None, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy blocks with all layers, in order. Ids from memory's num_blocks on are those of `swapped`, the result of
    `swap_blocks`, or None without swap space."""
    num_blocks = memory.shape[2]

    def block_of(number: int) -> Tensor:
        if number < num_blocks:
            return memory[:, :, number]
        assert swapped is not None
        return swapped[number - num_blocks]

    for source, target in zip(sources, targets, strict=True):
        block_of(target).copy_(block_of(source))
