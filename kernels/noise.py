"""Noise that is a pure function of (seed, index, position, id): it has no state, so it does not depend on the batch.

The key of a sample is a chain of splitmix64 steps (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) over seed, index and position. The noise of an id mixes the key's two halves with the id by two
rounds of a 32-bit integer hash (Mueller's multipliers, as in "hash-prospector" by Wellons).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

KeyArray = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_U64 = (1 << 64) - 1
_MULTIPLY_1 = 0x21F0AAAD
_MULTIPLY_2 = 0x735A2D97
_LARGEST = 1 - 2.0**-24


def splitmix64(state: int) -> int:
    """One step's output; `state` and the result are u64."""
    z = (state + _GOLDEN) & _U64
    z = ((z ^ (z >> 30)) * _MIX_1) & _U64
    z = ((z ^ (z >> 27)) * _MIX_2) & _U64
    return z ^ (z >> 31)


def sequence_key(seed: int, index: int) -> int:
    """The u64 noise key of sequence `index` of a request with the u64 `seed`."""
    return splitmix64(splitmix64(seed) ^ index)


def noise_keys(keys: KeyArray, positions: "np.ndarray[Any, Any]") -> KeyArray:
    """The sample's key for each of `keys` [N] at `positions` [N]. Returns [N] u64."""
    with np.errstate(over="ignore"):
        z = (keys ^ positions.astype(np.uint64)) + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        drawn: KeyArray = z ^ (z >> np.uint64(31))
    return drawn


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
