"""Dequantizes single weights from the planes of `device_matrix.py`, on the GPU."""

import triton
import triton.language as tl


@triton.jit
def code_number(
    values,
    scales,
    minimums,
    row,
    columns,
    inside,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """Weights of a row at `columns`, float32; 0 where not `inside`. One load per weight: for single rows, not matmuls.

    `row` int64 is a scalar or has the shape of `columns`; STRIDE is the length of a row of `values`.
    """
    if GROUP == 0:
        number = tl.load(values + row * STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        group = columns // GROUP
        if PACKED:
            place = columns % GROUP
            half = place // (GROUP // 2)
            byte = tl.load(values + row * STRIDE + group * (GROUP // 2) + place % (GROUP // 2), mask=inside, other=0)
            code = ((byte.to(tl.int32) >> (4 * half)) & 15) - ZERO
            at = row * (STRIDE * 2 // GROUP) + group
        else:
            code = tl.load(values + row * STRIDE + columns, mask=inside, other=0).to(tl.int32)
            at = row * (STRIDE // GROUP) + group
        number = code.to(tl.float32) * tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_MINIMUMS:
            number += tl.load(minimums + at, mask=inside, other=0.0).to(tl.float32)
    return number
