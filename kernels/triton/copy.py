"""Copies KV blocks: inside the KV memory, and between it and packed memory, in which a block is contiguous.

A block in the KV memory has two pieces per layer, keys and values. To move it over the bus in one copy, it is gathered
into packed memory before it leaves the GPU, and scattered after it arrives.

Shapes: A pieces of a block, W int32 words of a piece, M blocks of the KV memory, N copied blocks.
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
def _copy(
    target,
    source,
    targets,
    sources,
    TARGET_BLOCK: tl.constexpr,
    TARGET_PIECE: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    SOURCE_PIECE: tl.constexpr,
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
    to_place = target + to_block * TARGET_BLOCK + piece * TARGET_PIECE
    from_place = source + from_block * SOURCE_BLOCK + piece * SOURCE_PIECE
    for begin in range(0, WORDS, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        tl.store(to_place + places, tl.load(from_place + places, mask=places < WORDS), mask=places < WORDS)
