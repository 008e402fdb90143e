"""A prepared adapter: one file, which the executor maps.

    MAGIC │ length of the header: u64 │ `Header` as JSON │ zeros up to a multiple of 64 │ matrices

Each matrix begins at a multiple of 64. A is [rank, inputs]; B is [outputs, rank], and contains the adapter's scaling.
The file's name is the adapter's id: a digest of what it was made of. So equal ids have equal values, and a stage that
has died finds the adapter again by the id in a request's options.
"""

import mmap
import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from pipeline.own_files import OpenFolder, make_folder
from pipeline.runtime.files.regular_files import open_regular

MAGIC = b"lora\r\n1\n"
LENGTH = struct.Struct("<Q")
ALIGN = 64
FOLDER = "adapters"
"""In the folder of the prepared model."""

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Dtype = Literal["bf16", "f32"]
DTYPES: Mapping[Dtype, "np.dtype[Any]"] = {"bf16": np.dtype("<u2"), "f32": np.dtype("<f4")}
"""bf16 as its bits."""

AnyArray = np.ndarray[Any, Any]


class Entry(msgspec.Struct, frozen=True):
    """The two matrices of one projection."""

    layer: int
    target: Target
    rank: int
    num_inputs: int
    num_outputs: int
    a: int
    """Offset in bytes, behind the header."""
    b: int


class Header(msgspec.Struct, frozen=True):
    dtype: Dtype
    max_rank: int
    entries: list[Entry]


class AdapterFile:
    """A mapped file. Raises OSError or ValueError if it is missing or not one of these."""

    def __init__(self, path: Path) -> None:
        with os.fdopen(open_regular(path), "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = len(MAGIC) + LENGTH.size
        if len(self._map) < begin or self._map[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path} is no prepared adapter")
        (length,) = LENGTH.unpack_from(self._map, len(MAGIC))
        if length > len(self._map) - begin:
            raise ValueError(f"{path} is too short")
        self.header = msgspec.json.decode(self._map[begin : begin + length], type=Header)
        self._begin = _aligned(begin + length)
        self._item = DTYPES[self.header.dtype]
        self._entries = {(entry.layer, entry.target): entry for entry in self.header.entries}
        ends = (
            max(e.a + e.rank * e.num_inputs * self._item.itemsize, e.b + e.rank * e.num_outputs * self._item.itemsize)
            for e in self.header.entries
        )
        if self._begin + max(ends, default=0) > len(self._map):
            raise ValueError(f"{path} is too short")

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def matrices(self, layer: int, target: Target) -> tuple[AnyArray, AnyArray] | None:
        """A [rank, inputs] and B [outputs, rank] of a projection; None if the adapter does not change it."""
        entry = self._entries.get((layer, target))
        if entry is None:
            return None
        return self._array(entry.a, entry.rank, entry.num_inputs), self._array(entry.b, entry.num_outputs, entry.rank)

    def rank(self, layer: int, target: Target) -> int:
        """The rank of a projection; 0 if the adapter does not change it."""
        entry = self._entries.get((layer, target))
        return 0 if entry is None else entry.rank

    def _array(self, offset: int, rows: int, columns: int) -> AnyArray:
        return np.frombuffer(self._map, self._item, rows * columns, self._begin + offset).reshape(rows, columns)


class Pair(msgspec.Struct, frozen=True):
    """The matrices of one projection, before they are written: arrays of the file's dtype."""

    layer: int
    target: Target
    a: Any
    b: Any


class PairShape(msgspec.Struct, frozen=True):
    """The sizes of a pair."""

    layer: int
    target: Target
    rank: int
    num_inputs: int
    num_outputs: int


def write(path: Path, dtype: Dtype, pairs: list[Pair]) -> None:
    """Write a file; another one of this name is replaced at once, so that readers see one or the other."""
    shapes = [PairShape(one.layer, one.target, len(one.a), one.a.shape[1], len(one.b)) for one in pairs]
    write_each(path, dtype, shapes, pairs)


def write_each(path: Path, dtype: Dtype, shapes: Sequence[PairShape], pairs: Iterable[Pair]) -> None:
    """As `write`, with pairs of these shapes that are made one after the other: none is kept."""
    entries, end = [], 0
    for one in shapes:
        offsets = []
        for num_values in (one.rank * one.num_inputs, one.rank * one.num_outputs):
            offsets.append(end)
            end = _aligned(end + num_values * DTYPES[dtype].itemsize)
        entries.append(Entry(one.layer, one.target, one.rank, one.num_inputs, one.num_outputs, *offsets))
    header = msgspec.json.encode(Header(dtype, max((entry.rank for entry in entries), default=0), entries))
    make_folder(path.parent)
    with OpenFolder(path.parent) as folder:  # another user of the cache may put a link in its place
        _write_in(folder.path / path.name, dtype, header, shapes, pairs)


def _write_in(path: Path, dtype: Dtype, header: bytes, shapes: Sequence[PairShape], pairs: Iterable[Pair]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    partial.unlink(missing_ok=True)  # of a process that has died
    try:
        with partial.open("xb") as file:
            file.write(MAGIC + LENGTH.pack(len(header)) + header)
            for one, pair in zip(shapes, pairs, strict=True):
                assert (pair.layer, pair.target) == (one.layer, one.target)
                assert pair.a.shape == (one.rank, one.num_inputs) and pair.b.shape == (one.num_outputs, one.rank)
                for array in (pair.a, pair.b):
                    file.write(b"\0" * (-file.tell() % ALIGN))
                    file.write(np.ascontiguousarray(array, DTYPES[dtype]).data)
            file.write(b"\0" * (-file.tell() % ALIGN))
            file.flush()
            os.fsync(file.fileno())  # else a machine that loses power could leave zeros behind the header
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def path_of(model_dir: Path, adapter_id: str) -> Path:
    """The file of an adapter of the prepared model in `model_dir`."""
    return model_dir / FOLDER / f"{adapter_id}.lora"


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
