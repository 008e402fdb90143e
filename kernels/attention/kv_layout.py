"""The layout of keys and values in memory. Only the ops that write and read them depend on it.

One layer's keys, and its values, are [num_blocks, BLOCK_SIZE, num_kv_heads, head_dim]: a block is contiguous, so one
copy gathers it, and a slot indexes the first two dimensions. In swap space the layers of a block are adjacent.

In 8 bits, a block has codes and then their scales, int8 [BLOCK_SIZE, num_kv_heads, head_dim] and bfloat16 [BLOCK_SIZE,
num_kv_heads]. A number is its code times the scale of its token and head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE, KV_SCALE_BYTES

MOST = 127
"""The largest code."""


class LayerKV(NamedTuple):
    """The keys and values of one layer."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    """[num_blocks, BLOCK_SIZE, num_kv_heads], if keys and values are codes"""
    value_scales: Tensor | None = None
    center: Tensor | None = None
    """[num_kv_heads, head_dim] float32; what is subtracted from keys before they are stored, if anything"""


def allocate(
    num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> Tensor:
    """Memory for all layers: [num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim], or for int8 [num_layers,
    2, num_blocks, bytes]. It is zeroed, so that a lack of memory shows at the start."""
    shape: tuple[int, ...] = (num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    if dtype == torch.int8:
        shape = (num_layers, 2, num_blocks, BLOCK_SIZE * num_kv_heads * (head_dim + KV_SCALE_BYTES))
    return torch.empty(shape, dtype=dtype, device=device).zero_()


def layers_of(memory: Tensor, num_kv_heads: int, head_dim: int) -> list[LayerKV]:
    """The layers of what `allocate` returned."""
    if memory.dtype != torch.int8:
        return [LayerKV(layer[0], layer[1]) for layer in memory]
    num_codes = BLOCK_SIZE * num_kv_heads * head_dim
    codes = memory[..., :num_codes].view(*memory.shape[:-1], BLOCK_SIZE, num_kv_heads, head_dim)
    scales = memory[..., num_codes:].view(torch.bfloat16).view(*memory.shape[:-1], BLOCK_SIZE, num_kv_heads)
    return [LayerKV(code[0], code[1], scale[0], scale[1]) for code, scale in zip(codes, scales, strict=True)]


def allocate_units(num_units: int, num_blocks: int, unit_bytes: int, dtype: torch.dtype, device: str) -> Tensor:
    """Memory for layers of different sizes, [num_units, 2, num_blocks, numbers], zeroed. A unit has `unit_bytes`,
    half of them of keys."""
    numbers = unit_bytes // 2 // dtype.itemsize
    return torch.empty(num_units, 2, num_blocks, numbers, dtype=dtype, device=device).zero_()


def layer_at(unit: Tensor, begin: int, num_kv_heads: int, head_dim: int) -> LayerKV:
    """The layer that begins at byte `begin` of a unit of what `allocate_units` returned, [2, num_blocks, numbers]."""
    first = begin // 2 // unit.dtype.itemsize
    scale_bytes = KV_SCALE_BYTES if unit.dtype == torch.int8 else 0
    part = unit[..., first : first + BLOCK_SIZE * num_kv_heads * (head_dim + scale_bytes)]
    num = BLOCK_SIZE * num_kv_heads * head_dim
    numbers = part[..., :num].view(*part.shape[:-1], BLOCK_SIZE, num_kv_heads, head_dim)
    if not scale_bytes:
        return LayerKV(numbers[0], numbers[1])
    scales = part[..., num:].view(torch.bfloat16).view(*part.shape[:-1], BLOCK_SIZE, num_kv_heads)
    return LayerKV(numbers[0], numbers[1], scales[0], scales[1])


def quantize_heads(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., D] int8 and scales [...] bfloat16 of `values` [..., D], computed in float32.

    Codes are values divided by the scale, to the nearest, ties to even. A scale is the largest magnitude / MOST,
    rounded up to bfloat16, so that no code is beyond MOST. Numbers that are nearly zero become zero. A scale is NaN if
    any number is not finite.
    """
    wide = values.float()
    steps = wide.abs().amax(-1) / MOST + (wide * 0).sum(-1)
    steps = ((steps.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    is_zero = steps < torch.finfo(torch.float32).tiny
    inverse = torch.where(is_zero, 0, 1 / steps)
    codes = torch.round(wide * inverse[..., None]).nan_to_num_().to(torch.int8)
    return codes, torch.where(is_zero, 0, steps).to(torch.bfloat16)


def dequantize_heads(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., D] float32 of codes [..., D] and scales [...]; exact."""
    return codes.float() * scales.float()[..., None]


def swap_blocks(swap: Tensor, memory: Tensor) -> Tensor:
    """Swap space, uint8 [num_swap_blocks, bytes of a block], as blocks of `memory`: [num_swap_blocks, num_layers, 2,
    dimensions of a block]."""
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
