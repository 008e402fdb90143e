"""A model's tensors, read from the safetensors files that its config names.

Files are mapped: a tensor that already has the right form is used in place, and its pages are loaded on first access.
No torch here: the CPU library does without it, and its import would take most of the executor's start.

The format: the header's length as u64, the header as JSON (name → dtype, shape, begin and end of its bytes), then the
data (https://github.com/huggingface/safetensors#format). The library imports torch for bfloat16.
"""

import hashlib
import math
import mmap
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pipeline.errors import UserError
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import LongArray
from pipeline.kernels.stored_matrix import BLOCK_BYTES, BLOCK_COLUMNS, FloatFormat, Format, StoredMatrix
from pipeline.runtime.files.regular_files import open_regular
from pipeline.runtime.model import in_place
from pipeline.runtime.model.model_config import ModelConfig, Piece
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.weight_headers import FileState, TensorEntry, decode_header, load_states

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.kernels.matrix import Matrix

FLOATS: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""safetensors' dtypes of floats, and the numpy dtypes to read them with: the bits of bfloat16."""
FORMATS: dict[str, Format] = {"BF16": "bf16", "F32": "f32", "F16": "f16"}
DTYPES: dict[str, str] = {format: dtype for dtype, format in FORMATS.items()}
"""The safetensors dtype of each format of floats."""
FLOAT_FORMATS: dict[str, FloatFormat] = {"bfloat16": "bf16", "float32": "f32"}
"""The format of float matrices for each `execute.dtype`."""
BLOCKS: dict[str, Format] = {format: format for format in BLOCK_BYTES}
BLOCK_DTYPE = "U8"

CHUNK_VALUES = 1 << 20
"""Floats that a thread converts at once: 4 MiB as float32, and a few times that in temporaries."""
MAGIC = b"GGUF"
CHANGED = "has changed since it was prepared: start the server again"
NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


class TensorFile:
    """A mapped safetensors file, or a .gguf file for the index in a prepared folder. Raises OSError, ValueError or
    struct.error if it can't be read, or is not in the `state` that it was prepared in."""

    def __init__(self, path: Path, state: FileState | None = None) -> None:
        index = in_place.load(path) if in_place.is_index(path) else None
        with os.fdopen(open_regular(path if index is None else Path(index.file)), "rb") as file:
            stat = os.fstat(file.fileno())
            self._modified_ns = stat.st_mtime_ns
            if index is not None:
                state = index.num_bytes, index.modified_ns
            if state is not None and state != (stat.st_size, stat.st_mtime_ns):
                raise ValueError(f"{'it' if index is None else index.file} {CHANGED}")
            # Private and writable: torch warns about arrays that it must not write.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if index is not None and self._map[: len(MAGIC)] != MAGIC:  # an index in a shared cache could name any file
            raise ValueError(f"{index.file} is not a .gguf file")
        self._interleaved: dict[str, int] = {} if index is None else index.interleaved
        if index is None:
            (length,) = struct.unpack_from("<Q", self._map)
            self._begin = 8 + length
            self._header = self._map[: self._begin]
            text = self._header[8:]
        else:
            self._begin, text = 0, msgspec.json.encode(index.header)
            self._header = text + msgspec.json.encode(index.interleaved)
        self.entries, self.metadata = decode_header(text)
        end = max((entry.data_offsets[1] for entry in self.entries.values()), default=0)
        if len(self._map) < self._begin + end:
            raise ValueError(f"it has {len(self._map)} bytes, but its tensors end at {self._begin + end}")

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def fingerprint(self) -> str:
        """Size, time of modification, and a digest of the header and of `NUM_SAMPLES` evenly spaced samples.

        Checkpoints of one shape have one size, and images and archives may give them one time, but they differ nearly
        everywhere. The fingerprint is of the file that was opened, even if another one has its name now.
        """
        digest = hashlib.blake2b(self._header, digest_size=16)
        room = max(0, self.num_bytes - SAMPLE_BYTES - self._begin)
        begins = [self._begin + room * i // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
        for begin in begins:  # the disk reads all of them at once
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, page, min(begin + SAMPLE_BYTES, self.num_bytes) - page)
        for begin in begins:
            digest.update(self._map[begin : begin + SAMPLE_BYTES])
        return f"{self.num_bytes}:{self._modified_ns}:{digest.hexdigest()}"

    def array(self, name: str, dtype: "np.dtype[Any]") -> "np.ndarray[Any, Any]":
        """A tensor in the mapped memory, or a copy if it is not aligned there, or has its rows in another order."""
        entry = self.entries[name]
        offset = self._begin + entry.data_offsets[0]
        array = np.frombuffer(self._map, dtype, math.prod(entry.shape), offset).reshape(entry.shape)
        if head_dim := self._interleaved.get(name):
            pairs = array.reshape(-1, head_dim // 2, 2, *entry.shape[1:])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(entry.shape)
        return np.require(array, requirements="A")


class Weights:
    """The tensors of a model folder, by their Hugging Face names. Raises UserError if a file can't be read.

    Float matrices become `float_format`; with `keeps_floats`, packing does that. Quantized matrices keep their blocks.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, float_format: FloatFormat, *, keeps_floats: bool = False
    ) -> None:
        self._float_format = float_format
        self._keeps_floats = keeps_floats
        self._folder = folder
        self._layout = config.layout
        self.files: list[TensorFile] = []
        """Those of the config, in its order."""
        self._files: dict[str, TensorFile] = {}
        self.taken: dict[str, None] = {}
        """Formats of the loaded matrices, in the order of their first use."""
        states = load_states(folder)
        for path in config.weight_paths(folder):
            try:
                file = TensorFile(path, states.get(str(path)))
            except (OSError, ValueError, struct.error) as error:  # prepare has read the file before
                raise UserError(f"{path} can't be read any more: {error}") from error
            self.files.append(file)
            self._files.update(dict.fromkeys(file.entries, file))

    @property
    def are_quantized(self) -> bool:
        """Whether any matrix is stored in a quantized format."""
        return any(file.entries[name].dtype == BLOCK_DTYPE for name, file in self._files.items())

    @property
    def formats(self) -> list[str]:
        """Formats of all matrices, loaded or not."""
        found: dict[str, None] = {}
        for name, file in self._files.items():
            entry = file.entries[name]
            if entry.dtype == BLOCK_DTYPE:
                found[file.metadata.get(format_key(name), "")] = None
            elif len(entry.shape) > 1:
                found[self._float_format] = None
        return list(found)

    def format_bytes(self) -> dict[str, int]:
        """Bytes of the quantized matrices of each format, loaded or not."""
        found: dict[str, int] = {}
        for name, file in self._files.items():
            if file.entries[name].dtype == BLOCK_DTYPE:
                format = file.metadata.get(format_key(name), "")
                found[format] = found.get(format, 0) + self._num_bytes(name)
        return found

    def layer_bytes(self, num_layers: int) -> list[int]:
        """Bytes of each layer's tensors: those with its number in their names. A vision tower's are not counted."""
        sizes, before = [0] * num_layers, self._layout.layers.partition("{}")[0]
        for name in self._files:
            number = name.removeprefix(before).partition(".")[0]
            if name.startswith(before) and number.isdecimal() and int(number) < num_layers:
                sizes[int(number)] += self._num_bytes(name)
        return sizes

    def head_bytes(self, config: ModelConfig) -> int:
        """Bytes of the LM head, which may be the embedding."""
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        name = self._layout.find(head)[0]
        return self._num_bytes(name) if name in self._files else 0

    def least_bytes(self, config: ModelConfig) -> int:
        """How much memory the weights take at least when they are loaded: F32 may become bfloat16."""
        has_f32 = any(entry.dtype == "F32" for file in self.files for entry in file.entries.values())
        stored = sum(self.layer_bytes(config.num_layers)) + self.head_bytes(config)
        return stored // 2 if has_f32 else stored

    def _num_bytes(self, name: str) -> int:
        begin, end = self._files[name].entries[name].data_offsets
        return end - begin

    def matrix(self, name: str, rows: int, columns: int) -> "StoredMatrix | Matrix":
        """A matrix of the model, by Llama's name. Raises UserError if it is missing, or has another shape or an unknown
        format."""
        stored, piece = self._layout.find(name)
        file, entry = self._find(stored)
        if entry.dtype in FLOATS:
            data = self._rows(stored, entry, file.array(stored, FLOATS[entry.dtype]), piece, (rows, columns))
            self.taken[self._float_format] = None
            if self._keeps_floats:
                return StoredMatrix(FORMATS[entry.dtype], data, rows, columns, name)
            if FORMATS.get(entry.dtype) != self._float_format:
                data = converted(data, entry.dtype, self._float_format)
            return StoredMatrix(self._float_format, data, rows, columns, name)
        found = file.metadata.get(format_key(stored), "")
        format = BLOCKS.get(found)
        if format is None or entry.dtype != BLOCK_DTYPE:
            raise UserError(
                f"tensor {stored!r} of the model in {self._folder} is {entry.dtype} in the format {found!r}; supported "
                f"are {', '.join(BLOCKS)}: prepare the model again"
            )
        num_bytes = columns // BLOCK_COLUMNS[format] * BLOCK_BYTES[format]
        data = _rows_of(file.array(stored, np.dtype(np.uint8)), piece, 2)
        if piece.transposed or columns % BLOCK_COLUMNS[format] or data.shape != (rows, num_bytes):
            raise UserError(
                f"tensor {stored!r} of the model in {self._folder} is {format} in bytes {list(entry.shape)}, "
                f"but model.json makes it {[rows, columns]}"
            )
        self.taken[format] = None
        return StoredMatrix(format, data, rows, columns, name)

    def in_file(self, name: str, rows: int, columns: int) -> StoredMatrix:
        """A matrix whose rows are read in the mapped file, by Llama's name: in the format of the file, whatever the
        other matrices become. Raises UserError as `matrix`."""
        keeps, self._keeps_floats = self._keeps_floats, True
        try:
            matrix = self.matrix(name, rows, columns)
        finally:
            self._keeps_floats = keeps
        assert isinstance(matrix, StoredMatrix)
        return matrix

    def has(self, name: str) -> bool:
        """Whether the files have a tensor, by Llama's name."""
        return self._layout.find(name)[0] in self._files

    def matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> "tuple[StoredMatrix | Matrix, ...]":
        """Matrices of shapes [rows[i], columns]."""
        return tuple(self.matrix(name, num, columns) for name, num in zip(names, rows, strict=True))

    def vector(self, name: str, size: int) -> "FloatArray | Tensor":
        """A norm's weight or a bias, by Llama's name, [size] float32. Raises UserError if it is missing or has another
        shape."""
        stored, piece = self._layout.find(name)
        file, entry = self._find(stored)
        if entry.dtype not in FLOATS:
            raise UserError(
                f"tensor {stored!r} of the model in {self._folder} is {entry.dtype}; supported are "
                f"{', '.join(FLOATS)}: prepare the model again"
            )
        array = file.array(stored, FLOATS[entry.dtype])
        flat = array.reshape(-1) if piece.index is None else array
        data = self._rows(stored, entry, flat, msgspec.structs.replace(piece, transposed=False), (size,))
        if entry.dtype == "BF16":  # the upper half of a float32
            widened: FloatArray = (data.astype(np.uint32) << 16).view(np.float32)
            return widened
        return data.astype(np.float32, copy=False)

    def floats(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        """A small tensor of any shape that is used as float32, by Llama's name. Raises UserError if it is missing, is
        quantized or has another shape."""
        stored, piece = self._layout.find(name)
        file, entry = self._find(stored)
        if entry.dtype not in FLOATS:
            raise UserError(
                f"tensor {stored!r} of the model in {self._folder} is {entry.dtype}: prepare the model again"
            )
        data = self._rows(stored, entry, file.array(stored, FLOATS[entry.dtype]), piece, shape)
        return _from_bf16(data).view(np.float32) if entry.dtype == "BF16" else data.astype(np.float32)

    def integers(self, name: str, size: int) -> LongArray:
        """A vector of int64. Raises UserError if it is missing or has another type or shape."""
        file, entry = self._find(name)
        if entry.dtype != "I64" or entry.shape != (size,):
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} is {entry.dtype} {list(entry.shape)}, not I64 [{size}]"
            )
        return file.array(name, np.dtype("<i8"))

    def join_vectors(self, names: Sequence[str], sizes: Sequence[int]) -> "FloatArray | Tensor":
        """Vectors of these sizes, concatenated."""
        return np.concatenate([self.vector(name, size) for name, size in zip(names, sizes, strict=True)])

    def _find(self, name: str) -> tuple[TensorFile, TensorEntry]:
        if (file := self._files.get(name)) is None:
            raise UserError(f"the weights of the model in {self._folder} lack the tensor {name!r}")
        return file, file.entries[name]

    def _rows(
        self, name: str, entry: TensorEntry, data: "np.ndarray[Any, Any]", piece: Piece, shape: tuple[int, ...]
    ) -> "np.ndarray[Any, Any]":
        """A piece of a tensor. Raises UserError if it has another shape than `shape`."""
        rows = _rows_of(data, piece, len(shape))
        if rows.shape != shape:
            raise UserError(
                f"tensor {name!r} of the model in {self._folder} has shape {list(entry.shape)}, "
                f"but model.json makes it {list(shape)}"
            )
        return rows


def _rows_of(data: "np.ndarray[Any, Any]", piece: Piece, num_dims: int) -> "np.ndarray[Any, Any]":
    """The rows of a piece with `num_dims` dimensions, contiguous; a copy unless they are adjacent in the tensor."""
    if not data.ndim:
        return data
    if piece.index is not None and data.ndim > num_dims and piece.index < len(data):
        data = data[piece.index]
    if piece.transposed:
        data = data.T
    if len(data) % piece.groups == 0:
        groups = data.reshape(piece.groups, len(data) // piece.groups, *data.shape[1:])
        data = groups[:, piece.begin : piece.end].reshape(-1, *data.shape[1:])
    return np.ascontiguousarray(data)


def converted(data: "np.ndarray[Any, Any]", dtype: str, to: FloatFormat) -> "np.ndarray[Any, Any]":
    """Floats of a safetensors dtype in another format, rounded to the nearest, ties to even, as torch does. numpy has
    no bfloat16, so its bits are computed. All cores do it: numpy computes without the GIL."""
    flat = np.ascontiguousarray(data).reshape(-1)
    out = np.empty(flat.size, np.float32 if to == "f32" else np.uint16)

    def convert(begin: int) -> None:
        part = flat[begin : begin + CHUNK_VALUES]
        values = _from_bf16(part) if dtype == "BF16" else part.astype(np.float32)
        out[begin : begin + CHUNK_VALUES] = values if to == "f32" else _to_bf16(values)

    begins = range(0, flat.size, CHUNK_VALUES)
    if len(begins) > 1:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(convert, begins))
    else:
        for begin in begins:
            convert(begin)
    return out.reshape(data.shape)


def _from_bf16(bits: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The bits of the nearest bfloat16 of float32."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # else some would become infinite, or of the other sign
    return rounded
