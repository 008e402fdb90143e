"""Compare two files of driver.cpp: the same arrays, with the same bits."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

AnyArray = np.ndarray[Any, np.dtype[Any]]

TYPES: dict[str, np.dtype[Any]] = {
    "f": np.dtype("<f4"),
    "h": np.dtype("<u2"),
    "i": np.dtype("<i4"),
    "b": np.dtype("u1"),
}
"""h is bfloat16, by its bits."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An array that is not the same in two files."""

    name: str
    num: int
    """Values that differ, of `size`."""
    size: int
    largest: float
    """The largest difference of floats, relative to the largest magnitude of the array; of other types, 1."""

    def __str__(self) -> str:
        return f"{self.name}: {self.num} of {self.size} values differ, by up to {self.largest:.1e} of the largest"


def read(path: Path) -> Iterator[tuple[str, AnyArray]]:
    """The arrays of a file, by name. Raises ValueError if it ends within an array."""
    data = path.read_bytes()
    at = 0
    try:
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            name = data[at + 4 : at + 4 + length].decode()
            kind, num_bytes = struct.unpack_from("<cQ", data, at + 4 + length)
            dtype = TYPES[kind.decode()]
            at += 4 + length + 9
            yield name, np.frombuffer(data, dtype, num_bytes // dtype.itemsize, at)
            at += num_bytes
    except struct.error as error:
        raise ValueError(f"{path} is incomplete: {error}") from error


def differences(one: Path, other: Path) -> list[Difference]:
    """The arrays that differ. Raises ValueError if the files do not have the same arrays."""
    first, second = dict(read(one)), dict(read(other))
    if first.keys() != second.keys():
        raise ValueError(f"{one} and {other} contain other arrays: {sorted(first.keys() ^ second.keys())[:5]}")
    found = []
    for name, array in first.items():
        if array.shape != second[name].shape:
            raise ValueError(f"{name} has {array.size} values in {one}, {second[name].size} in {other}")
        if array.tobytes() != second[name].tobytes():
            found.append(_difference(name, array, second[name]))
    return found


def _difference(name: str, a: AnyArray, b: AnyArray) -> Difference:
    if a.dtype != TYPES["f"]:
        return Difference(name, int((a != b).sum()), a.size, 1.0)
    num = int((a.view(np.uint32) != b.view(np.uint32)).sum())
    finite = np.isfinite(a) & np.isfinite(b)
    scale = float(np.abs(a[finite]).max(initial=1e-30))
    largest = float(np.abs(a[finite] - b[finite]).max(initial=0)) / scale
    return Difference(name, num, a.size, largest if (a[~finite] == b[~finite]).all() else float("inf"))
