"""What the headers of a model's weight files say: sizes, the number of parameters and the formats.

A safetensors file starts with the length of its header (u64, little-endian), then the header: a JSON object with the
dtype, shape and place of each tensor.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pipeline.own_files import OpenFolder
from pipeline.runtime.files.regular_files import open_regular, read_regular
from pipeline.runtime.model.in_place import is_index, load
from pipeline.runtime.model.model_folder import format_key

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors package."""
WEIGHT_STATES = "weight_files.json"
MAX_STATES_BYTES = 1 << 20
FileState = tuple[int, int]
"""Bytes, and the time of modification in ns."""
BLOCKS = {
    "q8_0": (32, 34),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "fp8": (128, 132),
}
"""Weights and bytes of a block. Quantized matrices are stored as bytes."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    """Begin and end, from the header's end; in a .gguf file, from the file's beginning."""


class WeightFacts(msgspec.Struct, frozen=True):
    """Facts of all weight files together."""

    num_bytes: int
    num_parameters: int
    format: str
    """The format of most weights: such as Q8_0, BF16."""

    @property
    def has_gguf_blocks(self) -> bool:
        """Whether `format` is a block format of GGUF."""
        return self.format.lower() in BLOCKS and self.format != "FP8"


def weight_facts(paths: Iterable[Path]) -> WeightFacts:
    """Read the headers. Raises OSError and msgspec.DecodeError, or ValueError if a header is too long."""
    num_bytes = 0
    num_of: Counter[str] = Counter()
    for path in paths:
        tensors, metadata = decode_header(header_of(path))
        num_bytes += 0 if is_index(path) else path.stat().st_size
        for name, tensor in tensors.items():
            size = math.prod(tensor.shape)
            num_bytes += tensor.data_offsets[1] - tensor.data_offsets[0] if is_index(path) else 0
            if (format := metadata.get(format_key(name))) in BLOCKS:
                num_weights, num_bytes_of_block = BLOCKS[format]
                num_of[format] += size // num_bytes_of_block * num_weights
            else:
                num_of[tensor.dtype] += size
    return WeightFacts(num_bytes, num_of.total(), num_of.most_common(1)[0][0].upper() if num_of else "")


def decode_header(text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors by name, and the metadata. Raises msgspec.DecodeError."""
    header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
    return {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in header.items()}, metadata


def header_of(path: Path) -> bytes:
    """The header of a weight file, also of one whose tensors are in a .gguf file. Raises OSError,
    msgspec.DecodeError, or ValueError if it is too long."""
    if is_index(path):
        return msgspec.json.encode(load(path).header)
    with os.fdopen(open_regular(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: the header has {length} bytes, and the limit is {MAX_HEADER_BYTES}")
        return file.read(length)


# --------------------------------------------------------------------------------------------- what files were


def states_of(paths: Iterable[Path]) -> dict[str, FileState]:
    """The states of files, by their paths. Raises OSError."""
    stats = ((str(path), path.stat()) for path in paths)
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


def save_states(states: dict[str, FileState], folder: Path) -> None:
    """Write into a prepared folder what the weight files of its source were: the executor reads these in place, and if
    another file had their name when it is started again, streams would go on with other weights. Others that read the
    folder see all of it or nothing. Raises OSError."""
    with OpenFolder(folder) as opened:  # another user of the cache may put a link in its place
        partial = opened.path / f"{WEIGHT_STATES}.{os.getpid()}.partial"
        partial.unlink(missing_ok=True)  # of a process that has died
        with partial.open("xb") as file:
            file.write(msgspec.json.encode(states))
        partial.replace(opened.path / WEIGHT_STATES)


def has_states(folder: Path) -> bool:
    """Whether a prepared folder says what its weight files were."""
    return (folder / WEIGHT_STATES).is_file()


def load_states(folder: Path) -> dict[str, FileState]:
    """Those of a prepared folder; empty for one whose files are identified otherwise. Raises OSError and
    msgspec.DecodeError."""
    if not has_states(folder):
        return {}
    return msgspec.json.decode(read_regular(folder / WEIGHT_STATES, MAX_STATES_BYTES), type=dict[str, FileState])
