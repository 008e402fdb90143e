"""Noise that is a pure function of (seed, index, position, id): it has no state, so it does not depend on the batch.

kernels/sampling/noise_keys.py makes the key of a sample. The noise of an id mixes the key's two halves with the id by
two rounds of a 32-bit integer hash (Mueller's multipliers, as in "hash-prospector" by Wellons).
"""

import numpy as np
import torch
from torch import Tensor

from pipeline.kernels.sampling.noise_keys import KeyArray

_MULTIPLY_1 = 0x21F0AAAD
_MULTIPLY_2 = 0x735A2D97
_LARGEST = 1 - 2.0**-24


def halves(keys: KeyArray) -> Tensor:
    """Keys for tensors: [N] u64 → [N, 2] int32, the same bits, the lower half first."""
    return torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy())


def exponential(keys: Tensor, num: int) -> Tensor:
    """Exponentially distributed noise of mean 1 for ids 0 .. num: keys [N, 2] int32, as `halves` gives them;
    returns [N, num] float32, all positive and finite."""
    # int32 is used as uint32: products wrap, and right shifts need their sign bits masked.
    bits = _mix(torch.arange(num, dtype=torch.int32, device=keys.device) ^ keys[:, :1])
    bits = _mix(bits ^ keys[:, 1:])
    # Small numbers keep their relative precision, so unlikely ids win as often as they should.
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST)
    return uniform.neg_().log1p_().neg_()


def _mix(bits: Tensor) -> Tensor:
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits.mul_(_MULTIPLY_1)
    bits ^= (bits >> 15) & 0x1FFFF
    bits = bits.mul_(_MULTIPLY_2)
    bits ^= (bits >> 15) & 0x1FFFF
    return bits
