"""Which models have no adapters yet: those whose layers differ in more than their weights."""

from pipeline.runtime.model.model_config import ModelConfig

RECURRENT = "it has recurrent layers"
BY_LAYER = "its layers have different sizes"
BESIDE_DENSE = "its layers have a dense feed-forward layer beside experts"


def unsupported(model: ModelConfig) -> str | None:
    """Why no adapter of a model can be served; None if adapters can."""
    if model.has_states:
        return RECURRENT
    if model.differs_by_layer:
        return BY_LAYER
    if model.experts is not None and model.experts.beside_dense:
        return BESIDE_DENSE
    return None
