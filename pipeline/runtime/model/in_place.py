"""Weight files of a prepared folder whose tensors stay in a .gguf file: an index says where in it they are.

in_place-1.json    the tensors of the first part of the model, in_place-2.json of the second, …

The header is that of a safetensors file, with offsets from the beginning of the .gguf file. The file must be the one
that was prepared: its size and its time of modification are compared.
"""

from pathlib import Path
from typing import Any

import msgspec

from pipeline.runtime.files.regular_files import read_regular

PREFIX, SUFFIX = "in_place-", ".json"
MAX_INDEX_BYTES = 100_000_000


class GgufIndex(msgspec.Struct, frozen=True):
    """What an index says."""

    file: str
    """Absolute path of the .gguf file."""
    num_bytes: int
    modified_ns: int
    header: dict[str, Any]
    """Tensors by name, with dtype, shape and data_offsets, and __metadata__ with the formats of blocks."""
    interleaved: dict[str, int] = {}  # msgspec copies a struct's empty defaults
    """Tensors whose rows are in another order than ours, by name: the size of a head. The rows of a head of 6 are
    0 3 1 4 2 5 there, because llama.cpp rotates adjacent rows."""

    def save(self, folder: Path, number: int) -> str:
        """Write the index of part `number`, from 1. Returns its name. Raises OSError."""
        name = f"{PREFIX}{number}{SUFFIX}"
        (folder / name).write_bytes(msgspec.json.encode(self))
        return name


def is_index(path: Path) -> bool:
    return path.name.startswith(PREFIX) and path.suffix == SUFFIX


def load(path: Path) -> GgufIndex:
    """Raises OSError and msgspec.DecodeError."""
    return msgspec.json.decode(read_regular(path, MAX_INDEX_BYTES), type=GgufIndex)


def data_file(path: Path) -> Path:
    """The file that has the tensors of a weight file: that of its index, or itself. Raises as `load` does."""
    return Path(load(path).file) if is_index(path) else path
