"""Which code computes which architecture. A new model is a new file here and a line in the table."""

from collections.abc import Callable
from typing import Protocol

from pipeline.kernels.kv_layout import LayerKV
from pipeline.kernels.select import Ops
from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.models.llama import Llama
from pipeline.stages.execute.program import Buffer, Program
from pipeline.stages.execute.weights import Weights


class Model(Protocol):
    """Weights that can record their forward pass."""

    def record(self, program: Program, ops: Ops, kv: list[LayerKV]) -> Buffer:
        """Add the calls to `program`. Returns the buffer of the logits, [samples, vocab_size] float32."""
        ...


MODELS: dict[str, Callable[[ModelConfig, Weights], Model]] = {"llama": Llama, "mistral": Llama}


def load_model(config: ModelConfig, weights: Weights) -> Model:
    """Raises ValueError where a tensor is missing or has the wrong shape."""
    return MODELS[config.architecture](config, weights)
