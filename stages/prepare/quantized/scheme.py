"""What a method of quantization must provide to be read."""

from typing import Annotated, Protocol

import msgspec

from pipeline.stages.prepare.quantized.matrix import QuantizedMatrix
from pipeline.stages.prepare.quantized.tensors import CheckpointTensors
from pipeline.stages.prepare.weights.tensors import Shape

Size = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""A number of bits or columns; -1 may stand for all columns."""


class SchemeFault(ValueError):
    """A wrong value in quantization_config: the key, its value, and what is served."""


class Scheme(Protocol):
    """Reads the matrices of a checkpoint.

    Which of them are quantized follows from their tensors. So lists of modules that are not (`ignore`,
    `modules_to_not_convert`) and settings of single modules (`dynamic`, `extra_config`) need no reading.
    """

    title: str
    """Method and parameters, for the log."""
    ignored: tuple[str, ...]
    """What the config asks for that has no effect on weights, for the log."""

    def matrix(self, module: str, shape: Shape, tensors: CheckpointTensors) -> QuantizedMatrix | None:
        """The weight [N, K] of a module; None if it isn't quantized.

        Raises ModelError, naming the tensor, if the module's tensors don't fit each other.
        """
