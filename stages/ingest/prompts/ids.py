"""Arrays of token ids."""

import numpy as np

Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
PART_IDS = 65536
"""Ids that are converted at a time: about 2 ms."""


def as_int32(ids: list[int]) -> Ids:
    """A list as an array. It is made in parts, between which other threads run. Raises OverflowError."""
    if len(ids) <= PART_IDS:
        return np.array(ids, np.int32)
    parts = [np.array(ids[begin : begin + PART_IDS], np.int32) for begin in range(0, len(ids), PART_IDS)]
    return np.concatenate(parts)
