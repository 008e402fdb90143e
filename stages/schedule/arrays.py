"""Array types that the scheduler's modules share."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.shm.arrays import Array

Ids = np.ndarray[Any, np.dtype[np.int32]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

Put = Callable[["np.ndarray[Any, Any]"], Array]
"""Puts an array into a message: inline or in shared memory."""
PutFor = Callable[[str], Put]
"""By the name of the process that reads the message."""
Take = Callable[[Array, Any], "np.ndarray[Any, Any]"]
"""Takes an array of a dtype out of a message."""

NO_ROWS: Int64s = np.zeros(0, np.int64)
