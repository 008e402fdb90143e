"""The noise of kernels/sampling/noise.py on the GPU, as device functions: the same keys and the same integers, bit for
bit.

Logarithms are less exact than in torch, so among nearly equal candidates another one may win.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from pipeline.kernels.triton.launch import INTERPRETED

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_MULTIPLY_1 = tl.constexpr(0x21F0AAAD)
_MULTIPLY_2 = tl.constexpr(0x735A2D97)
_LARGEST = tl.constexpr(1 - 2.0**-24)
_INTERPRETED = tl.constexpr(INTERPRETED)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def noise_key(low, high, position):
    """The key of the sample at `position` of a sequence. `low` and `high` are the halves of its key, int32. Returns two
    uint32."""
    key = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    z = (key ^ position.to(tl.uint64)) + tl.full([], _GOLDEN, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full([], _MIX_1, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full([], _MIX_2, tl.uint64)
    z = z ^ (z >> 31)
    return z.to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def noise_bits(low, high, ids):
    """31 random bits, int32, for each of `ids` int32, from a sample's key."""
    bits = _mix(_mix(ids.to(tl.uint32, bitcast=True) ^ low) ^ high)
    return (bits & 0x7FFFFFFF).to(tl.int32, bitcast=True)


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 16)) * tl.full([], _MULTIPLY_1, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], _MULTIPLY_2, tl.uint32)
    return bits ^ (bits >> 15)


@triton.jit
def log_noise(low, high, ids):
    """The natural logarithm of each id's exponential noise, float32."""
    uniform = (noise_bits(low, high, ids).to(tl.float32) + 0.5) * (2.0**-31)
    return _log2(_minus_log1p(tl.minimum(uniform, _LARGEST))) * _LN_2


@triton.jit
def _minus_log1p(u):
    """-log(1 - u) for 0 < u < 1. The GPU's logarithm has an absolute error, which is large near 1; there, this uses the
    first terms of the series."""
    series = 1 / 6 + u * (1 / 7)
    series = 1 / 4 + u * (1 / 5 + u * series)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * series)))
    return tl.where(u < 0.125, series, _log2(1 - u) * -_LN_2)


@triton.jit
def _log2(x):
    # One instruction with an error of 2^-22, instead of twenty.
    if _INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)
