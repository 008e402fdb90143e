"""Which models the CPU library can compute."""

from pipeline.kernels.cpu import native
from pipeline.kernels.recurrent.delta_shape import SLICE
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.models.features import NATIVE, missing


def unsupported(config: ModelConfig) -> str | None:
    """Why the library can't compute a model of this shape, or None."""
    for dim in dict.fromkeys(heads.dim for heads in config.all_heads):
        if dim > native.MAX_HEAD_DIM:
            return f"head_dim is {dim}, above {native.MAX_HEAD_DIM}"
        if dim % native.PANEL:
            return f"head_dim is {dim}, not a multiple of {native.PANEL}"
    experts = [] if config.experts is None else [config.experts.intermediate_size]
    if any(size % 2 for size in (config.hidden_size, *config.inner_sizes, *experts)):
        return "hidden_size and intermediate_size must be even"
    if config.activation == "swiglu_oai" and config.inner_sizes:
        return "the activation swiglu_oai is only for experts"
    if (delta := config.delta) is not None and (delta.key_dim % 16 or delta.value_dim % SLICE):
        return f"heads of {delta.key_dim} x {delta.value_dim} are not multiples of 16 x {SLICE}"
    if config.short_conv is not None and config.hidden_size % 16:
        return f"hidden_size is {config.hidden_size}, not a multiple of 16"
    if (inputs := config.per_layer_inputs) is not None and inputs.size % native.PANEL:
        return f"the inputs of a layer are {inputs.size}, not a multiple of {native.PANEL}"
    if lacking := missing(config, NATIVE):
        return f"the CPU library lacks {lacking}"
    return None
