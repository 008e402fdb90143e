"""Maps architectures to the code that records them. A Llama-shaped architecture needs only a line here."""

from collections.abc import Callable

from pipeline.runtime.model_folder import Architecture, ModelConfig
from pipeline.stages.execute.cpu.program import ProgramBuilder
from pipeline.stages.execute.models import llama
from pipeline.stages.execute.weights import Weights

MODELS: dict[Architecture, Callable[[ModelConfig, Weights, ProgramBuilder], None]] = {
    "llama": llama.build,
    "mistral": llama.build,
    "qwen2": llama.build,
    "qwen3": llama.build,
}


def build_program(config: ModelConfig, weights: Weights, program: ProgramBuilder) -> None:
    """Record the forward pass of a model. Raises UserError if a tensor is missing or has the wrong shape."""
    MODELS[config.architecture](config, weights, program)
