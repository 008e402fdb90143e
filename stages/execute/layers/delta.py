"""Gated DeltaNet: a layer with a recurrent state in place of attention."""

import numpy as np

from pipeline.kernels.recurrent.delta_shape import TAPS, DeltaShape
from pipeline.kernels.stored_matrix import StoredMatrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.norm import norm_weights
from pipeline.stages.execute.program import AnyMatrix, DeltaWeights, Linear
from pipeline.stages.execute.weights import Weights


def delta_weights(config: ModelConfig, weights: Weights, index: int) -> DeltaWeights:
    """The weights of one layer, by the names in `model_shapes`."""
    delta, hidden = config.delta, config.hidden_size
    assert delta is not None
    layer = f"model.layers.{index}"
    before, heads = f"{layer}.linear_attn.", delta.value_heads
    keys, values = delta.key_heads * delta.key_dim, heads * delta.value_dim
    inputs = weights.matrices([f"{before}{name}_proj.weight" for name in "qkvz"], [keys, keys, values, values], hidden)
    b, a = weights.matrices([f"{before}{name}_proj.weight" for name in "ba"], [heads, heads], hidden)
    conv = [
        weights.floats(f"{before}{name}_conv1d.weight", (num, 1, TAPS))
        for name, num in zip("qkv", (keys, keys, values), strict=True)
    ]
    return DeltaWeights(
        norm=norm_weights(config, weights, f"{layer}.input_layernorm"),
        inputs=Linear((*inputs, _stacked(b, a))),
        conv=np.ascontiguousarray(np.concatenate(conv)[:, 0].T),
        rates=-np.exp(np.asarray(weights.vector(f"{before}A_log", heads))),
        dt_bias=weights.vector(f"{before}dt_bias", heads),
        head_norm=weights.vector(f"{before}norm.weight", delta.value_dim),
        out=Linear((weights.matrix(f"{before}out_proj.weight", hidden, values),)),
    )


def delta_shape(config: ModelConfig, key_heads: int | None = None) -> DeltaShape:
    """The sizes of a recurrent layer, or of a rank's part with so many key heads."""
    delta = config.delta
    assert delta is not None
    key_heads = delta.key_heads if key_heads is None else key_heads
    value_heads = key_heads * delta.value_heads // delta.key_heads
    return DeltaShape(key_heads, value_heads, delta.key_dim, delta.value_dim, delta.tiled)


def _stacked(b: AnyMatrix, a: AnyMatrix) -> AnyMatrix:
    """Both matrices as one, because neither needs to be whole panels. They are floats in every format of weights."""
    assert isinstance(b, StoredMatrix) and isinstance(a, StoredMatrix) and a.format == b.format
    data = np.concatenate([b.data, a.data])
    return StoredMatrix(b.format, data, b.num_rows + a.num_rows, b.num_columns, f"{b.name}, a" if b.name else "")
