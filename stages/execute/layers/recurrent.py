"""Layers with a recurrent state in place of attention: their weights, and the sizes of their states."""

from collections.abc import Collection

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.delta import delta_shape, delta_weights
from pipeline.stages.execute.layers.short_conv import short_conv_weights
from pipeline.stages.execute.program import RecurrentWeights
from pipeline.stages.execute.ranks.share import PANEL, cut
from pipeline.stages.execute.weights import Weights


def recurrent_weights(config: ModelConfig, weights: Weights, index: int) -> RecurrentWeights:
    """The weights of one layer."""
    load = delta_weights if config.short_conv is None else short_conv_weights
    return load(config, weights, index)


def slot_floats(config: ModelConfig, layers: Collection[int] | None = None, num_ranks: int = 1) -> int:
    """Floats of a slot, which has the states of all recurrent layers of a row, or of those in a part of the model, in
    their order; of several ranks, those of the one with the largest part."""
    num = sum(config.is_recurrent(layer) for layer in (range(config.num_layers) if layers is None else layers))
    if config.delta is not None:
        return num * delta_shape(config, -(-config.delta.key_heads // num_ranks)).slot
    if config.short_conv is not None:
        largest = max(len(cut(config.hidden_size, PANEL, rank, num_ranks)) for rank in range(num_ranks))
        return num * (config.short_conv.taps - 1) * largest
    return 0


def recurrent_width(config: ModelConfig) -> int:
    """The numbers of a token before a recurrent layer's last matrix; 0 for models without such layers."""
    if config.delta is not None:
        return config.delta.value_heads * config.delta.value_dim
    return 0 if config.short_conv is None else config.hidden_size
