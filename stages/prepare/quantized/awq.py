"""AWQ checkpoints in AutoAWQ's version "gemm".

    qweight  int32 [K, N / 8]   codes of 4 bits of eight outputs, interleaved: 0 2 4 6 1 3 5 7 from the lowest bits on
    qzeros   int32 [G, N / 8]   zero points, likewise
    scales   float16 [G, N]

w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), with g = k // group_size.

Source: `WQLinear_GEMM.from_linear` in AutoAWQ.
"""

import msgspec
import numpy as np

from pipeline.stages.prepare.quantized.gptq import group_size_of, num_groups_of
from pipeline.stages.prepare.quantized.matrix import IntegerMatrix
from pipeline.stages.prepare.quantized.packing import Array, Rows, indices, unpack
from pipeline.stages.prepare.quantized.scheme import SchemeFault
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape

BITS = 4
PER_WORD = 8
ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where each of eight outputs is in a word, in codes from the lowest bits on."""


class AwqConfig(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter. Older files have `w_bit` and `q_group_size`."""

    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    version: str = "gemm"
    backend: str = "autoawq"


class AwqScheme:
    """Reads the matrices of an AWQ checkpoint. Raises SchemeFault if the config has something that isn't served."""

    ignored: tuple[str, ...] = ()

    def __init__(self, config: AwqConfig, method: str = "awq") -> None:
        bits = config.bits or config.w_bit or BITS
        if bits != BITS:
            raise SchemeFault(f"bits is {bits}; with awq, {BITS} is served")
        if config.version.lower() != "gemm":
            raise SchemeFault(f"version is {config.version!r}; with awq, 'gemm' is served")
        if config.backend != "autoawq":
            raise SchemeFault(f"backend is {config.backend!r}; with awq, 'autoawq' is served")
        self._group_size = config.group_size or config.q_group_size or -1
        group = "one group per row" if self._group_size < 1 else f"groups of {self._group_size}"
        self.title = f"{method}, {BITS} bits, {group}"

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> "AwqMatrix | None":
        return AwqMatrix(module, shape, tensors, self._group_size) if f"{module}.qweight" in tensors else None


class AwqMatrix(IntegerMatrix):
    """A matrix of the file. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(self, module: str, shape: Shape, tensors: CheckpointTensors, group_size: int) -> None:
        num_rows, num_columns = shape
        codes, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        for name in (zeros, scales):
            tensors.require(name, codes)
        if num_rows % PER_WORD:
            raise tensors.fault(
                codes, f"has {num_rows} outputs; with awq, their number must be a multiple of {PER_WORD}"
            )
        num_groups = num_groups_of(scales, num_rows, tensors)
        super().__init__(shape, BITS, group_size_of(scales, num_columns, num_groups, group_size, tensors))
        self._tensors, self._scales_name, self._scale_shape = tensors, scales, (num_groups, num_rows)
        self._codes = tensors.raw(codes, ("I32",), (num_columns, num_rows // PER_WORD))
        self._zeros = tensors.raw(zeros, ("I32",), (num_groups, num_rows // PER_WORD))
        tensors.floats(scales, self._scale_shape)

    def codes(self, rows: Rows) -> Array:
        return self._unpack(self._codes, rows)

    def scales(self, rows: Rows) -> Array:
        return self._tensors.floats(self._scales_name, self._scale_shape)[:, rows].T

    def zeros(self, rows: Rows) -> Array:
        return self._unpack(self._zeros, rows).astype(np.int32)

    def _unpack(self, words: Array, rows: Rows) -> Array:
        """Codes [n, K] uint8 of words [K, N / 8]."""
        each = indices(rows, self.shape[0])
        if not len(each):
            return np.empty((0, len(words)), np.uint8)
        first, end = int(each.min()) // PER_WORD, int(each.max()) // PER_WORD + 1
        codes: Array = unpack(words[:, first:end], BITS).T[
            each // PER_WORD * PER_WORD + ORDER[each % PER_WORD] - first * PER_WORD
        ]
        return codes
