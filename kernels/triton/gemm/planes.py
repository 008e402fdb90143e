"""A weight as an argument of kernels (`Planes`), and the scales of its groups of columns.

Triton passes the fields of a NamedTuple as separate arguments. Fields in capitals are constants of a kernel's variant.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

SUPER = tl.constexpr(8)
"""Groups of a block of 256 columns."""


class Planes(NamedTuple):
    """The tensors of a `DeviceMatrix` (gemm/device_matrix.py), None if it has none, and its constants."""

    data: Tensor
    """`values`, a name that tuples of Triton have already. For matrix-vector products with codes: int32 words"""
    high: Tensor | None
    scales: Tensor | None
    minimums: Tensor | None
    factors: Tensor | None
    FORM: Any
    """`Storage`, a constexpr like all that follow"""
    STRIDE: Any
    """Bytes of a row of `data`; the number of columns if they are floats"""
    GROUP: Any
    """Columns per scale; 0 for floats"""
    NUM_GROUPS: Any
    """Groups of a row"""
    ZERO: Any
    """Subtracted from a code before scaling"""
    HIGH_BITS: Any
    """Bits of a code above its lower four, which `high` has"""
    SCALES: Any
    """`Scales`"""
    HAS_MINIMUMS: Any


@triton.jit
def group_scales(weight, rows, groups, inside):
    """The scales of the first and the second half of a group, and what is added to its weights: float32, exact.

    `rows` int64 and `groups` have shapes that broadcast to that of the result. Groups not `inside` get zeros. The third
    result has no meaning unless the weight has minimums.
    """
    NUM_GROUPS: tl.constexpr = weight.NUM_GROUPS
    at = rows * NUM_GROUPS + groups
    if weight.SCALES == "one":
        first = tl.load(weight.scales + at, mask=inside, other=0.0).to(tl.float32)
        second = first
        if weight.HAS_MINIMUMS:
            least = tl.load(weight.minimums + at, mask=inside, other=0.0).to(tl.float32)
        else:
            least = first
    else:
        pair = tl.load(weight.scales + at, mask=inside, other=0).to(tl.int32)
        factor = tl.load(weight.factors + rows * (NUM_GROUPS // SUPER) + groups // SUPER, mask=inside, other=0)
        if weight.SCALES == "scale and minimum":
            first = _half(factor) * (pair & 255).to(tl.float32)
            second = first
            least = -(_half(factor >> 16) * ((pair >> 8) & 255).to(tl.float32))
        else:
            half = factor.to(tl.float32)
            first = half * ((pair << 24) >> 24).to(tl.float32)
            second = half * (pair >> 8).to(tl.float32)
            least = first
    return first, second, least


@triton.jit
def _half(bits):
    """The float16 in the lower half of an int32, as float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
