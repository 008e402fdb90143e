"""The gated feed-forward layer."""

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.execute.cpu.program import Linear, MlpWeights
from pipeline.stages.execute.weights import Weights


def mlp_weights(config: ModelConfig, weights: Weights, index: int) -> MlpWeights:
    """The weights of one layer, by Hugging Face's names. Gate and up are stacked."""
    layer = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    names = [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"]
    gate_up = weights.matrices([f"{name}.weight" for name in names], [inner, inner], hidden)
    down = weights.matrix(f"{layer}.mlp.down_proj.weight", hidden, inner)
    gate_up_bias = down_bias = None
    if config.mlp_bias:
        gate_up_bias = weights.join_vectors([f"{name}.bias" for name in names], [inner, inner])
        down_bias = weights.vector(f"{layer}.mlp.down_proj.bias", hidden)
    norm = weights.vector(f"{layer}.post_attention_layernorm.weight", hidden)
    return MlpWeights(norm, Linear(gate_up, gate_up_bias), Linear((down,), down_bias))
