"""Converts a quantized checkpoint to the formats of kernels/stored_matrix.py, a few rows of a tensor at a time.

    integers, 2 to 4 bits   symmetric: q4_0; with zero points: q4_1
    integers, 8 bits        symmetric: q8_0; with zero points: bf16
    MXFP4                   q8_0
    FP8 (e4m3)              fp8
    NF4, FP4, FP8 (e5m2)    bf16

Integers keep their codes, and scales are repeated for each 32 columns. What has no such form, for example groups of 16
columns, is dequantized to bf16. With another `quantization`, codes are kept if the format can hold them; else their
values are quantized again.

GPTQ's act-order groups columns that are not contiguous. The inputs of down_proj are outputs of gate_proj and up_proj,
so all three are reordered there, which changes no result. Inputs of other layers are the hidden states, or the values
of attention heads, whose order is fixed: those matrices become bf16. So do all act-order matrices of architectures that
stack gate_proj and up_proj, or have other names for them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.config.settings import PreparedFormat
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.quantized.matrix import QuantizedMatrix
from pipeline.stages.prepare.quantized.packing import Array
from pipeline.stages.prepare.quantized.scheme import Scheme
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import Found, Shape, expected_shapes
from pipeline.stages.prepare.weights.unused_tensors import Rule, ignored, rules_of
from pipeline.stages.prepare.weights.weight_file import DTYPES, Format, Stored, stored_tensors, write_weights

CHUNK_VALUES = 2 * 1024**2
"""Values converted at once: 8 MiB as float32, and a few times that in temporaries."""

WEIGHT, BIAS = ".weight", ".bias"
DOWN = "mlp.down_proj"
BEFORE_DOWN = ("mlp.gate_proj", "mlp.up_proj")

ACTIVATIONS = (
    *(".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point", ".input_global_scale"),
    *(".input_scale_ub", ".activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".k_zero_point", ".v_zero_point"),
)
"""Last parts of the names of tensors for quantized activations and KV caches."""
NO_ACTIVATIONS = "activations and KV caches have scales of their own"


def convert(
    config: ModelConfig,
    scheme: Scheme,
    found: Found,
    target: Path,
    quantization: PreparedFormat,
    progress: Progress,
) -> list[str]:
    """Write the weights of a quantized checkpoint to `target`, and say what became of them. `found` are its tensors.
    Returns lines about those that the model does not use.

    Raises ModelError, naming tensor and file, if the files don't hold the tensors of `config` as the scheme has them,
    or if they hold others without a rule in stages/prepare/weights/unused_tensors.py.
    """
    checkpoint = Checkpoint(config, scheme, found)
    targets = checkpoint.targets(quantization)

    def pieces(name: str) -> Iterator[Array]:
        return checkpoint.pieces(name, targets[name])

    progress.say(f"{config.name}: {scheme.title}: {checkpoint.summary(targets)}")
    with progress.measure(f"converting {config.name}") as report:
        write_weights(target, targets, pieces, _folder(found), report)
    return checkpoint.ignored


def _folder(found: Found) -> Path:
    """The folder of a checkpoint, for errors."""
    return next(iter(found.values()))[0].parent


class Checkpoint:
    """The tensors of a model in a quantized checkpoint, by their names in the unquantized one."""

    def __init__(self, config: ModelConfig, scheme: Scheme, found: Found) -> None:
        self._config = config
        self._shapes = expected_shapes(config)
        self._tensors = CheckpointTensors(found)
        self._scheme = scheme
        self._matrices: dict[str, QuantizedMatrix] = {}
        for name, shape in self._shapes.items():
            self._read(name, shape)
        if not self._matrices:
            raise ModelError(
                f"{_folder(found)}: config.json has a quantization_config ({scheme.title}), but no weight of the "
                "model is quantized that way: remove quantization_config to serve the weights as they are"
            )
        rules = [*rules_of(config), Rule(NO_ACTIVATIONS, lambda name: name.endswith(ACTIVATIONS))]
        rules.append(Rule("biases of zeros change nothing", self._is_zero_bias))
        self.ignored = ignored(rules, self._tensors.rest(), found)
        """Lines about tensors that the model does not use."""
        self._orders = self._sorted(config)

    def _read(self, name: str, shape: Shape) -> None:
        """Find the weight or vector `name`. Raises ModelError unless the files have it in one form."""
        if len(shape) > 1:
            matrix = self._scheme.matrix(name.removesuffix(WEIGHT), shape, self._tensors)
            if matrix is not None:
                self._matrices[name] = matrix
                return
        self._tensors.float_rows(name, shape, slice(0, 0))  # checks the tensor

    def _is_zero_bias(self, name: str) -> bool:
        """Whether this is a bias that the architecture lacks and that does nothing. AutoGPTQ gave every layer one."""
        shape = self._shapes.get(name.removesuffix(BIAS) + WEIGHT)
        if not name.endswith(BIAS) or shape is None:
            return False
        if self._tensors.floats(name, shape[:1]).any():
            raise self._tensors.fault(name, "is a bias that config.json doesn't describe, and not zero")
        return True

    def _sorted(self, config: ModelConfig) -> dict[str, Array]:
        """Sort the inputs of down_proj by group where act-order mixed them. Returns the order of rows of gate_proj and
        up_proj that compensates it, and of their biases."""
        orders: dict[str, Array] = {}
        if config.layout.pieces.keys() & {DOWN, *BEFORE_DOWN}:
            return orders  # gate and up are not tensors of their own
        for layer in range(config.num_layers):
            before = config.layout.layers.format(layer)
            down = self._matrices.get(f"{before}{DOWN}{WEIGHT}")
            if down is None or (order := down.sort_columns()) is None:
                continue
            orders |= {f"{before}{part}{kind}": order for part in BEFORE_DOWN for kind in (WEIGHT, BIAS)}
        return orders

    def targets(self, quantization: PreparedFormat) -> dict[str, Stored]:
        """How to store each tensor."""
        found: dict[str, Format | None] = {name: matrix.kept().format for name, matrix in self._matrices.items()}
        return stored_tensors(self._config, self._shapes, found, quantization)

    def pieces(self, name: str, target: Stored) -> Iterator[Array]:
        """A tensor a few rows at a time, as `write_weights` takes it."""
        matrix, order, shape = self._matrices.get(name), self._orders.get(name), self._shapes[name]
        # A tensor with more than two dimensions is matrices, one below the other.
        num_rows, values_per_row = math.prod(shape[:-1]) if len(shape) > 1 else shape[0], shape[-1]
        if matrix is None and len(shape) > 2:
            num_rows, values_per_row = shape[0], math.prod(shape[1:])
        at_once = max(1, CHUNK_VALUES // values_per_row) if len(shape) > 1 else num_rows
        for start in range(0, num_rows, at_once):
            rows = slice(start, min(start + at_once, num_rows))
            chosen = rows if order is None else order[rows]
            if matrix is None:
                yield self._tensors.float_rows(name, shape, chosen)
            elif target.format not in DTYPES and matrix.note(target.format) is not None:
                yield matrix.blocks(chosen, target.format)
            else:
                yield matrix.values(chosen)

    def summary(self, targets: Mapping[str, Stored]) -> str:
        """What becomes of the matrices, in one line."""
        counts: Counter[tuple[str, str]] = Counter()
        for name, matrix in self._matrices.items():
            counts[targets[name].format, _note(matrix, targets[name])] += 1
        parts = [f"{number} to {format} ({note})" for (format, note), number in counts.items()]
        floats = sum(len(shape) > 1 for shape in self._shapes.values()) - len(self._matrices)
        if floats:
            parts.append(f"{floats} were floats")
        reordered = len(self._orders) // (len(BEFORE_DOWN) * 2)
        if reordered:
            parts.append(f"inputs of {reordered} down_proj are reordered")
        return f"matrices: {', '.join(parts)}" + "".join(f"; {what}" for what in self._scheme.ignored)


def _note(matrix: QuantizedMatrix, target: Stored) -> str:
    """What is lost by storing a matrix so."""
    kept = matrix.kept()
    if target.format == kept.format:
        return kept.note
    if target.format not in DTYPES:
        return matrix.note(target.format) or "quantized again"
    return "dequantized, rounded once"
