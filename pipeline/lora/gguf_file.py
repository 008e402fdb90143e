"""Reads a small .gguf file, such as an adapter's: bytes of a stranger, so everything is checked before it is used.

    magic, version, counts │ keys with values │ tensor infos │ padding │ tensors, each at a multiple of the alignment

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. stages/prepare/gguf/file.py reads models.
"""

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np

from pipeline.lora.peft_config import AdapterError, NotAnAdapter
from pipeline.lora.tensors import FloatMatrix, bf16_to_float, require_contiguous
from pipeline.runtime.files.regular_files import RegularFile

MAGIC = b"GGUF"
NUMBER_BYTES = 8
"""The longest number."""
MAX_COUNT = 1 << 16
"""Keys, tensors, and entries of an array."""
MAX_TEXT_BYTES = 1 << 20
MAX_HEADER_BYTES = 4 * 1024**2
"""Before the tensors: they are read one by one, in Python."""
VERSIONS = (2, 3)
TEXT, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""By the number of the type."""
Q8_0, Q8_0_VALUES, Q8_0_BYTES = 8, 32, 34
FLOATS: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2"), 30: np.dtype("<u2")}
"""The tensor types F32, F16 and BF16."""


class _Tensor(NamedTuple):
    kind: int
    shape: tuple[int, ...]
    """Rows first; the file has the reverse order."""
    offset: int


class SmallGguf:
    """The keys and tensors of a file. Raises NotAnAdapter if it is not a complete one, OSError if it can't be read."""

    def __init__(
        self,
        file: RegularFile,
        check_keys: Callable[[dict[str, Any]], None] = lambda _: None,
        check: Callable[[Self], None] = lambda _: None,
    ) -> None:
        """The file may change while it is read. Its first bytes must be those of a GGUF file before
        its header is read. `check_keys` accepts its keys, and `check` its tensors, or they raise AdapterError, before
        the tensors are read. No two may share bytes."""
        self.path = path = file.path
        self._at = len(MAGIC)
        self.keys: dict[str, Any] = {}
        """Numbers and texts. Arrays are left out but for their names, which have None"""
        self._tensors: dict[str, _Tensor] = {}
        try:
            self.data = file.read_to(len(MAGIC))
            if self.data != MAGIC:
                raise ValueError("it does not begin with GGUF")
            self.data = file.read_to(MAX_HEADER_BYTES + NUMBER_BYTES)
            self._read()
            check_keys(self.keys)
            end = self._end(file.size)
            spans = [(name, one.offset, one.offset + self._num_bytes(name)) for name, one in self._tensors.items()]
            require_contiguous(path, spans, self._alignment)
            check(self)
            self.data = file.read_to(end)
        except AdapterError:
            raise
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise NotAnAdapter(f"{path}: it is not a complete GGUF file: {error}") from error

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, int]:
        """Of a tensor with two dimensions. Raises AdapterError."""
        shape = self._tensors[name].shape
        if len(shape) != 2 or any(size <= 0 for size in shape):
            raise AdapterError(f"{self.path}: tensor {name!r} has the shape {list(shape)}, not that of a matrix")
        return shape[0], shape[1]

    def matrix(self, name: str) -> FloatMatrix:
        """A tensor with two dimensions, as float32. Raises AdapterError."""
        shape, (kind, _, offset) = self.shape(name), self._tensors[name]
        num_bytes = self._num_bytes(name)
        if self._begin + offset + num_bytes > len(self.data):  # it was truncated while it was read
            raise AdapterError(f"{self.path}: the bytes of tensor {name!r} are not in the file")
        raw = np.frombuffer(self.data, np.uint8, num_bytes, self._begin + offset)
        if kind == Q8_0:
            blocks = raw.reshape(-1, Q8_0_BYTES)
            scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
            values = blocks[:, 2:].view(np.int8).astype(np.float32)
            with np.errstate(invalid="ignore"):
                values *= scales
            values = values.reshape(shape)
        else:
            array = raw.view(FLOATS[kind]).reshape(shape)
            values = bf16_to_float(array) if kind == 30 else array.astype(np.float32)
        if not np.isfinite(values).all():
            raise AdapterError(f"{self.path}: tensor {name!r} has values that are not finite")
        return values

    def _num_bytes(self, name: str) -> int:
        """Of a tensor. Raises AdapterError for a type that is not supported."""
        kind, shape, _ = self._tensors[name]
        count = math.prod(shape)
        if kind == Q8_0 and shape[-1] % Q8_0_VALUES == 0:
            return count // Q8_0_VALUES * Q8_0_BYTES
        if kind in FLOATS:
            return count * FLOATS[kind].itemsize
        raise AdapterError(f"{self.path}: tensor {name!r} has type {kind}; supported: F32, F16, BF16 and Q8_0")

    def _end(self, size: int) -> int:
        """Where the last tensor ends in a file of `size` bytes: what follows is not read. Raises AdapterError."""
        end = self._begin
        for name, tensor in self._tensors.items():
            end = max(end, self._begin + tensor.offset + self._num_bytes(name))
            if end > size:
                raise AdapterError(f"{self.path}: the bytes of tensor {name[:200]!r} are not in the file")
        return end

    def _read(self) -> None:
        version = self._number("<I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; supported are {VERSIONS}")
        num_tensors, num_keys = self._count("tensors"), self._count("keys")
        for _ in range(num_keys):
            name = self._text()
            self.keys[name] = self._value(self._number("<I"))
        for _ in range(num_tensors):
            name = self._text()
            dims = self._number("<I")
            if not 0 < dims <= 4:
                raise ValueError(f"tensor {name[:100]!r} has {dims} dimensions")
            shape = tuple(reversed([self._number("<Q") for _ in range(dims)]))
            self._tensors[name] = _Tensor(self._number("<I"), shape, self._number("<Q"))
        alignment = self.keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_COUNT:
            raise ValueError(f"general.alignment is {str(alignment)[:40]}")
        self._alignment = alignment
        self._begin = -(-self._at // alignment) * alignment

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY:
            entries, count = self._number("<I"), self._count("entries of an array")
            if entries == ARRAY:
                raise ValueError("it has an array of arrays")
            if entries in SCALARS:
                self._skip(count * struct.calcsize(SCALARS[entries]))
                return None
            for _ in range(count):
                self._value(entries)
            return None
        if kind not in SCALARS:
            raise ValueError(f"it has a value of type {kind}")
        return self._number(SCALARS[kind])

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self._at)
        self._skip(struct.calcsize(code))
        return value

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES} bytes")

    def _count(self, what: str) -> int:
        count = int(self._number("<Q"))
        if count > MAX_COUNT:
            raise ValueError(f"it has {count} {what}; an adapter may have {MAX_COUNT}")
        return count

    def _text(self) -> str:
        length = int(self._number("<Q"))
        if length > min(MAX_TEXT_BYTES, len(self.data) - self._at):
            raise ValueError(f"a text of {length} bytes is too long")
        text = str(self.data[self._at : self._at + length], "utf-8")
        self._at += length
        return text
