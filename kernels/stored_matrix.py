"""The weight of a linear layer in its stored format: floats, or blocks of 32 columns with a scale.

A block of each quantized format, as in a .gguf file (w is the dequantized weight):

    q8_0  34 bytes   d: f16 │ q: 32 × int8                                   w = d * q
    q4_0  18 bytes   d: f16 │ q: 32 × 4 bits                                 w = d * (q - 8)
    q4_1  20 bytes   d: f16 │ m: f16 │ q: 32 × 4 bits                        w = d * q + m

Byte i of 4-bit codes holds column i in its low half and column i + 16 in its high half. This module imports no torch:
the CPU library reads stored matrices as they are. kernels/matrix.py converts and quantizes them.

Shapes: N rows, K columns.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FloatFormat = Literal["bf16", "f32"]
Format = Literal["bf16", "f32", "q8_0", "q4_1", "q4_0"]

GROUP = 32
"""Columns per scale."""
BLOCK_BYTES: dict[Format, int] = {"q8_0": 34, "q4_1": 20, "q4_0": 18}
DTYPES: dict[Format, np.dtype[Any]] = {"bf16": np.dtype(np.uint16), "f32": np.dtype(np.float32)}
"""The numpy dtypes of the float formats. numpy has no bfloat16, so it holds the bits."""


def row_bytes(format: Format, num_columns: int) -> int:
    """Bytes of a row in blocks. Raises ValueError unless the columns are whole groups."""
    if num_columns % GROUP:
        raise ValueError(f"{format} takes columns in groups of {GROUP}, not {num_columns}")
    return num_columns // GROUP * BLOCK_BYTES[format]


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A weight [N, K] in host memory. Raises ValueError if `data` doesn't match the format and the sizes."""

    format: Format
    data: "np.ndarray[Any, np.dtype[Any]]"
    """[N, K] uint16 (the bits of bfloat16) or float32; for blocks [N, row_bytes] uint8. C-contiguous."""
    num_rows: int
    num_columns: int

    def __post_init__(self) -> None:
        if self.format in BLOCK_BYTES:
            expected, dtype = (self.num_rows, row_bytes(self.format, self.num_columns)), np.dtype(np.uint8)
        else:
            expected, dtype = (self.num_rows, self.num_columns), DTYPES[self.format]
        if self.data.shape != expected or self.data.dtype != dtype or not self.data.flags.c_contiguous:
            raise ValueError(
                f"a stored {self.format} matrix of {self.num_rows} rows and {self.num_columns} columns is contiguous "
                f"{dtype} {list(expected)}, not {self.data.dtype} {list(self.data.shape)}"
            )

    def row_addresses(self) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """The address of each row, [N]. Valid while `data` lives."""
        return self.data.ctypes.data + np.arange(self.num_rows, dtype=np.uint64) * np.uint64(self.data.strides[0])
