"""Which code computes which architecture. A new model is a new file here and a line in the table."""

from collections.abc import Callable

from pipeline.model_folder import ModelConfig
from pipeline.stages.execute.models import llama
from pipeline.stages.execute.program import Program
from pipeline.stages.execute.weights import Weights

MODELS: dict[str, Callable[[ModelConfig, Weights, Program], None]] = {"llama": llama.record, "mistral": llama.record}


def record_model(config: ModelConfig, weights: Weights, program: Program) -> None:
    """Record the forward pass of a model. Raises UserError where a tensor is missing or has the wrong shape."""
    MODELS[config.architecture](config, weights, program)
