"""Formats of .gguf files that are stored in another one, because the kernels don't read them.

    Q3_K    → q6_k   the same values: its scales and codes are some of those that q6_k has
    IQ4_NL  → q8_0   the same values: its codes are indices into 16 numbers of 8 bits
    MXFP4   → q8_0   the same values: each is a half of an integer times a power of two
    IQ4_XS  → q8_0   the same codes, but the product of two scales is rounded to float16
    others  → bf16   rounded

All of them take more memory than in the file. Functions take and return blocks: uint8 [rows, bytes of a row].

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c (`dequantize_row_*`)
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.weight_file import BLOCKS, Format, rows_at_once

Blocks = np.ndarray[Any, np.dtype[np.uint8]]

NATIVE = {kind: format for format, kind in BLOCKS.items()}
"""The formats that need no conversion."""
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
MXFP4_CODES = np.array(gguf.quants.MXFP4.kvalues, np.int8)
"""Twice the values of 4-bit floats."""
IQ4_VALUES = np.array(gguf.quants.IQ4_NL.kvalues, np.int8)


def q3_k_to_q6_k(rows: Blocks) -> Blocks:
    blocks = rows.reshape(-1, 110)
    above, pairs, packed, d = np.split(blocks, [32, 96, 108], axis=1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    codes = (pairs.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 8, 32)
    codes |= (above[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 2
    codes += 28  # zero is 4 there and 32 here
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = (packed[:, None, 8:] >> shifts & 3).reshape(-1, 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    # 64 bytes have 128 codes: those of 0 to 63 in their low halves.
    halves = codes.reshape(-1, 2, 2, 64) & 15
    nibbles = halves[:, :, 0] | halves[:, :, 1] << 4
    top = (codes.reshape(-1, 2, 4, 32) >> 4) << shifts
    parts = [nibbles.reshape(-1, 128), np.bitwise_or.reduce(top, axis=2).reshape(-1, 64), scales.view(np.uint8), d]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def iq4_nl_to_q8_0(rows: Blocks) -> Blocks:
    blocks = rows.reshape(-1, 18)
    return np.concatenate([blocks[:, :2], _iq4_codes(blocks[:, 2:])], axis=1).reshape(len(rows), -1)


def iq4_xs_to_q8_0(rows: Blocks) -> Blocks:
    """Raises ValueError if a scale is beyond float16."""
    blocks = rows.reshape(-1, 136)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    small = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    with np.errstate(all="ignore"):  # checked below
        scales = (d * small).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError("scales are not finite, or too large for float16")
    codes = _iq4_codes(blocks[:, 8:].reshape(-1, 16))
    return np.concatenate([scales.reshape(-1, 1).view(np.uint8), codes], axis=1).reshape(len(rows), -1)


def mxfp4_to_q8_0(rows: Blocks) -> Blocks:
    """Powers of two below the smallest float16 become zero: their values are below 1e-6. Raises ValueError if one is
    beyond float16."""
    blocks = rows.reshape(-1, 17)
    codes = MXFP4_CODES[np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=1)]
    with np.errstate(all="ignore"):  # checked below
        scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128).astype(np.float16)
    scales[~codes.any(axis=1)] = 0
    if not np.isfinite(scales).all():
        raise ValueError("scales are too large for float16")
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=1).reshape(len(rows), -1)


def _iq4_codes(pairs: Blocks) -> Blocks:
    """[n, 16] → the bytes of 32 codes, [n, 32]"""
    codes: Blocks = IQ4_VALUES[np.concatenate([pairs & 15, pairs >> 4], axis=1)].view(np.uint8)
    return codes


CONVERSIONS: dict[Kind, tuple[Format, Callable[[Blocks], Blocks]]] = {
    Kind.Q3_K: ("q6_k", q3_k_to_q6_k),
    Kind.IQ4_NL: ("q8_0", iq4_nl_to_q8_0),
    Kind.IQ4_XS: ("q8_0", iq4_xs_to_q8_0),
    Kind.MXFP4: ("q8_0", mxfp4_to_q8_0),
}


def format_of(kind: Kind) -> Format | None:
    """The format in which a matrix of a file is stored by default. None if that is not one of its blocks."""
    if kind in CONVERSIONS:
        return CONVERSIONS[kind][0]
    return NATIVE.get(kind)


def summary(stored: Iterable[tuple[Kind, Format]]) -> str:
    """What matrices become: `matrices: 25 Q2_K become bf16, 144 stay Q4_K`. Empty if blocks stay as they are."""
    counts = Counter((kind, format) for kind, format in stored if kind not in FLOATS)
    changed = [
        f"{num} {kind.name} become {format}" for (kind, format), num in counts.items() if NATIVE.get(kind) != format
    ]
    kept = [f"{num} stay {kind.name}" for (kind, format), num in counts.items() if NATIVE.get(kind) == format]
    return f"matrices: {', '.join([*changed, *kept])}" if changed else ""


def rotated_halves(num_rows: int, head_dim: int) -> "np.ndarray[Any, Any]":
    """For each row of q or k, its row in a file whose adjacent rows rotate together.

    For a head of size 6 the file has rows 0 3 1 4 2 5.
    """
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def pieces_of(
    tensor: GgufTensor, order: "np.ndarray[Any, Any] | None", keeps_blocks: bool, path: Path
) -> Iterator["np.ndarray[Any, Any]"]:
    """A tensor a few rows at a time: blocks if `keeps_blocks`, else float32 values. Blocks that the kernels don't read
    become those of another format.

    A row is whole blocks in every format, so rows can be reordered without decoding them.
    """
    block, _ = gguf.GGML_QUANT_SIZES[tensor.kind]
    if len(tensor.shape) == 1 and block > 1:
        raise ModelError(f"{path}: tensor {tensor.name} is {tensor.kind.name}; a vector must be F32, F16 or BF16")
    rows = tensor.shape[0] if len(tensor.shape) > 1 or order is not None else 1
    data = tensor.data.reshape(rows, -1)
    step = rows_at_once(math.prod(tensor.shape) // rows)
    for start in range(0, data.shape[0], step):
        stop = start + step
        piece = np.ascontiguousarray(data[start:stop] if order is None else data[order[start:stop]])
        try:
            with np.errstate(all="ignore"):  # scales may be infinite or NaN
                if not keeps_blocks:
                    numbers = gguf.dequantize(piece, tensor.kind)
                elif tensor.kind in CONVERSIONS:
                    numbers = CONVERSIONS[tensor.kind][1](piece)
                else:
                    numbers = piece
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"{path}: tensor {tensor.name} is {tensor.kind.name}: {error}") from error
        yield numbers
    tensor.release()
