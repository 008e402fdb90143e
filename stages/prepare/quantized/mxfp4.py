"""MXFP4: 4-bit floats (E2M1) in groups of 32 columns with a power of two as scale.

    NAME_blocks    uint8 [N, K / 32, 16]   gpt-oss' form; two codes per byte, the first in the lower half
    NAME_scales    uint8 [N, K / 32]       exponents with a bias of 127
                                           of all experts: [experts, N, …]

    weight_packed  uint8 [N, K / 2]        compressed-tensors' form of the same
    weight_scale   uint8 [N, K / 32]

The values 0, 0.5, 1, 1.5, 2, 3, 4 and 6 are halves of integers, so q8_0 with half of the scale holds them exactly.

Sources: `convert_moe_packed_tensors` in transformers/integrations/mxfp4.py; OCP Microscaling Formats specification.
"""

import math

import msgspec
import numpy as np

from pipeline.stages.prepare.quantized.matrix import IntegerMatrix
from pipeline.stages.prepare.quantized.packing import Array, Rows, unpack_bytes
from pipeline.stages.prepare.quantized.tensors import EXPONENTS, NAN_EXPONENT, CheckpointTensors, powers_of_two
from pipeline.stages.prepare.weights.tensors import Shape

GROUP = 32
ZERO = 128
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12])
CODES = np.concatenate([ZERO + _HALVES, ZERO - _HALVES]).astype(np.uint8)
"""Twice the value of each 4-bit float, plus `ZERO`."""


class Mxfp4Config(msgspec.Struct, frozen=True):
    """No key of `quantization_config` matters."""


class Mxfp4Scheme:
    """Reads the matrices of a checkpoint in gpt-oss' form."""

    title = "mxfp4"
    ignored: tuple[str, ...] = ()

    def __init__(self, config: Mxfp4Config) -> None:
        pass

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> "Mxfp4Matrix | None":
        name = f"{module}.weight" if len(shape) == 2 else module
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if blocks not in tensors:
            return None
        return Mxfp4Matrix(blocks, scales, (*shape[:-1], shape[-1] // GROUP, GROUP // 2), shape, tensors)


class Mxfp4Matrix(IntegerMatrix):
    """A matrix of the file. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, codes: str, scales: str, stored: Shape, shape: Shape, tensors: CheckpointTensors) -> None:
        """`stored` is the shape of the tensor `codes`. The matrices of all experts are one below the other."""
        tensors.require(scales, codes)
        num_rows, num_columns = math.prod(shape[:-1]), shape[-1]
        if num_columns % GROUP:
            raise tensors.fault(
                codes, f"has {num_columns} columns; with mxfp4, their number must be a multiple of {GROUP}"
            )
        super().__init__((num_rows, num_columns), 8, GROUP)
        self._codes = tensors.raw(codes, ("U8",), stored).reshape(num_rows, -1)
        exponents = tensors.raw(scales, EXPONENTS, (*shape[:-1], num_columns // GROUP))
        self._exponents = exponents.reshape(num_rows, -1)
        if (self._exponents == NAN_EXPONENT).any():
            raise tensors.fault(scales, f"has the exponent {NAN_EXPONENT}, which is not a number")

    def codes(self, rows: Rows) -> Array:
        pairs = self._codes[rows]
        return CODES[unpack_bytes(pairs.reshape(len(pairs), -1), 4)]

    def scales(self, rows: Rows) -> Array:
        return powers_of_two(self._exponents[rows]) / np.float32(2)

    def zeros(self, rows: Rows) -> Array:
        return np.full(self._exponents.shape, ZERO, np.int32)[rows]
