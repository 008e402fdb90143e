"""The weight of a linear layer in its stored format: floats, or blocks of columns with scales.

A block of each quantized format, as in a .gguf file (w is the dequantized weight):

    q8_0   32 columns   34 bytes   d: f16 │ q: 32 × int8                                w = d * q
    q4_0   32           18         d: f16 │ q: 32 × 4 bits                              w = d * (q - 8)
    q4_1   32           20         d: f16 │ m: f16 │ q: 32 × 4 bits                     w = d * q + m
    q5_0   32           22         d: f16 │ h: 32 × 1 bit │ q: 32 × 4 bits              w = d * (q + 16h - 16)
    q5_1   32           24         d, m: f16 │ h: 32 × 1 bit │ q: 32 × 4 bits           w = d * (q + 16h) + m
    q4_k  256          144         d, n: f16 │ s, m: 8 × 6 bits each │ q: 256 × 4 bits  w = d * s * q - n * m
    q5_k  256          176         the same, with h: 256 × 1 bit before q               w = d * s * (q + 16h) - n * m
    q6_k  256          210         q: 256 × 4 bits │ h: 256 × 2 bits │ s: 16 × int8 │ d: f16
                                                                                        w = d * s * (q + 16h - 32)
    fp8   128          132         d: f32 │ q: 128 × e4m3 (8-bit floats)               w = d * q

fp8 is our own: .gguf files have no such blocks. A block of 256 columns has a scale s, and in q4_k and q5_k a minimum m,
for each 32 columns; q6_k has a scale for each 16. Byte i of the 4-bit codes of 32 columns holds column i in its low
half and column i + 16 in its high half; in the blocks of 256, 32 bytes hold 64 columns (q6_k: 64 bytes 128 columns) in
the same way. This module imports no torch: the CPU library reads stored matrices as they are. kernels/matrix.py
converts and quantizes them.

Shapes: N rows, K columns.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FloatFormat = Literal["bf16", "f32"]
Format = Literal["bf16", "f32", "f16", "q8_0", "q4_1", "q4_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "fp8"]
"""f16 is only in checkpoints: kernels compute with bf16 or f32 instead."""

GROUP = 32
"""Columns whose products with activations are summed as integers."""
SUPER_BLOCK = 256
"""Columns of a block of the K-quants."""
FP8_GROUP = 128
"""Columns of a block of fp8."""
BLOCK_BYTES: dict[Format, int] = {
    "q8_0": 34,
    "q4_1": 20,
    "q4_0": 18,
    "q5_0": 22,
    "q5_1": 24,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "fp8": 132,
}
BLOCK_COLUMNS: dict[Format, int] = {
    format: FP8_GROUP if format == "fp8" else SUPER_BLOCK if format in ("q4_k", "q5_k", "q6_k") else GROUP
    for format in BLOCK_BYTES
}
GPU_BLOCK_BYTES: dict[Format, int] = BLOCK_BYTES | {"q4_k": 148, "q5_k": 180}
"""Bytes of a block of the formats that the GPU kernels read, in GPU memory. There, other formats become floats."""
DTYPES: dict[Format, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
}
"""The numpy dtypes of the float formats. numpy has no bfloat16, so it holds the bits."""


def row_bytes(format: Format, num_columns: int) -> int:
    """Bytes of a row in blocks. Raises ValueError unless the columns are whole blocks."""
    if num_columns % BLOCK_COLUMNS[format]:
        raise ValueError(f"{format} takes columns in groups of {BLOCK_COLUMNS[format]}, not {num_columns}")
    return num_columns // BLOCK_COLUMNS[format] * BLOCK_BYTES[format]


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A weight [N, K] in host memory. Raises ValueError if `data` doesn't match the format and the sizes."""

    format: Format
    data: "np.ndarray[Any, np.dtype[Any]]"
    """[N, K] uint16 (the bits of bfloat16), float32 or float16; for blocks [N, row_bytes] uint8. C-contiguous."""
    num_rows: int
    num_columns: int
    name: str = ""
    """Of the tensor, if it is one of the model's files."""

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
