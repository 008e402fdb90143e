"""Names of the array types that the scheduler's modules share."""

from typing import Any

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.int32]]
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Float32s = np.ndarray[Any, np.dtype[np.float32]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Float64s = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
