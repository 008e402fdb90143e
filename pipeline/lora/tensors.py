"""Reads the safetensors file of an adapter: bytes of a stranger, so everything is checked before it is used.

The format: the header's length as u64, the header as JSON (name → dtype, shape, begin and end of its bytes), then the
data (https://github.com/huggingface/safetensors#format).
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from pipeline.lora.peft_config import MAX_VALUES, AdapterError, NotAnAdapter, has_many_values
from pipeline.runtime.files.regular_files import RegularFile
from pipeline.runtime.model.weight_headers import TensorEntry

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 2 * 1024**2
"""An adapter of 126 layers with seven projections has 0.3 MiB, and 9,000 values."""
FLOATS: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}

FloatMatrix = np.ndarray[Any, np.dtype[np.float32]]


class AdapterTensors:
    """The tensors of a file. Raises AdapterError if it can't be used, NotAnAdapter if it does not begin as a
    safetensors file, OSError if it can't be read."""

    def __init__(self, file: RegularFile, check: Callable[[Self], None] = lambda _: None) -> None:
        """The file may change while it is read. The header is read first, and the rest only if the file has the size
        that the header describes, no two tensors share bytes, and `check` accepts them, or raises AdapterError."""
        self.path = path = file.path
        length = int.from_bytes(file.read_to(LENGTH_BYTES), "little")
        self._begin = LENGTH_BYTES + length
        if length > MAX_HEADER_BYTES or self._begin > file.size:
            limit = f"an adapter's header has at most {MAX_HEADER_BYTES} bytes"
            raise NotAnAdapter(f"{path}: it is not a safetensors file, or it is incomplete; {limit}")
        self._entries = self._decoded(file.read_to(self._begin))
        end = self._begin + max((entry.data_offsets[1] for entry in self._entries.values()), default=0)
        if end != file.size:
            what = "tensors are not in the file" if end > file.size else "header does not describe all of it"
            raise AdapterError(f"{path}: its {what}: it has {file.size} bytes, and the header describes {end}")
        offsets = {name: entry.data_offsets for name, entry in self._entries.items()}
        require_contiguous(path, ((name, *span) for name, span in offsets.items()))
        check(self)
        self.data = file.read_to(end)

    def _decoded(self, data: memoryview) -> dict[str, TensorEntry]:
        if len(data) < self._begin:
            raise AdapterError(f"{self.path}: it is incomplete")
        text = bytes(data[LENGTH_BYTES:])
        if has_many_values(text):
            raise NotAnAdapter(f"{self.path}: its header has more than {MAX_VALUES} values")
        try:
            header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            return {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in header.items()}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NotAnAdapter(f"{self.path}: the header is damaged: {error}") from error

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, int]:
        """Of a tensor whose entry is that of a matrix. Raises AdapterError."""
        entry = self._entries[name]
        if entry.dtype not in FLOATS:
            raise AdapterError(
                f"{self.path}: tensor {name!r} has dtype {entry.dtype[:20]}; supported: {', '.join(FLOATS)}"
            )
        if len(entry.shape) != 2 or any(size <= 0 for size in entry.shape):
            raise AdapterError(f"{self.path}: tensor {name!r} has the shape {list(entry.shape)}, not that of a matrix")
        begin, end = entry.data_offsets
        if begin < 0 or end - begin != math.prod(entry.shape) * FLOATS[entry.dtype].itemsize:
            raise AdapterError(f"{self.path}: the bytes of tensor {name!r} are not in the file")
        return entry.shape[0], entry.shape[1]

    def matrix(self, name: str) -> FloatMatrix:
        """A tensor with two dimensions, as float32. Raises AdapterError."""
        shape, entry = self.shape(name), self._entries[name]
        begin, end = entry.data_offsets
        if self._begin + end > len(self.data):  # it was truncated while it was read
            raise AdapterError(f"{self.path}: the bytes of tensor {name!r} are not in the file")
        array = np.frombuffer(self.data, FLOATS[entry.dtype], math.prod(shape), self._begin + begin).reshape(shape)
        values = bf16_to_float(array) if entry.dtype == "BF16" else array.astype(np.float32)
        if not np.isfinite(values).all():
            raise AdapterError(f"{self.path}: tensor {name!r} has values that are not finite")
        return values


def require_contiguous(path: Path, tensors: Iterable[tuple[str, int, int]], alignment: int = 1) -> None:
    """Each tensor (name, begin and end) must begin where the one before ends, up to the alignment, as both formats
    require: tensors that shared bytes would cost more memory than the file has, and gaps cost memory for nothing.
    Raises AdapterError."""
    offset = 0
    for name, begin, end in sorted(tensors, key=lambda tensor: tensor[1:]):
        if begin != offset or end < begin:
            raise AdapterError(f"{path}: the bytes of tensor {name[:200]!r} overlap others, or leave a gap")
        offset = -(-end // alignment) * alignment


def scaled(matrix: FloatMatrix, factor: float) -> FloatMatrix:
    """A matrix times a factor. It may overflow, which is checked when it is stored."""
    with np.errstate(over="ignore", invalid="ignore"):
        product: FloatMatrix = matrix * np.float32(factor)
    return product


def bf16_to_float(array: "np.ndarray[Any, Any]") -> FloatMatrix:
    """The bits of bfloat16 as float32."""
    words = array.astype(np.uint32)
    words <<= 16
    widened: FloatMatrix = words.view(np.float32)
    return widened


def float_to_bf16(array: FloatMatrix) -> "np.ndarray[Any, np.dtype[np.uint16]]":
    """float32 as the bits of bfloat16, rounded to nearest even."""
    words = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
