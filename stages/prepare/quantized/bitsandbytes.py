"""bitsandbytes checkpoints: NF4 and FP4 with a scale per block of values, and LLM.int8() with a scale per output.

4 bits:

    weight                                 bytes of the flat values: the first of a pair is in the upper half
    weight.quant_map                       float32 [16]   the value of each code
    weight.absmax                          float32 [N * K / blocksize], or codes uint8 if it is quantized itself:
    weight.nested_absmax, .nested_quant_map   absmax = nested_quant_map[code] * nested_absmax[i / nested_blocksize] +
                                              nested_offset
    weight.quant_state.bitsandbytes__nf4   JSON: shape, blocksize, nested_blocksize, nested_offset

8 bits:

    weight         int8 [N, K]
    SCB            float32 [N]   w = weight * SCB / 127
    weight_format  uint8 []      0: rows

Sources: `QuantState.as_dict` in bitsandbytes/functional.py, `Linear8bitLt` in bitsandbytes/nn/modules.py.
"""

import math
from typing import Annotated

import msgspec
import numpy as np

from pipeline.stages.prepare.quantized.matrix import FloatMatrix, IntegerMatrix, QuantizedMatrix
from pipeline.stages.prepare.quantized.packing import Array, Rows, indices
from pipeline.stages.prepare.quantized.scheme import SchemeFault
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape

TYPES = ("nf4", "fp4")
LARGEST = 127
ROW_MAJOR = 0
MAX_STATE_BYTES = 4096
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class BitsAndBytesConfig(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter."""

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"


class QuantState(msgspec.Struct, frozen=True):
    """The JSON beside a weight of 4 bits."""

    shape: tuple[int, ...]
    blocksize: BlockSize
    nested_blocksize: BlockSize | None = None
    nested_offset: float | None = None


class BitsAndBytesScheme:
    """Reads the matrices of a bitsandbytes checkpoint. Raises SchemeFault if the config has something that isn't
    served."""

    ignored: tuple[str, ...] = ()

    def __init__(self, config: BitsAndBytesConfig) -> None:
        if config.load_in_4bit == config.load_in_8bit:
            raise SchemeFault("must have either load_in_4bit or load_in_8bit, set to true")
        if config.load_in_4bit and config.bnb_4bit_quant_type not in TYPES:
            raise SchemeFault(f"bnb_4bit_quant_type is {config.bnb_4bit_quant_type!r}; served are {', '.join(TYPES)}")
        self.title = f"bitsandbytes, {config.bnb_4bit_quant_type if config.load_in_4bit else 'int8'}"

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> QuantizedMatrix | None:
        if f"{module}.weight.quant_map" in tensors or any(
            f"{module}.weight.{_STATE}{kind}" in tensors for kind in TYPES
        ):
            return Nf4Matrix(module, shape, tensors)
        if f"{module}.weight" in tensors and tensors.dtype(f"{module}.weight") == "I8":
            return Int8Matrix(module, shape, tensors)
        return None


_STATE = "quant_state.bitsandbytes__"


class Nf4Matrix(FloatMatrix):
    """A matrix of 4-bit codes. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors) -> None:
        self.shape = shape
        name = f"{module}.weight"
        kind = next((kind for kind in TYPES if f"{name}.{_STATE}{kind}" in tensors), None)
        if name not in tensors or kind is None:
            beside = f"{name}.quant_map" if kind is None else f"{name}.{_STATE}{kind}"
            tensors.require(name, beside)
            tensors.require(f"{name}.{_STATE}{TYPES[0]}", beside)
        for part in ("quant_map", "absmax"):
            tensors.require(f"{name}.{part}", name)
        state = self._read_state(f"{name}.{_STATE}{kind}", tensors)
        self.kind = f"{kind} in blocks of {state.blocksize}"
        if state.shape != shape:
            raise tensors.fault(
                f"{name}.{_STATE}{kind}", f"has shape {list(state.shape)}, config.json says {list(shape)}"
            )
        if shape[1] % 2:
            raise tensors.fault(name, f"has {shape[1]} columns; codes of 4 bits need an even number")
        if tensors.num_bytes(name) != math.prod(shape) // 2:
            raise tensors.fault(
                name, f"has {tensors.num_bytes(name)} bytes; {list(shape)} takes {math.prod(shape) // 2}"
            )
        self._codes = tensors.bytes(name).reshape(shape[0], shape[1] // 2)
        self._map = tensors.floats(f"{name}.quant_map", (16,))
        self._state, self._num_blocks = state, -(-math.prod(shape) // state.blocksize)
        self._tensors, self._name = tensors, name
        self._scales(0, self._num_blocks)  # checks the tensors; a model's scales together are too large to keep

    @staticmethod
    def _read_state(name: str, tensors: CheckpointTensors) -> QuantState:
        if tensors.num_bytes(name) > MAX_STATE_BYTES:
            raise tensors.fault(name, f"has {tensors.num_bytes(name)} bytes; at most {MAX_STATE_BYTES} are allowed")
        try:
            state = msgspec.json.decode(tensors.bytes(name).tobytes(), type=QuantState)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise tensors.fault(name, f"is not bitsandbytes' JSON: {error}") from error
        return state

    def _scales(self, first: int, end: int) -> Array:
        """The scales of blocks first .. end, float32."""
        tensors, state, absmax = self._tensors, self._state, f"{self._name}.absmax"
        if tensors.dtype(absmax) != "U8":
            return tensors.floats(absmax, (self._num_blocks,))[first:end]
        for part in ("nested_absmax", "nested_quant_map"):
            tensors.require(f"{self._name}.{part}", absmax)
        if state.nested_blocksize is None or state.nested_offset is None:
            raise tensors.fault(absmax, "is quantized, but the JSON beside it lacks nested_blocksize or nested_offset")
        codes = tensors.raw(absmax, ("U8",), (self._num_blocks,))[first:end]
        nested = tensors.floats(f"{self._name}.nested_absmax", (-(-self._num_blocks // state.nested_blocksize),))
        values = tensors.floats(f"{self._name}.nested_quant_map", (256,))[codes]
        scales: Array = values * nested[np.arange(first, end) // state.nested_blocksize]
        return scales + np.float32(state.nested_offset)

    def values(self, rows: Rows) -> Array:
        num_columns = self.shape[1]
        pairs = self._codes[rows]
        values = np.empty((len(pairs), num_columns), np.float32)
        values[:, 0::2] = self._map[pairs >> 4]
        values[:, 1::2] = self._map[pairs & 15]
        if not len(pairs):
            return values
        blocks = (indices(rows, self.shape[0])[:, None] * num_columns + np.arange(num_columns)) // self._state.blocksize
        first = int(blocks.min())
        values *= self._scales(first, int(blocks.max()) + 1)[blocks - first]
        return values


class Int8Matrix(IntegerMatrix):
    """A matrix of LLM.int8(). Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors) -> None:
        super().__init__(shape, 8, shape[1])
        weight, scales, layout = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
        tensors.require(scales, weight)
        if layout in tensors and (found := int(tensors.raw(layout, ("U8",), (), (1,)).reshape(-1)[0])) != ROW_MAJOR:
            raise tensors.fault(layout, f"is {found}; only {ROW_MAJOR} is served, the order of rows")
        self._codes = tensors.raw(weight, ("I8",), shape)
        self._scales = tensors.floats(scales, (shape[0],)).reshape(-1, 1) / np.float32(LARGEST)

    def codes(self, rows: Rows) -> Array:
        return self._codes[rows].view(np.uint8) ^ np.uint8(128)

    def scales(self, rows: Rows) -> Array:
        return self._scales[rows]

    def zeros(self, rows: Rows) -> Array:
        return np.full(self._scales.shape, 128, np.int32)[rows]
