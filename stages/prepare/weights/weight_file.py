"""Writes the safetensors file of a prepared model, and chooses the format of each tensor.

stages/prepare/weights/tensors.py describes the file format, pipeline.runtime.model.model_folder how quantized tensors
are stored in it. The library can't write a tensor piece by piece, and numpy has no bfloat16.
"""

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any, Literal

import gguf
import msgspec
import numpy as np

from pipeline.config.settings import PreparedFormat
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.weight_headers import TensorEntry
from pipeline.stages.prepare.cache import require_room
from pipeline.stages.prepare.progress import Report
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import Shape, first_pieces, float_rows

Format = Literal["f32", "bf16", "q8_0", "q4_1", "q4_0", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "fp8"]
Array = np.ndarray[Any, Any]

BLOCKS: dict[Format, gguf.GGMLQuantizationType] = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q5_0": gguf.GGMLQuantizationType.Q5_0,
    "q5_1": gguf.GGMLQuantizationType.Q5_1,
    "q4_k": gguf.GGMLQuantizationType.Q4_K,
    "q5_k": gguf.GGMLQuantizationType.Q5_K,
    "q6_k": gguf.GGMLQuantizationType.Q6_K,
}
"""The formats of .gguf files with a scale per group of columns, and gguf's names for them."""
FP8_COLUMNS, FP8_BYTES = 128, 132
"""Columns of a block of fp8, which .gguf files don't have, and its bytes: a float32 scale, then the codes."""
GROUP = 32
"""Columns that share a scale."""
DTYPES: dict[Format, tuple[str, int]] = {"f32": ("F32", 4), "bf16": ("BF16", 2)}
"""The safetensors dtype and item size of unquantized formats. The others are stored as U8."""

TABLES: dict[str, Format] = {
    "model.embed_tokens.weight": "q8_0",
    "lm_head.weight": "q8_0",
    "model.embed_positions.weight": "bf16",
    "model.embed_token_types.weight": "bf16",
}
"""Formats of matrices that keep more bits than the others, by Llama's names. The head's rounding errors reach the
logits directly, and the embedding may be tied to it. A table of positions is small."""

BIASES = ("model.distance_bias.weight",)
NORMS_OF_HEADS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")

ROUTERS = ("mlp.router.weight", "mlp.shared_expert_gate.weight")
"""Small matrices whose rounding errors may change which experts compute a token."""
STATES = (
    *(f"linear_attn.{name}.weight" for name in ("a_proj", "b_proj", "q_conv1d", "k_conv1d", "v_conv1d")),
    "short_conv.conv.weight",
)
"""The same of what decays states and fills them, for the rest of a sequence."""

WEIGHTS = "model.safetensors"

CHUNK_VALUES = 2 * 1024**2
"""Values that a thread converts at once: 8 MiB as float32, and a few times that in temporaries."""
MAX_THREADS = 16
"""Limits memory: more threads than this wait for the disk."""

Pieces = Callable[[str], Iterator[Array]]
"""Yields a tensor, by name, some rows at a time: float32 values to encode, or uint8 blocks that are encoded already.
Threads call it for different tensors at the same time."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a tensor is stored."""

    format: Format
    shape: Shape
    """Shape of the values, not of the stored bytes."""

    @property
    def dtype(self) -> str:
        return DTYPES.get(self.format, ("U8", 1))[0]

    @property
    def stored_shape(self) -> Shape:
        """The shape in the safetensors header."""
        if self.format in ("f32", "bf16"):
            return self.shape
        if self.format == "fp8":
            return (*self.shape[:-1], self.shape[-1] // FP8_COLUMNS * FP8_BYTES)
        return tuple(gguf.quant_shape_to_byte_shape(self.shape, BLOCKS[self.format]))

    @property
    def item_bytes(self) -> int:
        return DTYPES.get(self.format, ("U8", 1))[1]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.item_bytes


def stored_tensors(
    model: ModelConfig,
    shapes: Mapping[str, Shape],
    found: Mapping[str, Format | None],
    quantization: PreparedFormat,
) -> dict[str, Stored]:
    """How to store the tensors of a model. `shapes`, and `found`, the formats in the model's files, are by the names in
    these files."""
    pieces = first_pieces(model)
    targets = {}
    for tensor, shape in shapes.items():
        name, piece = pieces[tensor]
        if piece.transposed and len(shape) > 1:
            # A block is a part of a row of the tensor, and so of a column of the matrix.
            targets[tensor] = Stored("bf16", shape)
        else:
            targets[tensor] = _stored(name, shape, found.get(tensor), quantization)
    return targets


def _stored(name: str, shape: Shape, found: Format | None, quantization: PreparedFormat) -> Stored:
    """How to store a tensor, by Llama's name, that the model's file has in format `found`; None if that is none of
    `Format`."""
    wanted: Format
    # Norms and biases are small, and their rounding would affect every token. Some norms have weights for each head.
    if len(shape) < 2 or name.endswith((*BIASES, *NORMS_OF_HEADS, *ROUTERS, *STATES, ".bias")):
        return Stored("f32", shape)
    match quantization:
        case "none":
            wanted = "bf16"
        case "auto":
            wanted = found or "bf16"
        case "q8_0" | "q4_1":
            wanted = TABLES.get(name, quantization)
    return Stored(wanted if shape[-1] % GROUP == 0 else "bf16", shape)


def rows_at_once(num_columns: int) -> int:
    """Number of rows to convert at once."""
    return max(1, CHUNK_VALUES // num_columns)


def quantize(
    model: ModelConfig,
    folder: Path,
    stored: Mapping[str, tuple[Path, TensorEntry]],
    quantization: PreparedFormat,
    report: Report,
) -> None:
    """Write `WEIGHTS` with the tensors of other files, quantized. Raises ModelError as `write_weights` does."""
    targets = stored_tensors(model, {name: entry.shape for name, (_, entry) in stored.items()}, {}, quantization)

    def pieces(name: str) -> Iterator[Array]:
        path, entry = stored[name]
        return float_rows(path, entry, rows_at_once(entry.shape[-1] if entry.shape else 1))

    write_weights(folder, targets, pieces, next(iter(stored.values()))[0].parent, report)


def write_weights(
    folder: Path,
    targets: Mapping[str, Stored],
    pieces: Pieces,
    source: Path,
    report: Report,
    file_name: str = WEIGHTS,
) -> None:
    """Write a file in `folder`, several tensors at a time on all cores, each a piece at a time.

    Raises ModelError, naming the tensor and `source`, if values don't fit their format or the disk is full.
    """
    # The widest dtypes first, so that each tensor is aligned to its item size.
    ordered = dict(sorted(targets.items(), key=lambda item: -item[1].item_bytes))
    header = _header(ordered)
    total = sum(target.num_bytes for target in ordered.values())
    require_room(folder, len(header) + total)
    offsets, end = {}, len(header)
    for name, target in ordered.items():
        offsets[name], end = end, end + target.num_bytes
    lock = Lock()
    done = 0

    def write_tensor(name: str) -> None:
        nonlocal done
        target, offset = ordered[name], offsets[name]
        for piece in pieces(name):
            if failed.is_set():
                return
            try:
                data = piece if piece.dtype == np.uint8 else encode(piece, target.format)
            except ValueError as error:
                raise ModelError(f"{source}: tensor {name} can't be stored as {target.format}: {error}") from error
            offset += _write_at(file, data, offset)
            with lock:
                done += data.nbytes
                report(done, total)
        written = offset - offsets[name]
        assert written == target.num_bytes, f"wrote {written} bytes of {name}, not {target.num_bytes}"

    failed = Event()
    with (folder / file_name).open("xb", buffering=0) as file:
        _write_at(file, np.frombuffer(header, np.uint8), 0)
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            # The largest tensors first, so that no thread is left alone with one.
            tasks = [pool.submit(write_tensor, name) for name in sorted(ordered, key=lambda n: -ordered[n].num_bytes)]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                failed.set()
                pool.shutdown(cancel_futures=True)
                raise


def _write_at(file: IO[bytes], data: Array, offset: int) -> int:
    """Write contiguous data at a place of a file. Returns its bytes. Raises OSError."""
    left = data.reshape(-1).view(np.uint8)
    while len(left):
        written = os.pwrite(file.fileno(), left.data, offset)
        left, offset = left[written:], offset + written
    return data.nbytes


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
    """Encode float32 values [rows, columns] in a format, contiguous.

    Raises ValueError if blocks can't hold them: values that aren't finite, or a scale beyond float16.
    """
    if format == "f32":
        return np.ascontiguousarray(values, dtype=np.float32)
    if format == "bf16":
        return to_bf16(values)
    with np.errstate(all="ignore"):  # the scales are checked below
        blocks: Array = gguf.quantize(values, BLOCKS[format])
    _, block_bytes = gguf.GGML_QUANT_SIZES[BLOCKS[format]]
    halves = 2 if format == "q4_1" else 1
    scales = np.ascontiguousarray(blocks.reshape(-1, block_bytes)[:, : 2 * halves]).view(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError("values are not finite, or too large for a float16 scale")
    return blocks


def to_bf16(values: Array) -> Array:
    """float32 as bfloat16 bits (uint16), rounded to nearest even. Infinities and NaN are kept."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values).reshape(bits.shape)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded
