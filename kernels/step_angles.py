"""Angles of rotary embedding that are made for each step: the pairs of a head's dimensions turn by different
coordinates of a token (M-RoPE: Wang et al., 2024, arXiv:2409.12191; patches of images).

Shapes: T max_num_tokens, P pairs of dimensions, C coordinates.
"""

from typing import Any

import numpy as np

LongArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class StepAngles:
    """The cosines and sines of one step's tokens. The arrays keep their addresses, which recorded programs contain."""

    def __init__(self, cos: FloatArray, sin: FloatArray, axes: LongArray, max_num_tokens: int) -> None:
        """`cos` and `sin` are tables of every value of a coordinate, float32 [values, P]; `axes` [P] says which
        coordinate turns each pair."""
        assert cos.shape == sin.shape == (len(cos), len(axes)), "tables of angles with other pairs than the axes"
        self._tables = cos, sin
        self._columns = [np.flatnonzero(axes == axis) for axis in range(int(axes.max(initial=0)) + 1)]
        self.cos: FloatArray = np.ones((max_num_tokens, len(axes)), np.float32)
        """[T, P]"""
        self.sin: FloatArray = np.zeros((max_num_tokens, len(axes)), np.float32)
        """[T, P]"""
        self.rows: LongArray = np.arange(max_num_tokens, dtype=np.int64)
        """[T]; the row of each token in both."""

    def fill(self, coordinates: "np.ndarray[Any, Any]") -> None:
        """Set the next step, of tokens with these coordinates: integers [C, tokens], or [tokens] if they are equal."""
        for table, out in zip(self._tables, (self.cos, self.sin), strict=True):
            if coordinates.ndim == 1:
                np.take(table, coordinates, axis=0, out=out[: len(coordinates)])
                continue
            for columns, values in zip(self._columns, coordinates, strict=False):
                out[: len(values), columns] = table[values[:, None], columns]
