"""Which models the CPU library can compute."""

from pipeline.kernels.cpu import native
from pipeline.kernels.recurrent.delta_shape import SLICE
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.models.features import NATIVE, missing


def unsupported(config: ModelConfig) -> str | None:
    """Why the library can't compute a model of this shape, or None."""
    if config.head_dim > native.MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, above {native.MAX_HEAD_DIM}"
    if config.head_dim % native.PANEL:
        return f"head_dim is {config.head_dim}, not a multiple of {native.PANEL}"
    experts = [] if config.experts is None else [config.experts.intermediate_size]
    if any(size % 2 for size in (config.hidden_size, *config.inner_sizes, *experts)):
        return "hidden_size and intermediate_size must be even"
    if config.activation == "swiglu_oai" and config.inner_sizes:
        return "the activation swiglu_oai is only for experts"
    if (delta := config.delta) is not None and (delta.key_dim % 16 or delta.value_dim % SLICE):
        return f"heads of {delta.key_dim} x {delta.value_dim} are not multiples of 16 x {SLICE}"
    if config.short_conv is not None and config.hidden_size % 16:
        return f"hidden_size is {config.hidden_size}, not a multiple of 16"
    if lacking := missing(config, NATIVE):
        return f"the CPU library lacks {lacking}"
    return None
