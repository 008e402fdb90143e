"""What the headers of a model's weight files say: sizes, the number of parameters and the formats.

A safetensors file starts with the length of its header (u64, little-endian), then the header: a JSON object with the
dtype, shape and place of each tensor.
"""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pipeline.runtime.model_folder import format_key

MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors package."""
BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q4_1": 20, "q4_0": 18}
"""Bytes of a block of 32 weights. Quantized matrices are stored as bytes."""
_METADATA = "__metadata__"


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]


class WeightFacts(msgspec.Struct, frozen=True):
    """Facts of all weight files together."""

    num_bytes: int
    num_parameters: int
    format: str
    """The format of most weights: such as Q8_0, BF16."""

    @property
    def has_gguf_blocks(self) -> bool:
        """Whether `format` is a block format of GGUF."""
        return self.format.lower() in BLOCK_BYTES


def weight_facts(paths: Iterable[Path]) -> WeightFacts:
    """Read the headers. Raises OSError and msgspec.DecodeError, or ValueError if a header is too long."""
    num_bytes = 0
    num_of: Counter[str] = Counter()
    for path in paths:
        num_bytes += path.stat().st_size
        header = msgspec.json.decode(_header(path), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(header.pop(_METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        for name, raw in header.items():
            tensor = msgspec.json.decode(raw, type=_Tensor)
            size = math.prod(tensor.shape)
            if (block := metadata.get(format_key(name))) in BLOCK_BYTES:
                num_of[block] += size // BLOCK_BYTES[block] * BLOCK
            else:
                num_of[tensor.dtype] += size
    return WeightFacts(num_bytes, num_of.total(), num_of.most_common(1)[0][0].upper() if num_of else "")


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: the header has {length} bytes, and the limit is {MAX_HEADER_BYTES}")
        return file.read(length)
