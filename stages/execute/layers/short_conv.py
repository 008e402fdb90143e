"""A short convolution in place of attention."""

import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.norm import norm_weights, post_norm_weights
from pipeline.stages.execute.program import Linear, ShortConvWeights
from pipeline.stages.execute.weights import Weights


def short_conv_weights(config: ModelConfig, weights: Weights, index: int) -> ShortConvWeights:
    """The weights of one layer, by the names in `model_shapes`."""
    conv, hidden = config.short_conv, config.hidden_size
    assert conv is not None
    layer = f"model.layers.{index}"
    taps = weights.floats(f"{layer}.short_conv.conv.weight", (hidden, 1, conv.taps))
    return ShortConvWeights(
        norm=norm_weights(config, weights, f"{layer}.input_layernorm"),
        inputs=Linear((weights.matrix(f"{layer}.short_conv.in_proj.weight", 3 * hidden, hidden),)),
        conv=np.ascontiguousarray(taps[:, 0].T),
        out=Linear((weights.matrix(f"{layer}.short_conv.out_proj.weight", hidden, hidden),)),
        post_norm=post_norm_weights(config, weights, f"{layer}.self_attn_post_norm") if config.post_norms else None,
    )
