"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685): `out += B (A x)`, with the A and B of each token's adapter.

Two launches for each linear layer: `_shrink` computes A x of all its projections, `_expand` adds B times that. Which
adapter a token has is data, so one captured graph serves any adapters. A token's numbers do not depend on others.

Shapes: T tokens of a step with padding, K inputs of a layer, N outputs of its projections, one below the other, R the
largest rank that a projection may have.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_RANKS = 16
BLOCK_INPUTS = 256
BLOCK_OUTPUTS = 128
MAX_TARGETS = 3


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """The matrices of the adapters in all slots, for one linear layer."""

    a: Tensor
    """[slots, targets, R, K]; rows of a slot are contiguous. Zeros from an adapter's rank on"""
    b: Tensor
    """[slots, R, N]; likewise"""
    ranks: Tensor
    """[slots, targets] int32: 0 if the slot's adapter does not change a projection. A row of it is contiguous"""
    ends: tuple[int, ...]
    """The outputs of all projections up to each."""


def scratch(max_num_tokens: int, max_rank: int, device: torch.device | str) -> Tensor:
    """Memory for A x, which all layers share."""
    return torch.zeros(max_num_tokens, MAX_TARGETS * max_rank, dtype=torch.float32, device=device)


def add(out: Tensor, x: Tensor, adapters: Tensor, matrices: LoraMatrices, shrunk: Tensor) -> None:
    """out [T, N] += B A x, x [T, K]. adapters [T] int32: the slot of each token's adapter, or -1. `shrunk` is
    `scratch`."""
    _, num_targets, max_rank, num_inputs = matrices.a.shape
    num_tokens, num_outputs = out.shape
    ends = (*matrices.ends, *[num_outputs] * MAX_TARGETS)
    chunks = triton.cdiv(max_rank, BLOCK_RANKS)
    _shrink[(num_tokens, num_targets * chunks)](
        *(shrunk, x, matrices.a, matrices.ranks, adapters, x.stride(0), matrices.a.stride(0), matrices.ranks.stride(0)),
        K=num_inputs,
        MAX_RANK=max_rank,
        CHUNKS=chunks,
        STRIDE=shrunk.stride(0),
        BLOCK_R=BLOCK_RANKS,
        BLOCK_K=BLOCK_INPUTS,
        num_warps=4,
    )
    _expand[(num_tokens, triton.cdiv(num_outputs, BLOCK_OUTPUTS))](
        *(out, shrunk, matrices.b, matrices.ranks, adapters, out.stride(0), matrices.b.stride(0)),
        matrices.ranks.stride(0),
        N=num_outputs,
        FIRST_END=ends[0],
        SECOND_END=ends[1],
        MAX_RANK=max_rank,
        STRIDE=shrunk.stride(0),
        BLOCK_R=BLOCK_RANKS,
        BLOCK_N=BLOCK_OUTPUTS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["x_stride", "slot_stride", "ranks_stride"])
def _shrink(
    shrunk,
    x,
    a,
    ranks,
    adapters,
    x_stride,
    slot_stride,
    ranks_stride,
    K: tl.constexpr,
    MAX_RANK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0)
    target = tl.program_id(1) // CHUNKS
    first = tl.program_id(1) % CHUNKS * BLOCK_R
    slot = tl.load(adapters + token)
    rank = tl.load(ranks + slot.to(tl.int64) * ranks_stride + target, mask=slot >= 0, other=0)
    if first < rank:
        k = first + tl.arange(0, BLOCK_R)
        weights = a + slot.to(tl.int64) * slot_stride + target * MAX_RANK * K
        sums = tl.zeros((BLOCK_R,), tl.float32)
        for begin in range(0, K, BLOCK_K):
            offsets = begin + tl.arange(0, BLOCK_K)
            values = tl.load(x + token.to(tl.int64) * x_stride + offsets, mask=offsets < K, other=0).to(tl.float32)
            there = (k < rank)[:, None] & (offsets < K)[None, :]
            tile = tl.load(weights + k[:, None] * K + offsets[None, :], mask=there, other=0).to(tl.float32)
            sums += tl.sum(tile * values[None, :], 1)
        tl.store(shrunk + token * STRIDE + target * MAX_RANK + k, sums, mask=k < rank)


@triton.jit(do_not_specialize=["out_stride", "slot_stride", "ranks_stride"])
def _expand(
    out,
    shrunk,
    b,
    ranks,
    adapters,
    out_stride,
    slot_stride,
    ranks_stride,
    N: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    MAX_RANK: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(adapters + token)
    if slot >= 0:
        target = (n >= FIRST_END).to(tl.int32) + (n >= SECOND_END).to(tl.int32)
        rank = tl.load(ranks + slot.to(tl.int64) * ranks_stride + target, mask=n < N, other=0)
        most = tl.max(rank, 0)
        sums = tl.zeros((BLOCK_N,), tl.float32)
        first = 0
        while first < most:
            k = first + tl.arange(0, BLOCK_R)
            there = k[:, None] < rank[None, :]
            small = tl.load(shrunk + token * STRIDE + target[None, :] * MAX_RANK + k[:, None], mask=there, other=0)
            offset = slot.to(tl.int64) * slot_stride + k[:, None].to(tl.int64) * N + n[None, :]
            sums += tl.sum(tl.load(b + offset, mask=there, other=0).to(tl.float32) * small, 0)
            first += BLOCK_R
        pointers = out + token.to(tl.int64) * out_stride + n
        changed = rank > 0
        total = tl.load(pointers, mask=changed, other=0).to(tl.float32) + sums
        tl.store(pointers, total.to(out.dtype.element_ty), mask=changed)
