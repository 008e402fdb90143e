"""Dequantizes weights into scratch memory for cuBLAS, and adds the bias to its results."""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.gemm.codes import code_number
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix

BLOCK = 1024


def dequantize_rows(out: Tensor, matrix: DeviceMatrix, begin: int) -> None:
    """`out = matrix[begin : begin + n]`. out [n, K] of the matrix's dtype."""
    assert matrix.scales is not None
    num_rows, width = out.shape
    _dequantize[(num_rows, triton.cdiv(width, BLOCK))](
        out,
        matrix.values,
        matrix.scales,
        matrix.values if matrix.minimums is None else matrix.minimums,
        begin,
        WIDTH=width,
        STRIDE=matrix.values.shape[1],
        GROUP=matrix.group,
        ZERO=matrix.zero,
        PACKED=matrix.form == "int4",
        HAS_MINIMUMS=matrix.minimums is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


def add_bias(out: Tensor, bias: Tensor) -> None:
    """`out += bias`. out [M, N] of any dtype, bias [N] float32."""
    num_tokens, width = out.shape
    _add_bias[(num_tokens, triton.cdiv(width, BLOCK))](out, bias, WIDTH=width, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["begin"])
def _dequantize(
    out,
    values,
    scales,
    minimums,
    begin,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    numbers = code_number(
        values, scales, minimums, begin + row, columns, inside, STRIDE, GROUP, ZERO, PACKED, HAS_MINIMUMS
    )
    tl.store(out + row * WIDTH + columns, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_bias(out, bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = out + tl.program_id(0).to(tl.int64) * WIDTH + columns
    sums = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside)
