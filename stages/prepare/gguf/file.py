"""Reads and validates the header of a .gguf file, and maps its tensors.

    magic, version, counts │ keys with values │ tensor infos │ padding │ tensors, each at a multiple of the alignment
    └───────────────── at most MAX_HEADER_BYTES ─────────────┘

The file is untrusted, so every count and length is checked against the remaining bytes before it is used, and a value
is decoded only when it is requested. The gguf package's own reader does neither: it makes several objects per array
entry, so a header of 57 bytes can take gigabytes. Arrays of arrays are refused; llama.cpp does not read them either.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from pipeline.stages.prepare.files import MAX_SHOWN_BYTES, open_regular, shown, wrong_file
from pipeline.stages.prepare.sources.source import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 128 * 1024**2
"""Everything before the tensors' data. A vocabulary of 262,144 tokens takes 14 MB."""
MAX_KEYS = 2**16
MAX_KEY_BYTES = 2**16 - 1
"""The format's own limit."""
MAX_ENTRIES = 2**22
"""Entries of an array."""
MAX_TENSORS = 2**18
MAX_DIMS = 4
"""GGML_MAX_DIMS"""
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, BOOL, UINT32 = 8, 9, 7, 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes of the value types, by number."""
KEY_BYTES, TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
"""Minimum size of a key with its value, and of a tensor info."""
LENGTH = struct.Struct("<Q")
"""Of a string."""


class _Fault(ValueError):
    """A header is invalid."""


class _Value(NamedTuple):
    """Location of a value."""

    type: int
    """For an array, the type of its entries."""
    is_array: bool
    at: int
    """Offset in the file; for a string, of its length."""
    num: int
    """Entries of an array, else 1."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a .gguf file."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first; the file has the reverse order."""
    data: "np.ndarray[Any, np.dtype[np.uint8]]"
    """The bytes, mapped."""
    mapping: mmap.mmap
    """Of the file."""
    at: int
    """Offset of the bytes in the file."""
    path: Path
    """The file."""

    def release(self) -> None:
        """Take the bytes out of this process's memory; they are read again if they are used again."""
        begin, end = -(-self.at // mmap.PAGESIZE) * mmap.PAGESIZE, self.at + len(self.data)
        if end > begin:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def made_tensor(name: str, data: "np.ndarray[Any, Any]", path: Path) -> GgufTensor:
    """A float32 tensor of numbers that a file has elsewhere, such as under a key."""
    blocks = np.ascontiguousarray(data, np.float32).reshape(-1).view(np.uint8)
    kind = gguf.GGMLQuantizationType.F32
    return GgufTensor(name, kind, data.shape, blocks, mmap.mmap(-1, mmap.PAGESIZE), 0, path)


class GgufFile:
    """The keys and tensors of a file. Raises ModelError unless it is a complete file of a supported version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            try:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file can't be mapped
                raise self._unreadable(_Fault("it is empty")) from error
        self._mapping = mapping
        self._data = memoryview(mapping)
        self._at = 0
        self._end = min(len(mapping), MAX_HEADER_BYTES)
        self._values: dict[str, _Value] = {}
        try:
            num_tensors, num_keys = self._counts()
            for _ in range(num_keys):
                self._read_key()
            self.tensors = {tensor.name: tensor for tensor in self._read_tensors(num_tensors)}
        except _Fault as fault:
            raise self._unreadable(fault) from fault

    @property
    def names(self) -> list[str]:
        """The names of all keys, in the file's order."""
        return list(self._values)

    def get(self, key: str) -> Any:
        """The value of a key: a number, bool, str, or a list of these. None if the file lacks the key.

        Raises ModelError if a string is not UTF-8.
        """
        if (value := self._values.get(key)) is None:
            return None
        try:
            if value.type == STRING:
                texts = self._texts(value)
                return texts if value.is_array else texts[0]
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} is not UTF-8 text: {error.reason}") from error
        numbers = np.frombuffer(self._data, "<" + np.dtype(SCALARS[value.type]).str[1:], value.num, value.at)
        values = (numbers.astype(bool) if value.type == BOOL else numbers).tolist()
        return values if value.is_array else values[0]

    def _unreadable(self, fault: Exception) -> ModelError:
        return ModelError(f"{self.path} is not a complete GGUF file: {fault}; get it again")

    def _take(self, num_bytes: int, what: str) -> int:
        """Advance by `num_bytes` and return the offset before. Raises _Fault if fewer bytes are left."""
        left = self._end - self._at
        if num_bytes > left:
            raise _Fault(f"{what} takes {num_bytes} bytes, but only {left} are left{self._limit()}")
        at = self._at
        self._at += num_bytes
        return at

    def _limit(self) -> str:
        if len(self._data) <= MAX_HEADER_BYTES:
            return f" of the file's {len(self._data)}"
        return f" of the {MAX_HEADER_BYTES} allowed for a header"

    def _number(self, code: str, what: str) -> int:
        number: int = struct.unpack_from(f"<{code}", self._data, self._take(struct.calcsize(code), what))[0]
        return number

    def _text(self, what: str, max_bytes: int) -> str:
        length = self._number("Q", what)
        if length > max_bytes:
            raise _Fault(f"{what} has {length} bytes; at most {max_bytes} are allowed")
        at = self._take(length, what)
        try:
            return str(self._data[at : at + length], "utf-8")
        except UnicodeDecodeError as error:
            raise _Fault(f"{what} is not UTF-8 text: {error.reason}") from error

    def _counts(self) -> tuple[int, int]:
        at = self._take(len(MAGIC), "the magic number")
        if self._data[at : at + len(MAGIC)] != MAGIC:
            raise wrong_file(self.path, bytes(self._data[:MAX_SHOWN_BYTES])) or _Fault(
                f"it begins with {bytes(self._data[: len(MAGIC)])!r}, not {MAGIC!r}"
            )
        version = self._number("I", "the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise ModelError(
                    f"{self.path} is a big-endian GGUF file; only little-endian ones are supported: get such a file, "
                    "or convert this one with gguf_convert_endian.py of llama.cpp"
                )
            raise _Fault(f"its version is {version}; supported are {' and '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("Q", "the count of tensors"), self._number("Q", "the count of keys")
        left = self._end - self._at
        for count, what, most, least_bytes in (
            (num_tensors, "tensors", MAX_TENSORS, TENSOR_BYTES),
            (num_keys, "keys", MAX_KEYS, KEY_BYTES),
        ):
            if count > most:
                raise _Fault(f"it has {count} {what}; at most {most} are allowed")
            if count * least_bytes > left:
                raise _Fault(f"its {count} {what} take at least {count * least_bytes} bytes, but only {left} are left")
        return num_tensors, num_keys

    def _read_key(self) -> None:
        key = self._text("the name of a key", MAX_KEY_BYTES)
        what = f"the key {shown(key)}"
        if key in self._values:
            raise _Fault(f"{what} appears twice")
        kind = self._number("I", what)
        if kind != ARRAY:
            self._values[key] = self._skip(what, kind, False, 1)
            return
        kind = self._number("I", what)
        if kind == ARRAY:
            raise _Fault(f"{what} is an array of arrays, which are not supported")
        count = self._number("Q", what)
        if count > MAX_ENTRIES:
            raise _Fault(f"{what} is an array of {count} entries; at most {MAX_ENTRIES} are allowed")
        self._values[key] = self._skip(what, kind, True, count)

    def _skip(self, what: str, kind: int, is_array: bool, count: int) -> _Value:
        """Advance past `count` values of a type."""
        value = _Value(kind, is_array, self._at, count)
        if kind == STRING:
            if count * 8 > self._end - self._at:
                self._take(count * 8, what)
            self._skip_strings(count, what)
        elif kind in SCALARS:
            at = self._take(count * struct.calcsize(SCALARS[kind]), what)
            if kind == BOOL and max(self._data[at : self._at], default=0) > 1:
                raise _Fault(f"{what} has a bool that is neither 0 nor 1")
        else:
            raise _Fault(f"{what} has a value of the unknown type {kind}")
        return value

    def _skip_strings(self, count: int, what: str) -> None:
        """A vocabulary has hundreds of thousands of them."""
        at, end, data, read_length = self._at, self._end, self._data, LENGTH.unpack_from
        for _ in range(count):
            if at + LENGTH.size > end:
                break
            following = at + LENGTH.size + read_length(data, at)[0]
            if following > end:
                break
            at = following
        else:
            self._at = at
            return
        self._at = at
        self._take(self._number("Q", what), what)

    def _texts(self, value: _Value) -> list[str]:
        texts = []
        at = value.at
        for _ in range(value.num):
            (length,) = LENGTH.unpack_from(self._data, at)
            at += LENGTH.size + length
            texts.append(str(self._data[at - length : at], "utf-8"))
        return texts

    def _alignment(self) -> int:
        value = self._values.get("general.alignment")
        if value is None:
            return DEFAULT_ALIGNMENT
        alignment = self.get("general.alignment")
        if value.type != UINT32 or value.is_array or alignment < 1 or alignment & (alignment - 1):
            raise _Fault(f"general.alignment is {shown(alignment)}; it must be a power of two as uint32")
        return int(alignment)

    def _read_tensors(self, count: int) -> list[GgufTensor]:
        data = np.frombuffer(self._mapping, np.uint8)
        infos = [self._read_info() for _ in range(count)]
        if len({name for name, _, _, _ in infos}) < count:
            names = sorted(name for name, _, _, _ in infos)
            twice = next(a for a, b in pairwise(names) if a == b)
            raise _Fault(f"the tensor {shown(twice)} appears twice")
        alignment = self._alignment()
        begin = -(-self._at // alignment) * alignment
        end, before = 0, ""
        spans = []
        for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            num_bytes = math.prod(shape) // block * block_bytes
            what = f"the tensor {shown(name)}"
            if offset % alignment:
                raise _Fault(f"{what} begins at {offset}, not at a multiple of general.alignment = {alignment}")
            if offset < end:
                raise _Fault(f"{what} begins at {offset}, inside {shown(before)}")
            end, before = offset + num_bytes, name
            spans.append((name, kind, shape, begin + offset, begin + end))
        if spans and begin + end > len(data):  # without tensors there may be no padding
            raise _Fault(f"it has {len(data)} of {begin + end} bytes; the tensor {shown(before)} ends there")
        return [
            GgufTensor(name, kind, shape, data[first:last], self._mapping, first, self.path)
            for name, kind, shape, first, last in spans
        ]

    def _read_info(self) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
        """Name, type, shape, and offset from the beginning of the tensor data."""
        name = self._text("the name of a tensor", MAX_KEY_BYTES)
        what = f"the tensor {shown(name)}"
        num_dims = self._number("I", what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise _Fault(f"{what} has {num_dims} dimensions; it must have 1 to {MAX_DIMS}")
        shape = tuple(self._number("Q", what) for _ in range(num_dims))[::-1]
        number = self._number("I", what)
        try:
            kind = gguf.GGMLQuantizationType(number)
            block, _ = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise _Fault(f"{what} has the unknown type {number}") from error
        if min(shape) < 1 or shape[-1] % block:
            raise _Fault(f"{what} has the shape {list(shape)}; rows must be whole blocks of {block} {kind.name} values")
        return name, kind, shape, self._number("Q", what)
