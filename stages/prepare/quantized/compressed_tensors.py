"""compressed-tensors checkpoints, as llm-compressor writes them.

    pack-quantized        weight_packed int32 [N, K * bits / 32], weight_scale [N, G], weight_shape [2]; asymmetric:
                          weight_zero_point int32 [N * bits / 32, G]; act-order: weight_g_idx int32 [K]
    int-quantized         weight int8 [N, K], weight_scale [1] or [N, G]; asymmetric: weight_zero_point int8, likewise
    float-quantized       weight float8_e4m3fn [N, K], weight_scale; see fp8.py
    mxfp4-pack-quantized  weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]; see mxfp4.py
    naive-quantized       as int-quantized or float-quantized

Packed codes and zero points are stored plus 2 ** (bits - 1), the first in the lowest bits.

Source: compressed_tensors/compressors in the package of that name.
"""

from typing import Any

import msgspec
import numpy as np

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.quantized.fp8 import FP8, Fp8Matrix, checked_block
from pipeline.stages.prepare.quantized.gptq import read_groups
from pipeline.stages.prepare.quantized.matrix import IntegerMatrix, QuantizedMatrix
from pipeline.stages.prepare.quantized.mxfp4 import Mxfp4Matrix
from pipeline.stages.prepare.quantized.packing import Array, Rows, unpack
from pipeline.stages.prepare.quantized.scheme import SchemeFault, Size
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape

SERVED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
OTHER = ("mixed-precision", "dense")
"""Formats of a whole checkpoint that say nothing about single groups."""
PACKED_BITS = (2, 4, 8)
"""Bits that divide a word. Releases differ in how they pack others."""
INT8_ZERO = 128


class WeightArgs(msgspec.Struct, frozen=True):
    """How the weights of a group are quantized."""

    num_bits: Size = 8
    type: str = "int"
    group_size: Size | None = None
    strategy: str | None = None
    block_structure: tuple[Size, Size] | None = None


class Group(msgspec.Struct, frozen=True):
    """Modules that are quantized alike."""

    weights: WeightArgs | None = None
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class CompressedTensorsConfig(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter."""

    config_groups: dict[str, Group]
    format: str
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class CompressedTensorsScheme:
    """Reads the matrices of a checkpoint. Raises SchemeFault if the config has something that isn't served."""

    def __init__(self, config: CompressedTensorsConfig) -> None:
        if config.transform_config:
            raise SchemeFault("transform_config is set, but transformed weights are not served")
        sparse = (config.sparsity_config or {}).get("format", "dense")
        if sparse != "dense":
            raise SchemeFault(f"sparsity_config has format {shown(sparse)}; 'dense' is served")
        groups = [group for group in config.config_groups.values() if group.weights is not None]
        if not groups:
            raise SchemeFault("config_groups has no group with weights")
        for format in (config.format, *(group.format for group in groups)):
            if format is not None and format not in (*SERVED, *OTHER):
                raise SchemeFault(f"format is {shown(format)}; with compressed-tensors, served are {', '.join(SERVED)}")
        args = [group.weights for group in groups if group.weights is not None]
        for each in args:
            served = (4, 8) if each.type == "float" else PACKED_BITS
            if each.type not in ("int", "float") or each.num_bits not in served:
                raise SchemeFault(
                    f"config_groups has weights of type {shown(each.type)} with {each.num_bits} bits; served are int "
                    f"with {', '.join(map(str, PACKED_BITS))} and float with 8 (FP8) or 4 (MXFP4)"
                )
        self._block = next(
            (checked_block("block_structure", w.block_structure) for w in args if w.block_structure), None
        )
        self.title = f"compressed-tensors, {config.format}, {' and '.join(dict.fromkeys(map(_described, args)))}"
        ignored = []
        if any(group.input_activations or group.output_activations for group in groups):
            ignored.append("activations are not quantized")
        if config.kv_cache_scheme:
            ignored.append("the KV cache is not quantized")
        self.ignored = tuple(ignored)

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> QuantizedMatrix | None:
        packed, weight = f"{module}.weight_packed", f"{module}.weight"
        if packed in tensors:
            if tensors.dtype(packed) == "U8":
                scale = f"{module}.weight_scale"
                return Mxfp4Matrix(packed, scale, (shape[0], shape[1] // 2), shape, tensors)
            return PackedMatrix(module, shape, tensors)
        if weight not in tensors:
            return None
        if tensors.dtype(weight) == "I8":
            return Int8Matrix(module, shape, tensors)
        if tensors.dtype(weight) in FP8:
            return Fp8Matrix(module, shape, tensors, self._block)
        return None


def _described(args: WeightArgs) -> str:
    groups = f" in groups of {args.group_size}" if (args.group_size or 0) > 0 else f" per {args.strategy or 'tensor'}"
    return f"{args.type}{args.num_bits}{groups}"


class _ScaledMatrix(IntegerMatrix):
    """Integers with scales [1], [N, 1] or [N, G]."""

    def __init__(self, module: str, shape: Shape, bits: int, beside: str, tensors: CheckpointTensors) -> None:
        scale = f"{module}.weight_scale"
        tensors.require(scale, beside)
        num_rows, num_columns = shape
        found = tensors.shape(scale)
        self._scale_shape = (num_rows, 1) if found in ((), (1,), (num_rows,)) else found
        num_groups = self._scale_shape[-1]
        if self._scale_shape != (num_rows, num_groups) or num_groups < 1 or num_columns % num_groups:
            raise tensors.fault(
                scale,
                f"has shape {list(found)}; it must be [1] or [{num_rows}, groups], groups a divisor of {num_columns}",
            )
        groups = f"{module}.weight_g_idx"
        group_of = read_groups(groups, num_columns, num_groups, tensors) if groups in tensors else None
        super().__init__(shape, bits, num_columns // num_groups, group_of)
        self._tensors, self._scale, self._zero_point = tensors, scale, f"{module}.weight_zero_point"
        tensors.floats(scale, found)

    def scales(self, rows: Rows) -> Array:
        found = self._tensors.floats(self._scale, self._tensors.shape(self._scale))
        scales: Array = np.broadcast_to(found.reshape(-1, self._scale_shape[1]), self._scale_shape)
        return scales[rows]

    def _int8_zeros(self, rows: Rows) -> Array:
        """Zero points that are not packed, plus half of the codes."""
        shape = self._tensors.shape(self._scale)
        stored = self._tensors.raw(self._zero_point, ("I8",), shape).astype(np.int32).reshape(-1, self._scale_shape[1])
        zeros: Array = np.broadcast_to(stored, self._scale_shape)[rows]
        return zeros + (1 << (self.bits - 1))


class PackedMatrix(_ScaledMatrix):
    """A matrix of packed codes. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors) -> None:
        packed, sizes = f"{module}.weight_packed", f"{module}.weight_shape"
        num_rows, num_columns = shape
        found = tensors.shape(packed)
        bits = next((bits for bits in PACKED_BITS if found == (num_rows, -(-num_columns * bits // 32))), None)
        if bits is None:
            raise tensors.fault(
                packed,
                f"has shape {list(found)}; config.json makes the weight {list(shape)}, so it must be "
                f"[{num_rows}, {num_columns} * bits / 32] with {', '.join(map(str, PACKED_BITS))} bits",
            )
        if sizes in tensors and (stored := tuple(tensors.raw(sizes, ("I64", "I32"), (2,)).tolist())) != shape:
            raise tensors.fault(sizes, f"is {list(stored)}, config.json says {list(shape)}")
        super().__init__(module, shape, bits, packed, tensors)
        self._codes = tensors.raw(packed, ("I32",), found)
        self.zeros(slice(0, 1))  # checks the tensor

    def codes(self, rows: Rows) -> Array:
        return unpack(self._codes[rows], self.bits)[:, : self.shape[1]]

    def zeros(self, rows: Rows) -> Array:
        if self._zero_point not in self._tensors:
            return np.full(self._scale_shape, 1 << (self.bits - 1), np.int32)[rows]
        if self._tensors.dtype(self._zero_point) == "I8":
            return self._int8_zeros(rows)
        num_rows, num_groups = self._scale_shape
        words = self._tensors.raw(self._zero_point, ("I32",), (-(-num_rows * self.bits // 32), num_groups))
        return unpack(words.T, self.bits)[:, :num_rows].T[rows].astype(np.int32)


class Int8Matrix(_ScaledMatrix):
    """A matrix of int8. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors) -> None:
        weight = f"{module}.weight"
        super().__init__(module, shape, 8, weight, tensors)
        self._codes = tensors.raw(weight, ("I8",), shape)
        self.zeros(slice(0, 1))  # checks the tensor

    def codes(self, rows: Rows) -> Array:
        return self._codes[rows].view(np.uint8) ^ np.uint8(INT8_ZERO)

    def zeros(self, rows: Rows) -> Array:
        if self._zero_point not in self._tensors:
            return np.full(self._scale_shape, INT8_ZERO, np.int32)[rows]
        return self._int8_zeros(rows)
