"""The tensors of layers with a recurrent state, by our names."""

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.special_layers import DeltaNet, ShortConv

Shape = tuple[int, ...]
Linears = dict[str, tuple[int, int, bool]]
"""Rows, columns, and whether there is a bias."""

CONV_TAPS = 4
"""Tokens that the convolution of a gated DeltaNet layer reads."""


def recurrent_shapes(config: ModelConfig) -> tuple[Linears, dict[str, Shape]]:
    """The matrices of a recurrent layer, and its other tensors."""
    if config.delta is not None:
        return _delta_shapes(config.delta, config.hidden_size)
    assert config.short_conv is not None
    return _short_conv_shapes(config.short_conv, config.hidden_size)


def _delta_shapes(delta: DeltaNet, hidden: int) -> tuple[Linears, dict[str, Shape]]:
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    rows = {"q": keys, "k": keys, "v": values, "z": values, "b": delta.value_heads, "a": delta.value_heads}
    linears: Linears = {f"linear_attn.{name}_proj": (num, hidden, False) for name, num in rows.items()}
    linears["linear_attn.out_proj"] = (hidden, values, False)
    vectors: dict[str, Shape] = {f"linear_attn.{name}_conv1d.weight": (rows[name], 1, CONV_TAPS) for name in "qkv"}
    vectors |= {"linear_attn.A_log": (delta.value_heads,), "linear_attn.dt_bias": (delta.value_heads,)}
    return linears, {**vectors, "linear_attn.norm.weight": (delta.value_dim,)}


def _short_conv_shapes(conv: ShortConv, hidden: int) -> tuple[Linears, dict[str, Shape]]:
    linears: Linears = {
        "short_conv.in_proj": (3 * hidden, hidden, False),
        "short_conv.out_proj": (hidden, hidden, False),
    }
    return linears, {"short_conv.conv.weight": (hidden, 1, conv.taps)}
