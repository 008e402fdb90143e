"""Residual, RMS norm and embedding: the ops between a model's matmuls.

A matmul returns split-K partials, a tensor [P, M, N] whose sum over P is its result. The next kernel sums them in the
order of P, so the result does not depend on the order of programs, and no matmul waits for its own partials. The
residual is float32.

There is one program per row: it reads a row of a few thousand numbers at once, 16 bytes per thread, and keeps it in
registers until it is scaled.

Shapes: M tokens, H hidden size, P split-K partials, S samples.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.gemm.codes import code_number
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.launch import next_power_of_2


def add_norm(out: Tensor, residual: Tensor, split_k_partials: Tensor | None, weight: Tensor, eps: float) -> None:
    """`residual += split_k_partials.sum(0)`, then `out = residual / sqrt(mean(residual^2) + eps) * weight`.

    out [M, H], residual [M, H] float32, split_k_partials [P, M, H] of any dtype or None, weight [H] float32.
    """
    num_tokens, width = residual.shape
    _norm[(num_tokens,)](
        out,
        residual,
        residual if split_k_partials is None else split_k_partials,
        residual,
        weight,
        num_tokens,
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        NUM_PARTIALS=0 if split_k_partials is None else len(split_k_partials),
        TAKE=False,
        num_warps=_num_warps(width),
    )


def take_norm(
    out: Tensor, residual: Tensor, split_k_partials: Tensor | None, index: Tensor, weight: Tensor, eps: float
) -> None:
    """The same for rows `index` only, before the head. The residual is not modified.

    out [S, H], residual [M, H] float32, split_k_partials [P, M, H] or None, index [S] int32, weight [H] float32.
    """
    num_tokens, width = residual.shape
    _norm[(len(index),)](
        out,
        residual,
        residual if split_k_partials is None else split_k_partials,
        index,
        weight,
        num_tokens,
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        NUM_PARTIALS=0 if split_k_partials is None else len(split_k_partials),
        TAKE=True,
        num_warps=_num_warps(width),
    )


def embed(residual: Tensor, table: DeviceMatrix, ids: Tensor) -> None:
    """`residual[i] = table[ids[i]]`. residual [M, H] float32, table [V, H] in any format, ids [M] int32."""
    num_tokens, width = residual.shape
    block = min(next_power_of_2(width), 1024)
    _embed[(num_tokens, triton.cdiv(width, block))](
        residual, table.planes(), ids, WIDTH=width, BLOCK=block, num_warps=4
    )


def _num_warps(width: int) -> int:
    """Warps for 8 numbers per thread, at most 16."""
    return max(1, min(16, next_power_of_2(width) // 256))


@triton.jit(do_not_specialize=["num_tokens"])
def _norm(
    out,
    residual,
    split_k_partials,
    index,
    weight,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    TAKE: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(index + row) if TAKE else row
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    # An offset in a row is below 2^31, but one over all rows and partials may not be.
    at = source.to(tl.int64) * WIDTH
    hidden = tl.load(residual + at + columns, mask=inside, other=0.0)
    for part in tl.static_range(NUM_PARTIALS):
        begin = split_k_partials + at + part * num_tokens.to(tl.int64) * WIDTH
        hidden += tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
    if NUM_PARTIALS > 0 and not TAKE:
        tl.store(residual + at + columns, hidden, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(hidden * hidden, axis=0) / WIDTH + eps)
    scaled = hidden * scale * tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed(
    residual,
    weight,
    ids,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(ids + token).to(tl.int64)
    numbers = code_number(weight, row, columns, inside)
    tl.store(residual + token.to(tl.int64) * WIDTH + columns, numbers, mask=inside)
