"""The safetensors file that prepare writes: which format each tensor has in it, and how it gets there.

The format: a u64 with the length of the header, the header as JSON (name → dtype, shape, begin and end of its bytes),
then the bytes (https://github.com/huggingface/safetensors#format). Written here rather than with the library because
a tensor may be larger than the memory at hand and numpy has no bfloat16. What quantised tensors are in it:
pipeline.runtime.model_folder.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import msgspec
import numpy as np

from pipeline.config.settings import PreparedFormat
from pipeline.runtime.model_folder import format_key
from pipeline.stages.prepare.cache import require_room
from pipeline.stages.prepare.progress import Report
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tensors import Shape, TensorEntry, float_rows

Format = Literal["f32", "bf16", "q8_0", "q4_1", "q4_0"]
Array = np.ndarray[Any, Any]

BLOCKS: dict[Format, gguf.GGMLQuantizationType] = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
"""The formats with a scale for every group of columns, as gguf calls them."""
GROUP = 32
"""Columns that share a scale."""
DTYPES: dict[Format, tuple[str, int]] = {"f32": ("F32", 4), "bf16": ("BF16", 2)}
"""What safetensors calls a format of plain numbers, and their bytes; every other one is U8."""

TABLES = ("model.embed_tokens.weight", "lm_head.weight")

WEIGHTS = "model.safetensors"

CHUNK_VALUES = 8 * 1024**2
"""Numbers converted at once: 32 MiB as float32."""

Pieces = Callable[[str], Iterator[Array]]
"""A tensor by name, some rows at a time: float32 numbers to be stored in its format, or uint8 that are in it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor is stored."""

    format: Format
    shape: Shape
    """Of its numbers."""

    @property
    def dtype(self) -> str:
        return DTYPES.get(self.format, ("U8", 1))[0]

    @property
    def stored_shape(self) -> Shape:
        """Of what safetensors sees."""
        if self.format in ("f32", "bf16"):
            return self.shape
        return tuple(gguf.quant_shape_to_byte_shape(self.shape, BLOCKS[self.format]))

    @property
    def item_bytes(self) -> int:
        return DTYPES.get(self.format, ("U8", 1))[1]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.item_bytes


def stored(name: str, shape: Shape, found: Format | None, quantization: PreparedFormat) -> Stored:
    """How a tensor is to be stored that the model's file has as `found`, None where that is no format of ours."""
    wanted: Format
    if len(shape) == 1:  # norms and biases are small, and a rounding of theirs is one of every token
        return Stored("f32", shape)
    match quantization:
        case "none":
            wanted = "bf16"
        case "auto":
            wanted = found or "bf16"
        case "q8_0" | "q4_1":
            # 4 bits of a head cost too much: its rounding goes into the logits as it is, with no layer behind that
            # would even it out, and the embedding is the same tensor where the two are tied.
            wanted = "q8_0" if name in TABLES else quantization
    return Stored(wanted if shape[-1] % GROUP == 0 else "bf16", shape)


def rows_at_once(num_columns: int) -> int:
    """Rows of a tensor that are converted at once."""
    return max(1, CHUNK_VALUES // num_columns)


def quantize(
    folder: Path, places: Mapping[str, tuple[Path, TensorEntry]], quantization: PreparedFormat, report: Report
) -> None:
    """Write a file with the tensors of other files, quantised from their exact values. Raises ModelError as below."""
    targets = {name: stored(name, entry.shape, None, quantization) for name, (_, entry) in places.items()}

    def pieces(name: str) -> Iterator[Array]:
        path, entry = places[name]
        return float_rows(path, entry, rows_at_once(entry.shape[-1]))

    write_weights(folder, targets, pieces, next(iter(places.values()))[0].parent, report)


def write_weights(folder: Path, targets: Mapping[str, Stored], pieces: Pieces, source: Path, report: Report) -> None:
    """Write `WEIGHTS` in `folder`, a piece at a time.

    Raises ModelError, naming the tensor and `source`, where numbers don't fit their format, or where there is no room.
    """
    # Wide numbers first, so that each tensor begins at a multiple of its own.
    ordered = dict(sorted(targets.items(), key=lambda item: -item[1].item_bytes))
    header = _header(ordered)
    total = sum(target.num_bytes for target in ordered.values())
    require_room(folder, len(header) + total)
    done = 0
    with (folder / WEIGHTS).open("xb") as file:
        file.write(header)
        for name, target in ordered.items():
            begun = done
            for piece in pieces(name):
                try:
                    data = piece if piece.dtype == np.uint8 else encode(piece, target.format)
                except ValueError as error:
                    raise ModelError(f"{source}: tensor {name} can't be stored as {target.format}: {error}") from error
                done += file.write(data.data)
                report(done, total)
            assert done - begun == target.num_bytes, f"wrote {done - begun} bytes of {name}, not {target.num_bytes}"


def _header(targets: Mapping[str, Stored]) -> bytes:
    metadata = {"format": "pt"}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, target in targets.items():
        end = offset + target.num_bytes
        header[name] = {"dtype": target.dtype, "shape": list(target.stored_shape), "data_offsets": [offset, end]}
        if target.format not in DTYPES:
            metadata[format_key(name)] = target.format
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode(values: Array, format: Format) -> Array:
    """float32 numbers [rows, columns] in a format, contiguous.

    Raises ValueError where blocks can't hold them: numbers that aren't finite, or a scale beyond float16.
    """
    if format == "f32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if format == "bf16":
        return to_bf16(values)
    with np.errstate(all="ignore"):  # what comes of it is looked at
        blocks: Array = gguf.quantize(values, BLOCKS[format])
    _, block_bytes = gguf.GGML_QUANT_SIZES[BLOCKS[format]]
    halves = 2 if format == "q4_1" else 1
    scales = np.ascontiguousarray(blocks.reshape(-1, block_bytes)[:, : 2 * halves]).view(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError("numbers are not finite, or too large for a scale in float16")
    return blocks


def to_bf16(values: Array) -> Array:
    """The upper halves of float32 numbers, rounded to the nearest even. Infinite stays infinite, NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values).reshape(bits.shape)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded
