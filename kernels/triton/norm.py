"""Residual, norms and embedding: the ops between a model's matmuls.

A matmul returns split-K partials, a tensor [P, M, N] whose sum over P is its result. The next kernel sums them in the
order of P, so the result does not depend on the order of programs, and no matmul waits for its own partials. The
residual is float32.

There is one program per row: it reads a row of a few thousand numbers at once, 16 bytes per thread, and keeps it in
registers until it is scaled.

Shapes: M tokens, H hidden size, P split-K partials, S samples.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.gemm.codes import code_number
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.inputs import sum_partials
from pipeline.kernels.triton.launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMS norm, or with `centers` a layer norm: the mean is subtracted first."""

    weight: Tensor
    """[H] float32"""
    bias: Tensor | None = None
    """[H] float32"""
    centers: bool = False


@dataclass(frozen=True, slots=True)
class Sublayer:
    """How the result of attention, or of a feed-forward layer, is added to the residual."""

    norm: NormWeights | None = None
    """Of the result."""
    factor: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.norm is None and self.factor == 1.0


PLAIN = Sublayer()


def add_norm(
    out: Tensor | None,
    residual: Tensor,
    split_k_partials: Tensor | None,
    norm: NormWeights | None,
    eps: float,
    before: Sublayer = PLAIN,
) -> None:
    """`residual += before.norm(split_k_partials.sum(0)) * before.factor`, then `out = norm(residual)`; without `norm`,
    `out = residual`. Without `out`, only the first.

    out [M, H], which may be the residual, residual [M, H] float32, split_k_partials [P, M, H] of any dtype or None.
    """
    _launch(out, residual, split_k_partials, None, norm, eps, before)


def take_norm(
    out: Tensor, residual: Tensor, split_k_partials: Tensor | None, index: Tensor, norm: NormWeights | None, eps: float
) -> None:
    """The same for rows `index` only, before the head. The residual is not modified.

    out [S, H], residual [M, H] float32, split_k_partials [P, M, H] or None, index [S] int32.
    """
    _launch(out, residual, split_k_partials, index, norm, eps, PLAIN)


def _launch(
    out: Tensor | None,
    residual: Tensor,
    split_k_partials: Tensor | None,
    index: Tensor | None,
    norm: NormWeights | None,
    eps: float,
    before: Sublayer,
) -> None:
    num_tokens, width = residual.shape
    unused = residual
    own, post = _vectors(norm, "", unused), _vectors(before.norm, "POST_", unused)
    _norm[(num_tokens if index is None else len(index),)](
        unused if out is None else out,
        residual,
        unused if split_k_partials is None else split_k_partials,
        unused if index is None else index,
        *own[0],
        *post[0],
        num_tokens,
        eps,
        WIDTH=width,
        BLOCK=next_power_of_2(width),
        NUM_PARTIALS=0 if split_k_partials is None else len(split_k_partials),
        TAKE=index is not None,
        WRITES=out is not None,
        FACTOR=before.factor,
        **own[1],
        **post[1],
        num_warps=_num_warps(width),
    )


def _vectors(norm: NormWeights | None, prefix: str, unused: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """The vectors of a norm, and its constants."""
    kind = "none" if norm is None else "layer" if norm.centers else "rms"
    bias = None if norm is None else norm.bias
    vectors = unused if norm is None else norm.weight, unused if bias is None else bias
    return vectors, {f"{prefix}KIND": kind, f"{prefix}BIASED": bias is not None}


def embed(
    residual: Tensor,
    table: DeviceMatrix,
    ids: Tensor,
    scale: float = 1.0,
    learned: DeviceMatrix | None = None,
    positions: Tensor | None = None,
    offset: int = 0,
    part: range | None = None,
) -> None:
    """`residual[i] = table[ids[i]] * scale + learned[positions[i] + offset]`.

    residual [M, H] float32; table [V, H] and learned [rows, H] in any format; ids and positions [M] int32. With `part`,
    the table has only the rows of these ids, and those of others count as zeros.
    """
    num_tokens, width = residual.shape
    block = min(next_power_of_2(width), 1024)
    assert (learned is None) == (positions is None)
    _embed[(num_tokens, triton.cdiv(width, block))](
        residual,
        table.planes(),
        ids,
        (learned or table).planes(),
        ids if positions is None else positions,
        WIDTH=width,
        SCALE=scale,
        HAS_POSITIONS=positions is not None,
        OFFSET=offset,
        FIRST=0 if part is None else part.start,
        NUM_ROWS=0 if part is None else len(part),
        BLOCK=block,
        num_warps=4,
    )


def _num_warps(width: int) -> int:
    """Warps for 8 numbers per thread, at most 16."""
    return max(1, min(16, next_power_of_2(width) // 256))


@triton.jit
def normalized(
    hidden, weight, bias, columns, inside, eps, WIDTH: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr
):
    """The norm of a row of WIDTH numbers, 0 where not `inside`; weight and bias are read at `columns`."""
    if KIND == "none":
        result = hidden
    else:
        if KIND == "layer":
            hidden = tl.where(inside, hidden - tl.sum(hidden, axis=0) / WIDTH, 0.0)
        scale = 1.0 / tl.sqrt(tl.sum(hidden * hidden, axis=0) / WIDTH + eps)
        result = hidden * scale * tl.load(weight + columns, mask=inside, other=0.0)
        if BIASED:
            result += tl.load(bias + columns, mask=inside, other=0.0)
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def _norm(
    out,
    residual,
    split_k_partials,
    index,
    weight,
    bias,
    post_weight,
    post_bias,
    num_tokens,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    TAKE: tl.constexpr,
    WRITES: tl.constexpr,
    FACTOR: tl.constexpr,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    POST_KIND: tl.constexpr,
    POST_BIASED: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(index + row) if TAKE else row
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    # An offset in a row is below 2^31, but one over all rows and partials may not be.
    at = source.to(tl.int64) * WIDTH
    hidden = tl.load(residual + at + columns, mask=inside, other=0.0)
    distance = num_tokens.to(tl.int64) * WIDTH
    if POST_KIND == "none" and FACTOR == 1.0:
        for part in tl.static_range(NUM_PARTIALS):
            begin = split_k_partials + at + part * distance
            hidden += tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
    elif NUM_PARTIALS > 0:
        added = sum_partials(split_k_partials + at, columns, inside, distance, NUM_PARTIALS)
        added = normalized(added, post_weight, post_bias, columns, inside, eps, WIDTH, POST_KIND, POST_BIASED)
        hidden += added * FACTOR
    if NUM_PARTIALS > 0 and not TAKE:
        tl.store(residual + at + columns, hidden, mask=inside)
    if WRITES:
        result = normalized(hidden, weight, bias, columns, inside, eps, WIDTH, KIND, BIASED)
        tl.store(out + row.to(tl.int64) * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _embed(
    residual,
    weight,
    ids,
    learned,
    positions,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    OFFSET: tl.constexpr,
    FIRST: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    row = tl.load(ids + token).to(tl.int64)
    there = inside
    if NUM_ROWS > 0:
        row -= FIRST
        there = inside & (row >= 0) & (row < NUM_ROWS)
        row = tl.minimum(tl.maximum(row, 0), NUM_ROWS - 1)
    numbers = tl.where(there, code_number(weight, row, columns, there) * SCALE, 0.0)
    if HAS_POSITIONS:
        position = tl.load(positions + token).to(tl.int64) + OFFSET
        numbers += code_number(learned, position, columns, inside)
    tl.store(residual + token.to(tl.int64) * WIDTH + columns, numbers, mask=inside)
