"""Inputs of each token that are added in each layer, besides the embedding."""

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.mlp import layer_scale
from pipeline.stages.execute.layers.norm import norm_weights
from pipeline.stages.execute.program import Linear, PerLayerWeights, TokenInputs
from pipeline.stages.execute.weights import Weights


def token_inputs(config: ModelConfig, weights: Weights) -> TokenInputs:
    """The inputs of all layers."""
    inputs, hidden = config.per_layer_inputs, config.hidden_size
    assert inputs is not None
    width = config.num_layers * inputs.size
    return TokenInputs(
        table=weights.in_file("model.per_layer_embeddings.weight", inputs.vocab_size, width),
        project=Linear((weights.matrix("model.per_layer_projection.weight", width, hidden),)),
        norm=weights.vector("model.per_layer_norm.weight", inputs.size),
    )


def per_layer_weights(config: ModelConfig, weights: Weights, index: int) -> PerLayerWeights:
    """The weights of one layer."""
    inputs, hidden, layer = config.per_layer_inputs, config.hidden_size, f"model.layers.{index}"
    assert inputs is not None
    return PerLayerWeights(
        gate=Linear((weights.matrix(f"{layer}.per_layer.gate_proj.weight", inputs.size, hidden),)),
        out=Linear((weights.matrix(f"{layer}.per_layer.out_proj.weight", hidden, inputs.size),)),
        post_norm=norm_weights(config, weights, f"{layer}.per_layer.post_norm"),
        residual_scale=layer_scale(config, weights, index),
    )
