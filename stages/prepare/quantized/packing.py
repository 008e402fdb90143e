"""Unpacks the codes of quantized checkpoints, and packs them into blocks (kernels/stored_matrix.py).

Shapes: N rows, K columns, n of the rows at a time, G groups of columns.
"""

from typing import Any

import gguf
import numpy as np

from pipeline.stages.prepare.weights.weight_file import BLOCKS, GROUP, Format

Array = np.ndarray[Any, Any]
Rows = slice | Array
"""A range of rows, or the index of each."""

UNPACKED_BITS = (2, 3, 4, 8)
Q4_0_ZERO = 8


def unpack(words: Array, bits: int) -> Array:
    """Codes of `bits` bits [..., w * 32 / bits] uint8, of little-endian words [..., w] of 32 bits.

    The first code is in the lowest bits. With 3 bits, codes cross words.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if bits == 3:
        singles = np.unpackbits(data, axis=-1, bitorder="little").reshape(*data.shape[:-1], -1, 3)
        return singles[..., 0] | (singles[..., 1] << 1) | (singles[..., 2] << 2)
    return unpack_bytes(data, bits)


def unpack_bytes(data: Array, bits: int) -> Array:
    """Codes of 2 or 4 bits [..., b * 8 / bits] uint8, of bytes [..., b]; the first code is in the lowest bits."""
    per_byte = 8 // bits
    codes = np.empty((*data.shape, per_byte), np.uint8)
    for index in range(per_byte):
        np.bitwise_and(data >> (bits * index), (1 << bits) - 1, out=codes[..., index])
    return codes.reshape(*data.shape[:-1], -1)


def indices(rows: Rows, num_rows: int) -> Array:
    """The index of each row."""
    return np.arange(num_rows)[rows] if isinstance(rows, slice) else rows


def to_blocks(format: Format, codes: Array, zeros: Array, scales: Array) -> Array:
    """Blocks [n, bytes per row] uint8 of w = scale * (code - zero).

    codes [n, K] uint8; zeros [n, K / 32] int32 and scales [n, K / 32] float32, one for each block. For q4_0 and q8_0,
    code - zero must be in the format's range; for q4_1, codes are below 16.
    """
    num_rows, num_columns = codes.shape
    groups = codes.reshape(num_rows, num_columns // GROUP, GROUP)
    blocks = np.empty((num_rows, num_columns // GROUP, gguf.GGML_QUANT_SIZES[BLOCKS[format]][1]), np.uint8)
    _put_halves(blocks[:, :, :2], scales)
    if format == "q8_0":
        blocks[:, :, 2:] = (groups.astype(np.int16) - zeros[:, :, None].astype(np.int16)).astype(np.int8).view(np.uint8)
        return blocks.reshape(num_rows, -1)
    if format == "q4_0":
        groups = (groups.astype(np.int16) + (Q4_0_ZERO - zeros[:, :, None]).astype(np.int16)).astype(np.uint8)
    else:
        _put_halves(blocks[:, :, 2:4], -(zeros * scales))
    blocks[:, :, -GROUP // 2 :] = groups[:, :, : GROUP // 2] | (groups[:, :, GROUP // 2 :] << 4)
    return blocks.reshape(num_rows, -1)


def _put_halves(target: Array, values: Array) -> None:
    """Write [n, G] float32 as float16 into bytes [n, G, 2]."""
    target[:] = values.astype("<f2")[:, :, None].view(np.uint8)
