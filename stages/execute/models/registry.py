"""Which code computes which architecture: one that is Llama-shaped is a line in the table, another a new file too."""

from collections.abc import Callable

from pipeline.runtime.model_folder import Architecture, ModelConfig
from pipeline.stages.execute.cpu.program import Recorder
from pipeline.stages.execute.models import llama
from pipeline.stages.execute.weights import Weights

MODELS: dict[Architecture, Callable[[ModelConfig, Weights, Recorder], None]] = {
    "llama": llama.record,
    "mistral": llama.record,
    "qwen2": llama.record,
    "qwen3": llama.record,
}


def record_model(config: ModelConfig, weights: Weights, program: Recorder) -> None:
    """Record the forward pass of a model. Raises UserError where a tensor is missing or has the wrong shape."""
    MODELS[config.architecture](config, weights, program)
