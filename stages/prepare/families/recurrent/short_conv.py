"""Models with short convolutions: LFM2, its mixtures of experts, and LFM3."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import ShortConv
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window, renamed
from pipeline.stages.prepare.families.experts import experts_of, layers_behind
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import MAX_LAYERS

TAPS = range(2, 9)
"""Sizes of convolutions that the kernels have."""
SIZE = "conv_L_cache"
KINDS = "full_attention", "conv", "sliding_attention"
"""Of layers; LFM2 has the first two."""


def _layers(keys: Keys, model: ModelConfig) -> list[int]:
    """Those of `layer_types`, by default all that are not in `full_attn_idxs`."""
    kinds = keys.layer_kinds(model.num_layers, KINDS if model.sliding_window else KINDS[:2])
    if kinds is None:
        full = keys.get("full_attn_idxs", list)
        is_full = [full is None or i in full for i in range(model.num_layers)]
    else:
        is_full = [kind != "conv" for kind in kinds]
    if not any(is_full):
        raise ConfigFault(f"layer_types is {shown(kinds)}; at least one layer must have attention")
    return [i for i, full in enumerate(is_full) if not full]


def _lfm2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("conv_bias", False, what="a convolution with biases")
    taps = keys.count(SIZE, 3)
    if taps not in TAPS:
        raise keys.fault(SIZE, f"an integer from {TAPS.start} to {TAPS.stop - 1}")
    layers = _layers(keys, model)
    return {"short_conv": ShortConv(layers=layers, taps=taps) if layers else None}


def _dense(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """The feed-forward layers have two thirds of the size in config.json, or a multiple of that."""
    found = _lfm2(keys, model)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return found
    inner, unit = int(2 * model.intermediate_size / 3), keys.count("block_multiple_of", 256)
    inner = int(keys.number("block_ffn_dim_multiplier", 1.0) * inner)
    return {**found, "intermediate_size": -(-inner // unit) * unit}


def _windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """LFM3's layers with a window are those in `layer_types`, by default each fourth one after the first."""
    kinds = _kinds(config, num_layers)
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return (Keys(config, {}, {}).count("sliding_window", 256), layers) if layers else (None, None)


def _kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    period = "sliding_attention", "conv", "full_attention", "conv"
    default = ["conv" if i == 0 else period[i % 4] for i in range(num_layers)]
    return Keys(config, {}, {}).layer_kinds(num_layers, KINDS) or default


def _with_kinds(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with `layer_types`."""
    num_layers = config.get("num_hidden_layers", 24)
    if config.get("layer_types") is not None or not isinstance(num_layers, int) or num_layers > MAX_LAYERS:
        return config
    return {**config, "layer_types": _kinds(config, num_layers)}


def _lfm3(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    gated = keys.flag("use_attention_gate", True)
    return {
        **_lfm2(keys, model),
        "post_norms": keys.flag("use_sandwich_norm", True),
        "attention_gate": gated,
        "gate_per_head": gated,
    }


def _lfm3_layout(model: ModelConfig) -> Layout:
    own = {"self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm"}
    names = {name: piece for name, piece in _layout(model).pieces.items() if name not in own}
    return Layout(pieces=names | renamed(self_attn_post_norm="post_operator_norm", mlp_post_norm="post_ffn_norm"))


def _moe(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    experts = experts_of(
        keys,
        "moe_intermediate_size",
        scoring="sigmoid",
        normalized=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", 1.0),
        selection_bias=keys.flag("use_expert_bias", True),
        layers=layers_behind(keys, model, "num_dense_layers"),
    )
    return _lfm2(keys, model) | experts


def _layout(model: ModelConfig) -> Layout:
    names = renamed(
        input_layernorm="operator_norm",
        post_attention_layernorm="ffn_norm",
        self_attn__o_proj="self_attn.out_proj",
        self_attn__q_norm="self_attn.q_layernorm",
        self_attn__k_norm="self_attn.k_layernorm",
        short_conv__in_proj="conv.in_proj",
        short_conv__conv="conv.conv",
        short_conv__out_proj="conv.out_proj",
        mlp__gate_proj="feed_forward.w1",
        mlp__up_proj="feed_forward.w3",
        mlp__down_proj="feed_forward.w2",
        mlp__router="feed_forward.gate",
        model__norm="model.embedding_norm",
    )
    if model.experts is None:
        return Layout(pieces=names)
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    experts = {name: Piece(f"feed_forward.experts.{{}}.{part}") for name, part in parts.items()}
    return Layout(pieces=names | {"mlp.selection": Piece("feed_forward.expert", bare=True)}, experts=experts)


DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
KEYS = {"rms_norm_eps": "norm_eps"}
ALIASES = {"tie_embedding": "tie_word_embeddings"}
ALWAYS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": True}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "lfm2": HfArchitecture(
        class_name="Lfm2ForCausalLM",
        models="LFM2, LFM2.5",
        keys=KEYS,
        aliases={**ALIASES, "block_ff_dim": "intermediate_size"},
        defaults=DEFAULTS,
        always=ALWAYS,
        fields=_dense,
        layout=_layout,
    ),
    "lfm2_moe": HfArchitecture(
        class_name="Lfm2MoeForCausalLM",
        models="LFM2 8B-A1B, 24B-A2B",
        keys=KEYS,
        aliases=ALIASES,
        defaults={
            **DEFAULTS,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
        },
        always=ALWAYS,
        fields=_moe,
        layout=_layout,
    ),
    "lfm3": HfArchitecture(
        class_name="Lfm3ForCausalLM",
        models="LFM3",
        keys=KEYS,
        aliases=ALIASES,
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_by_layer": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1_000_000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            SIZE: 7,
        },
        always={key: value for key, value in ALWAYS.items() if not key.endswith("_bias")} | {"mlp_bias": False},
        windows=_windows,
        adapt=_with_kinds,
        fields=_lfm3,
        layout=_lfm3_layout,
    ),
}
