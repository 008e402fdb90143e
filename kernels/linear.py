"""A linear layer: `out = x @ weight.T + bias`, with sums in float32 at least.

A row's result does not depend on the other rows, nor on their number: torch sums in other orders for other numbers of
rows, so each matmul has `ROWS` rows, in new memory, and the last ones may be padding. tests/kernels/test_invariance.py
checks that a row's bits don't depend on its place in such a matmul either.

There are two versions for the CPU. `linear` uses torch's matmul. `linear_upcast` is for bfloat16 on CPUs without
bfloat16 instructions, where torch's matmul of several rows is about eight times slower than float32: it converts the
weight to float32 tile by tile, so that the tile is still in the cache when it is multiplied.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 16
"""Rows of a matmul. With fewer, prompts take longer; with more, a step of one token does."""

TILE_ELEMENTS = 1 << 21
"""Elements of a weight to convert at once: 8 MiB as float32."""


def blocks_of(x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The rows of x [N, K] in copies of ROWS rows, the last one padded with zeros: begin, end, [ROWS, K]."""
    for begin in range(0, len(x), ROWS):
        end = min(begin + ROWS, len(x))
        block = x.new_zeros(ROWS, x.shape[1])
        block[: end - begin] = x[begin:end]
        yield begin, end, block


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] @ weight [M, K].T, the same bits for a row in any batch. Returns [N, M]."""
    out = x.new_empty(len(x), len(weight))
    linear(out, x, weight, None)
    return out


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [N, M], x [N, K], weight [M, K], bias [M] or None."""
    transposed = weight.t()
    for begin, end, block in blocks_of(x):
        made = torch.mm(block, transposed) if bias is None else torch.addmm(bias, block, transposed)
        out[begin:end] = made[: end - begin]


def linear_upcast(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The same for bfloat16 weights, multiplied as float32 and rounded once at the end."""
    blocks = list(blocks_of(x.float()))
    width = max(1, TILE_ELEMENTS // weight.shape[1])
    for first in range(0, len(weight), width):
        tile = weight[first : first + width].float().t()
        for begin, end, block in blocks:
            made = torch.mm(block, tile)
            if bias is not None:
                made += bias[first : first + width]
            out[begin:end, first : first + width] = made[: end - begin]


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The formula in float64."""
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()
