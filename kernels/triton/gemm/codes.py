"""Dequantizes single weights from the planes of `device_matrix.py`, on the GPU."""

import triton
import triton.language as tl

from pipeline.kernels.triton.gemm.planes import group_scales
from pipeline.kernels.triton.gemm.unpack import fp8_to_float


@triton.jit
def code_number(weight, row, columns, inside):
    """Weights of a row at `columns`, float32; 0 where not `inside`. A few loads per weight: for single rows, not
    matmuls. Numbers equal those of `Matrix.dequantize`.

    `weight` are `Planes`. `row` int64 is a scalar or has the shape of `columns`.
    """
    STRIDE: tl.constexpr = weight.STRIDE
    GROUP: tl.constexpr = weight.GROUP
    NUM_GROUPS: tl.constexpr = weight.NUM_GROUPS
    HIGH_BITS: tl.constexpr = weight.HIGH_BITS
    if weight.FORM == "float":
        number = tl.load(weight.data + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        group = columns // GROUP
        first, second, least = group_scales(weight, row, group, inside)
        if weight.FORM == "int4":
            offset = columns % (GROUP // 2)
            half = columns % GROUP // (GROUP // 2)
            byte = tl.load(weight.data + row * STRIDE + group * (GROUP // 2) + offset, mask=inside, other=0)
            code = (byte.to(tl.int32) >> (4 * half)) & 15
            if HIGH_BITS > 0:
                at = (row * NUM_GROUPS + group) * HIGH_BITS + (half if HIGH_BITS == 2 else 0)
                word = tl.load(weight.high + at, mask=inside, other=0)
                bit = 8 * (offset % 4) + HIGH_BITS * (offset // 4) + (4 * half if HIGH_BITS == 1 else 0)
                code |= ((word >> bit) & (2**HIGH_BITS - 1)) << 4
            scale = tl.where(half == 0, first, second) if weight.SCALES == "two" else first
            number = (code - weight.ZERO).to(tl.float32) * scale
        else:
            byte = tl.load(weight.data + row * STRIDE + columns, mask=inside, other=0).to(tl.int32)
            number = (fp8_to_float(byte) if weight.FORM == "fp8" else byte.to(tl.float32)) * first
        if weight.HAS_MINIMUMS:
            number += least
    return number
