"""Maps architectures to the code that records them."""

from collections.abc import Callable
from typing import get_args

from pipeline.runtime.model.model_config import Architecture, ModelConfig
from pipeline.stages.execute.models import decoder
from pipeline.stages.execute.program import ProgramBuilder
from pipeline.stages.execute.ranks.layer_split import Part
from pipeline.stages.execute.weights import Weights

MODELS: dict[Architecture, Callable[[ModelConfig, Weights, ProgramBuilder, Part], None]] = dict.fromkeys(
    get_args(Architecture), decoder.build
)


def build_program(config: ModelConfig, weights: Weights, program: ProgramBuilder, part: Part | None = None) -> None:
    """Record the forward pass of a model, or of a part of it. Raises UserError if a tensor is missing or has the wrong
    shape."""
    MODELS[config.architecture](config, weights, program, part or Part(range(config.num_layers)))
