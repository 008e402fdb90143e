"""Copies KV blocks: inside the KV memory, and between it and packed memory, in which a block is contiguous.

A block in the KV memory has two pieces per layer, keys and values. To move it over the bus in one copy, it is gathered
into packed memory before it leaves the GPU, and scattered after it arrives.

Shapes: A pieces of a block, W int32 words of a piece, a multiple of 4, M blocks of the KV memory, N copied blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def gather(packed: Tensor, memory: Tensor, sources: Tensor) -> None:
    """`packed[i] = memory[:, sources[i]]`. packed [N or more, A, W], memory [A, M, W], sources [N] int32."""
    _move(packed, memory, sources, sources, packed.stride(), memory.stride(), from_memory=True, to_memory=False)


def scatter(memory: Tensor, targets: Tensor, packed: Tensor) -> None:
    """`memory[:, targets[i]] = packed[i]`, with the same shapes; targets are distinct."""
    _move(memory, packed, targets, targets, memory.stride(), packed.stride(), from_memory=False, to_memory=True)


def fork(memory: Tensor, targets: Tensor, sources: Tensor) -> None:
    """`memory[:, targets[i]] = memory[:, sources[i]]`; targets are distinct, and none is a source."""
    _move(memory, memory, targets, sources, memory.stride(), memory.stride(), from_memory=True, to_memory=True)


def _move(
    target: Tensor,
    source: Tensor,
    targets: Tensor,
    sources: Tensor,
    target_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
    *,
    from_memory: bool,
    to_memory: bool,
) -> None:
    pieces, words = (source if from_memory else target).shape[0], target.shape[2]
    assert words % 4 == 0
    _copy[(len(targets), pieces)](
        *(target, source, targets, sources),
        # Strides by block and by piece: packed memory has blocks outermost, KV memory has pieces outermost.
        *((target_strides[1], target_strides[0]) if to_memory else (target_strides[0], target_strides[1])),
        *((source_strides[1], source_strides[0]) if from_memory else (source_strides[0], source_strides[1])),
        words,
        from_memory,
        to_memory,
        BLOCK,
        num_warps=8,
    )


@triton.jit
def _aligned(stride):
    return tl.multiple_of(stride.to(tl.int64), 4)


@triton.jit(do_not_specialize=["target_block", "target_piece", "source_block", "source_piece"])
def _copy(
    target,
    source,
    targets,
    sources,
    target_block,
    target_piece,
    source_block,
    source_piece,
    WORDS: tl.constexpr,
    FROM_MEMORY: tl.constexpr,
    TO_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    to_block, from_block = i, i
    if TO_MEMORY:
        to_block = tl.load(targets + i).to(tl.int64)
    if FROM_MEMORY:
        from_block = tl.load(sources + i).to(tl.int64)
    # Strides are arguments, so that the size of the KV memory needs no kernel of its own. The compiler can't know that
    # they are multiples of 16 bytes.
    to_pointer = target + to_block * _aligned(target_block) + piece * _aligned(target_piece)
    from_pointer = source + from_block * _aligned(source_block) + piece * _aligned(source_piece)
    for begin in range(0, WORDS, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        tl.store(to_pointer + offsets, tl.load(from_pointer + offsets, mask=offsets < WORDS), mask=offsets < WORDS)
