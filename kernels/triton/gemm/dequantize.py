"""Dequantizes weights into scratch memory for cuBLAS, and adds the bias to its results."""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.gemm.codes import code_number
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix

BLOCK = 1024


def dequantize_rows(out: Tensor, matrix: DeviceMatrix, begin: int) -> None:
    """`out = matrix[begin : begin + n]`. out [n, K] of the matrix's dtype."""
    num_rows, width = out.shape
    _dequantize[(num_rows, triton.cdiv(width, BLOCK))](
        out, matrix.planes(), begin, WIDTH=width, BLOCK=BLOCK, num_warps=4
    )


def add_bias(out: Tensor, bias: Tensor) -> None:
    """`out += bias`. out [M, N] of any dtype, whose rows may be parts of longer ones; bias [N] float32."""
    num_tokens, width = out.shape
    grid = num_tokens, triton.cdiv(width, BLOCK)
    _add_bias[grid](out, bias, WIDTH=width, STRIDE=out.stride(0), BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["begin"])
def _dequantize(
    out,
    weight,
    begin,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    numbers = code_number(weight, begin + row, columns, inside)
    tl.store(out + row * WIDTH + columns, numbers.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_bias(out, bias, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = out + tl.program_id(0).to(tl.int64) * STRIDE + columns
    sums = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(at, sums.to(out.dtype.element_ty), mask=inside)
