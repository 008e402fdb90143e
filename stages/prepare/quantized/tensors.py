"""The tensors of a quantized checkpoint: codes, scales and zero points beside the float weights, mapped."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.runtime.model.weight_headers import TensorEntry
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.quantized.packing import Array, Rows
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import STORED, Shape

FLOATS = tuple(STORED)
EXPONENTS = ("F8_E8M0", "U8")
"""Powers of two: 2 ** (byte - 127)."""
EXPONENT_BIAS = 127
NAN_EXPONENT = 255

DTYPES: dict[str, np.dtype[Any]] = {
    **STORED,
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", *EXPONENTS), np.dtype("u1")),
}
"""numpy's dtypes for what a checkpoint may store; the bits of floats that numpy lacks."""


class CheckpointTensors:
    """Tensors by name. Remembers which of them were taken, so that the rest can be refused."""

    def __init__(self, found: dict[str, tuple[Path, TensorEntry]]) -> None:
        self._found = found
        self._taken: set[str] = set()
        # One map for each file: Python keeps a file open for each map.
        self._maps = {path: np.memmap(path, np.uint8, "r") for path in {path for path, _ in found.values()}}

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def dtype(self, name: str) -> str:
        return self._found[name][1].dtype

    def shape(self, name: str) -> Shape:
        return self._found[name][1].shape

    def path(self, name: str) -> Path:
        return self._found[name][0]

    def fault(self, name: str, words: str) -> ModelError:
        """An error about a tensor of the checkpoint."""
        return ModelError(f"{self.path(name)}: tensor {shown(name)} {words}")

    def require(self, name: str, beside: str) -> None:
        """Raises ModelError unless the tensor `name` exists; `beside` is the tensor that needs it."""
        if name not in self._found:
            raise self.fault(beside, f"needs {shown(name)}, which is missing")

    def raw(self, name: str, dtypes: Sequence[str], *shapes: Shape) -> Array:
        """A tensor in the mapped file; bfloat16 and 8-bit floats as their bits.

        Raises ModelError unless it exists with one of these dtypes and shapes.
        """
        if name not in self._found:
            raise ModelError(f"the weights have no tensor {shown(name)}, which config.json requires")
        _, entry = self._found[name]
        if entry.shape not in shapes:
            expected = " or ".join(shown(list(shape)) for shape in shapes)
            raise self.fault(name, f"has shape {shown(list(entry.shape))}; it must be {expected}")
        if entry.dtype not in dtypes:
            raise self.fault(name, f"is {entry.dtype}; it must be {' or '.join(dtypes)}")
        return self.bytes(name).view(DTYPES[entry.dtype]).reshape(entry.shape)

    def num_bytes(self, name: str) -> int:
        begin, end = self._found[name][1].data_offsets
        return end - begin

    def bytes(self, name: str) -> Array:
        """The bytes of a tensor of any dtype, flat and mapped."""
        path, entry = self._found[name]
        begin, end = entry.data_offsets
        self._taken.add(name)
        return self._maps[path][begin:end]

    def floats(self, name: str, *shapes: Shape, exponents: bool = False) -> Array:
        """A whole tensor of floats, float32; with `exponents` also powers of two.

        Raises ModelError as `raw`, and if a number isn't finite.
        """
        stored = self.raw(name, (*FLOATS, *EXPONENTS) if exponents else FLOATS, *shapes)
        values = powers_of_two(stored) if self.dtype(name) in EXPONENTS else self._widen(name, stored)
        if not np.isfinite(values).all():
            raise self.fault(name, "has values that are not finite")
        return values

    def float_rows(self, name: str, shape: Shape, rows: Rows) -> Array:
        """Rows of a tensor of floats, float32."""
        return self._widen(name, self.raw(name, FLOATS, shape)[rows])

    def _widen(self, name: str, stored: Array) -> Array:
        if self.dtype(name) == "BF16":  # bfloat16 is the upper half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def rest(self) -> list[str]:
        """The tensors that were not taken."""
        return [name for name in self._found if name not in self._taken]


def powers_of_two(exponents: Array) -> Array:
    """Exponents with a bias of 127 (E8M0) as float32; 255 is NaN."""
    values: Array = np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS).astype(np.float32)
    return np.where(exponents == NAN_EXPONENT, np.float32(math.nan), values)
