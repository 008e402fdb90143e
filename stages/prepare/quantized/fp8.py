"""Weights in 8-bit floats, with one scale, a scale per output, per block of outputs and inputs, or per group of inputs.

    weight            float8_e4m3fn or float8_e5m2 [N, K]
    weight_scale_inv  [N / rows, K / columns], rounded up: DeepSeek's name; it is multiplied nevertheless
    weight_scale      [], [1], [N], [N, 1], [N, G] or blocks

w = weight * scale. Scales are floats, or exponents (MXFP8 and "ue8m0"). Activation scales beside them are ignored,
because activations are not quantized.

e4m3 keeps its codes as `fp8` if columns come in blocks of 128 with one scale each; the rest becomes bf16.

Sources: transformers' `FineGrainedFP8Config` and `FbgemmFp8Config`; OCP 8-bit floating point specification (OFP8).
"""

import math

import msgspec
import numpy as np

from pipeline.stages.prepare.quantized.matrix import EXACT, ChosenFormat, QuantizedMatrix
from pipeline.stages.prepare.quantized.packing import Array, Rows, indices
from pipeline.stages.prepare.quantized.scheme import SchemeFault, Size
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape
from pipeline.stages.prepare.weights.weight_file import FP8_BYTES, FP8_COLUMNS, Format

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = ("weight_scale_inv", "weight_scale")


def _e4m3() -> Array:
    """The value of each byte. Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities, NaN is all ones."""
    values = []
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        value = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        value = math.nan if byte & 127 == 127 else value
        values.append(-value if byte & 128 else value)
    return np.array(values, np.float32)


VALUES = {
    "F8_E4M3": _e4m3(),
    # float16 without the lower half of its bits.
    "F8_E5M2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}


class Fp8Config(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter."""

    quant_method: str = "fp8"
    fmt: str = "e4m3"
    weight_block_size: tuple[Size, Size] | None = None
    activation_scheme: str | None = None


class Fp8Scheme:
    """Reads the matrices of an FP8 checkpoint. Raises SchemeFault if the config has something that isn't served."""

    ignored: tuple[str, ...] = ("activations are not quantized",)

    def __init__(self, config: Fp8Config) -> None:
        self._block = checked_block("weight_block_size", config.weight_block_size)
        blocks = "" if self._block is None else " in blocks of {} × {}".format(*self._block)
        self.title = f"{config.quant_method}{blocks}"

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> "Fp8Matrix | None":
        weight = f"{module}.weight"
        if weight not in tensors or tensors.dtype(weight) not in FP8:
            return None
        return Fp8Matrix(module, shape, tensors, self._block)


def checked_block(key: str, block: tuple[int, int] | None) -> tuple[int, int] | None:
    """Raises SchemeFault unless a block has outputs and inputs."""
    if block is not None and min(block) < 1:
        raise SchemeFault(f"{key} is {list(block)}; both numbers must be positive")
    return block


class Fp8Matrix(QuantizedMatrix):
    """A matrix of the file. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors, block: tuple[int, int] | None) -> None:
        self.shape = shape
        num_rows, num_columns = shape
        name = f"{module}.weight"
        self._codes = tensors.raw(name, FP8, shape)
        self._dtype = tensors.dtype(name)
        self._values = VALUES[self._dtype]
        self._tensors, self._name = tensors, name
        scale = next((f"{module}.{part}" for part in SCALES if f"{module}.{part}" in tensors), None)
        if scale is None:
            raise tensors.fault(
                name,
                f"is {tensors.dtype(name)} and needs {module}.{SCALES[0]} or {module}.{SCALES[1]}, which are missing",
            )
        found = tensors.shape(scale)
        grid = (1, 1) if found in ((), (1,)) else (*found, 1) if len(found) == 1 else found
        allowed = [(1, 1), (num_rows, 1)]
        if block is not None:
            block = min(block[0], num_rows), min(block[1], num_columns)
            allowed.append((-(-num_rows // block[0]), -(-num_columns // block[1])))
        elif len(grid) == 2 and grid[1] >= 1 and num_columns % grid[1] == 0:
            allowed.append((num_rows, grid[1]))
        if grid not in allowed:
            raise tensors.fault(
                scale,
                f"has shape {list(found)}; for a weight of {list(shape)} it must be one of "
                f"{', '.join(str(list(each)) for each in allowed)}",
            )
        is_block = block is not None and grid == allowed[-1]
        self._rows, self._columns = block if block and is_block else (num_rows // grid[0], num_columns // grid[1])
        self._scales = tensors.floats(scale, found, exponents=True).reshape(grid)

    def kept(self) -> ChosenFormat:
        if (obstacle := self._obstacle()) is not None:
            return ChosenFormat("bf16", f"{obstacle}, rounded once")
        return ChosenFormat("fp8", EXACT)

    def _obstacle(self) -> str | None:
        """Why `fp8` can't hold the codes."""
        if self._dtype != "F8_E4M3":
            return "8-bit floats with 5 bits of exponent"
        if self.shape[1] % FP8_COLUMNS:
            return f"8-bit floats in {self.shape[1]} columns, not a multiple of {FP8_COLUMNS}"
        if self._columns % FP8_COLUMNS and self._columns < self.shape[1]:
            return f"8-bit floats with scales of {self._columns} columns, not a multiple of {FP8_COLUMNS}"
        return None

    def note(self, format: Format) -> str | None:
        return EXACT if format == "fp8" and self._obstacle() is None else None

    def blocks(self, rows: Rows, format: Format) -> Array:
        codes = self._codes[rows]
        if (codes & 127 == 127).any():
            raise self._tensors.fault(self._name, "has values that are not numbers")
        first_columns = np.arange(0, self.shape[1], FP8_COLUMNS)
        scales = self._scales_of(rows)[:, first_columns // self._columns]
        blocks = np.empty((len(codes), len(first_columns), FP8_BYTES), np.uint8)
        blocks[:, :, :4] = scales.astype("<f4")[:, :, None].view(np.uint8)
        blocks[:, :, 4:] = codes.reshape(len(codes), -1, FP8_COLUMNS)
        return blocks.reshape(len(codes), -1)

    def _scales_of(self, rows: Rows) -> Array:
        """The scales of some rows, [n, groups of columns]."""
        scales: Array = self._scales[indices(rows, self.shape[0]) // self._rows]
        return scales

    def values(self, rows: Rows) -> Array:
        values: Array = self._values[self._codes[rows]]
        values *= np.repeat(self._scales_of(rows), self._columns, axis=1)[:, : self.shape[1]]
        return values
