"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and AutoRound write them.

    qweight  int32 [K * bits / 32, N]   codes of a column of the weight's rows, the first in the lowest bits
    qzeros   int32 [G, N * bits / 32]   zero points; the format "gptq" (v1) stores them minus 1, "gptq_v2" as they are
    scales   float16 [G, N]
    g_idx    int32 [K]                  the group of each column, if the file has it

w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), with g the group of column k.

Sources: `QuantLinear.pack` in AutoGPTQ's qlinear modules, `convert_gptq_v1_to_v2_format` in GPTQModel.
"""

import msgspec
import numpy as np

from pipeline.stages.prepare.quantized.matrix import IntegerMatrix
from pipeline.stages.prepare.quantized.packing import UNPACKED_BITS, Array, Rows, unpack
from pipeline.stages.prepare.quantized.scheme import SchemeFault, Size
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape

ZEROS_MINUS_ONE = "gptq"
ZEROS_AS_THEY_ARE = "gptq_v2"

ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""A word that adds 1 to each zero point. It undoes the subtraction from whole words, also if that borrowed."""


class GptqConfig(msgspec.Struct, frozen=True):
    """The keys of `quantization_config` that matter. Bits and groups of each matrix follow from its tensors."""

    bits: Size
    group_size: Size = -1
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    """GPTQModel's newer name for `checkpoint_format`."""
    is_marlin_format: bool = False
    pack_dtype: str = "int32"


class GptqScheme:
    """Reads the matrices of a GPTQ checkpoint. Raises SchemeFault if the config has something that isn't served."""

    ignored: tuple[str, ...] = ()

    def __init__(self, config: GptqConfig, method: str = "gptq", zeros_minus_one: bool | None = None) -> None:
        """`zeros_minus_one` is by default what the config's format says."""
        check_bits(config.bits)
        if config.pack_dtype.removeprefix("torch.") != "int32":
            raise SchemeFault(f"pack_dtype is {config.pack_dtype!r}; int32 is served")
        layout = config.checkpoint_format or config.format or ZEROS_MINUS_ONE
        if config.is_marlin_format:
            layout = "marlin"
        if zeros_minus_one is None:
            if layout not in (ZEROS_MINUS_ONE, ZEROS_AS_THEY_ARE):
                raise SchemeFault(f"checkpoint_format is {layout!r}; served are 'gptq' and 'gptq_v2'")
            zeros_minus_one = layout == ZEROS_MINUS_ONE
        self._config, self._minus_one = config, zeros_minus_one
        group = "one group per row" if config.group_size < 1 else f"groups of {config.group_size}"
        order = ", act-order" if config.desc_act else ""
        self.title = f"{method}, {config.bits} bits, {group}, {'symmetric' if config.sym else 'asymmetric'}{order}"

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> "GptqMatrix | None":
        if f"{module}.qweight" not in tensors:
            return None
        return GptqMatrix(module, shape, tensors, self._config, self._minus_one)


class GptqMatrix(IntegerMatrix):
    """A matrix of the file. Raises ModelError, naming the tensor, if its tensors don't fit each other."""

    def __init__(
        self, module: str, shape: Shape, tensors: CheckpointTensors, config: GptqConfig, minus_one: bool
    ) -> None:
        num_rows, num_columns = shape
        self._tensors, self._minus_one = tensors, minus_one
        self._codes_name, self._zeros_name, self._scales_name = (
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales")
        )
        for name in (self._zeros_name, self._scales_name):
            tensors.require(name, self._codes_name)
        bits = self._bits_of(shape)
        num_groups = num_groups_of(self._scales_name, num_rows, tensors)
        group_size = group_size_of(self._scales_name, num_columns, num_groups, config.group_size, tensors)
        groups, self._scale_shape = f"{module}.g_idx", (num_groups, num_rows)
        group_of = read_groups(groups, num_columns, num_groups, tensors) if groups in tensors else None
        super().__init__(shape, bits, group_size, group_of)
        self._codes = tensors.raw(self._codes_name, ("I32",), (num_columns * bits // 32, num_rows))
        tensors.floats(self._scales_name, self._scale_shape)
        middle = 1 << (bits - 1)
        stored = unpack(self._zero_words(), bits)
        # Then the convention doesn't matter, and some files name none, or the wrong one.
        self._is_symmetric = config.sym and bool((stored == middle).all() or (stored == middle - 1).all())

    def _bits_of(self, shape: Shape) -> int:
        """The bits of a code, by the number of words in a column of qweight."""
        num_rows, num_columns = shape
        found = self._tensors.shape(self._codes_name)
        bits = next((bits for bits in UNPACKED_BITS if found == (num_columns * bits / 32, num_rows)), None)
        if bits is None:
            raise self._tensors.fault(
                self._codes_name,
                f"has shape {list(found)}; config.json makes the weight {list(shape)}, so it must be [{num_columns} * "
                f"bits / 32, {num_rows}] with {', '.join(map(str, UNPACKED_BITS))} bits",
            )
        if num_rows * bits % 32:
            raise self._tensors.fault(
                self._codes_name, f"has {num_rows} outputs; {bits}-bit zero points of them are not whole words"
            )
        return bits

    def _zero_words(self) -> Array:
        num_groups, num_rows = self._scale_shape
        return np.array(self._tensors.raw(self._zeros_name, ("I32",), (num_groups, num_rows * self.bits // 32)))

    def codes(self, rows: Rows) -> Array:
        return unpack(self._codes[:, rows].T, self.bits)

    def scales(self, rows: Rows) -> Array:
        return self._tensors.floats(self._scales_name, self._scale_shape)[:, rows].T

    def zeros(self, rows: Rows) -> Array:
        if self._is_symmetric:
            return np.full(self._scale_shape, 1 << (self.bits - 1), np.int32)[:, rows].T
        words = self._zero_words()
        if self._minus_one and self.bits in ONES:
            words = (words.view(np.uint32) + np.uint32(ONES[self.bits])).view(np.int32)
        zeros = unpack(words, self.bits)
        if self._minus_one and self.bits not in ONES:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return zeros.astype(np.int32)[:, rows].T


def check_bits(bits: int) -> None:
    """Raises SchemeFault if codes of so many bits can't be unpacked."""
    if bits not in UNPACKED_BITS:
        raise SchemeFault(f"bits is {bits}; served are {', '.join(map(str, UNPACKED_BITS))}")


def num_groups_of(name: str, num_rows: int, tensors: CheckpointTensors) -> int:
    """The groups of a tensor of scales [G, N]. Raises ModelError if it has another shape."""
    match tensors.shape(name):
        case (num_groups, found) if found == num_rows and num_groups >= 1:
            return num_groups
        case shape:
            raise tensors.fault(name, f"has shape {list(shape)}; it must be [groups, {num_rows}]")


def group_size_of(name: str, num_columns: int, num_groups: int, size: int, tensors: CheckpointTensors) -> int:
    """Columns per group: the config's `size`, unless the scales `name` have another number of groups.

    Raises ModelError if their number doesn't divide the columns.
    """
    size = num_columns if size < 1 else min(size, num_columns)
    if -(-num_columns // size) == num_groups:
        return size
    if num_columns % num_groups:
        raise tensors.fault(name, f"has {num_groups} groups; group_size {size} gives {-(-num_columns // size)}")
    return num_columns // num_groups


def read_groups(name: str, num_columns: int, num_groups: int, tensors: CheckpointTensors) -> Array | None:
    """The group of each column, [K] int64. None if the tensor is a placeholder of -1.

    Raises ModelError if the tensor has another shape, or groups that don't exist.
    """
    groups = np.array(tensors.raw(name, ("I32", "I64"), (num_columns,))).astype(np.int64)
    if (groups == -1).all():
        return None
    if groups.min() < 0 or groups.max() >= num_groups:
        raise tensors.fault(name, f"has groups from {groups.min()} to {groups.max()}; it must be 0 to {num_groups - 1}")
    return groups
