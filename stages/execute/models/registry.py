"""Maps architectures to the code that records them."""

from collections.abc import Callable
from typing import get_args

from pipeline.errors import UserError
from pipeline.runtime.model import foreign
from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.models import decoder
from pipeline.stages.execute.program import ProgramBuilder
from pipeline.stages.execute.ranks.layer_split import Part
from pipeline.stages.execute.weights import Weights

Build = Callable[[ModelConfig, Weights, ProgramBuilder, Part], None]
MODELS: dict[str, Build] = dict.fromkeys(get_args(Architecture), decoder.build)


def build_program(config: ModelConfig, weights: Weights, program: ProgramBuilder, part: Part | None = None) -> None:
    """Record the forward pass of a model, or of a part of it. Raises UserError if a tensor is missing or has the wrong
    shape."""
    build, whole = _builder(config.architecture), Part(range(config.num_layers))
    if build is decoder.build:
        build(config, weights, program, part or whole)
        return
    with foreign.errors_of(f"the builder of model_type {config.architecture!r} failed"):
        build(config, weights, program, part or whole)


def _builder(architecture: str) -> Build:
    """That of a package, if the architecture is not one of ours. Raises UserError if no package has it."""
    if (ours := MODELS.get(architecture)) is not None:
        return ours
    if (found := foreign.find(architecture)) is None:
        raise UserError(
            f"the prepared model has the architecture {architecture!r}, but no installed package has it any more: "
            "install it again"
        )
    build: Build = decoder.build if found.build is None else found.load(found.build)
    return build
