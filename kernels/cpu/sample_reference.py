"""The draw of sample.h by its definition: in float64, with sorts, and without torch.

Both read the same uniform number from a key, so they draw the same id, except where that number lies within rounding
of the boundary between two ids.
"""

from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.floating[Any]]]
DoubleArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


def weights_reference(logits: FloatArray, temperature: float) -> DoubleArray:
    """The probability of each id relative to that of the likeliest, before any filter. logits [V]; returns [V].
    NaN counts as -inf, and at least one logit is finite."""
    return np.exp(_scaled(logits, temperature))


def kept_reference(logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float) -> BoolArray:
    """Which ids the filters leave. logits [V]; returns [V]."""
    weights = weights_reference(logits, temperature)
    kept: BoolArray = np.isfinite(logits)
    if min_p > 0:
        # Among logarithms, because next to 1 the largest ones differ by more than their weights can show.
        kept &= _scaled(logits, temperature) >= np.log(min_p)
    if 0 < top_k < kept.sum():
        kept &= logits >= np.sort(logits[kept])[-top_k]
    if top_p < 1:
        values, inverse = np.unique(logits[kept], return_inverse=True)
        masses = np.bincount(inverse, weights[kept])
        # What all larger values hold, for each value.
        above = np.append(np.cumsum(masses[:0:-1])[::-1], 0)
        kept &= logits >= values[above < top_p * masses.sum()].min()
    return kept


def sample_reference(logits: FloatArray, temperature: float, top_k: int, top_p: float, min_p: float, key: int) -> int:
    """One id. logits [V], at least one finite and none +inf; `temperature` above 0; `top_k` 0, `top_p` 1 and `min_p` 0
    are off; `key` is a u64, of which the upper 53 bits are the uniform number."""
    weights = weights_reference(logits, temperature)
    weights[~kept_reference(logits, temperature, top_k, top_p, min_p)] = 0
    cumulative = np.cumsum(weights)
    chosen = int(np.searchsorted(cumulative, (key >> 11) * 2.0**-53 * cumulative[-1], side="right"))
    return min(chosen, int(np.flatnonzero(weights)[-1]))


def _scaled(logits: FloatArray, temperature: float) -> DoubleArray:
    """The logarithms of the weights."""
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    scaled: DoubleArray = (values - values.max()) / temperature
    return scaled
