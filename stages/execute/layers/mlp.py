"""The feed-forward layer: gated, or one activation between two matrices."""

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.norm import norm_weights, post_norm_weights
from pipeline.stages.execute.program import Linear, MlpWeights, XieluForm
from pipeline.stages.execute.weights import Weights


def mlp_weights(config: ModelConfig, weights: Weights, index: int) -> MlpWeights:
    """The weights of one layer, by Llama's names. Gate and up are stacked."""
    layer = f"model.layers.{index}"
    hidden, inner = config.hidden_size, config.inner_of(index)
    names = [f"{layer}.mlp.{name}_proj" for name in (("gate", "up") if config.gated else ("up",))]
    sizes = [inner] * len(names)
    gate_up = weights.matrices([f"{name}.weight" for name in names], sizes, hidden)
    down = weights.matrix(f"{layer}.mlp.down_proj.weight", hidden, inner)
    gate_up_bias = down_bias = None
    if config.mlp_bias:
        gate_up_bias = weights.join_vectors([f"{name}.bias" for name in names], sizes)
    if config.mlp_bias if config.down_bias is None else config.down_bias:
        down_bias = weights.vector(f"{layer}.mlp.down_proj.bias", hidden)
    has_norm = config.has_pre_norms(index) and not config.shared_norm
    return MlpWeights(
        norm=norm_weights(config, weights, f"{layer}.post_attention_layernorm") if has_norm else None,
        gate_up=Linear(gate_up, gate_up_bias),
        down=Linear((down,), down_bias),
        post_norm=post_norm_weights(config, weights, f"{layer}.mlp_post_norm")
        if config.has_post_norms(index)
        else None,
        residual_norm=norm_weights(config, weights, f"{layer}.mlp_residual_norm") if config.residual_norms else None,
        residual_scale=1.0 if config.per_layer_inputs is not None else layer_scale(config, weights, index),
        xielu=_xielu(weights, f"{layer}.mlp.xielu") if config.activation == "xielu" else None,
    )


def _xielu(weights: Weights, name: str) -> XieluForm:
    """What is stored are the inverses of softplus of the factors; that of negative numbers is `beta` more."""
    positive, negative = (np.logaddexp(0.0, float(weights.floats(f"{name}.alpha_{sign}", (1,))[0])) for sign in "pn")
    linear, largest = (float(weights.floats(f"{name}.{part}", ())) for part in ("beta", "eps"))
    return XieluForm(float(positive), float(linear + negative), linear, largest)


def layer_scale(config: ModelConfig, weights: Weights, index: int) -> float:
    """The factor of the residual after a layer."""
    return float(weights.floats(f"model.layers.{index}.layer_scale.weight", (1,))[0]) if config.layer_scales else 1.0
