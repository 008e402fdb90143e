"""Formulas of ops in numpy."""

import numpy as np

from tests.kernels.cpu.quantized import EPS, TINY

ROWS = [*range(1, 14), 32, 50]
"""Every number of rows of one tile, for any instruction set, and numbers that need several tiles."""
PAIR = 8


def rms_norm(residual: np.ndarray, weight: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """The formula and its error: a sum of K squares, a square root that halves the error, and five roundings."""
    wide = residual.astype(np.float64)
    out = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(eps)) * weight
    return out, (residual.shape[1] / 2 + 5) * EPS * np.abs(out) + TINY
