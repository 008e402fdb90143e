"""Keys of the noise that samples ids: a pure function of (seed, index, position).

The key of a sample is a chain of splitmix64 steps (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014) over seed, index and position. kernels/sampling/noise.py makes the noise of each id from it.
"""

from typing import Any

import numpy as np

KeyArray = np.ndarray[Any, np.dtype[np.uint64]]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_U64 = (1 << 64) - 1


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
