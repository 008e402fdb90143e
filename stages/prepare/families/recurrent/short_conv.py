"""Models with short convolutions: LFM2 and its mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import ShortConv
from pipeline.stages.prepare.families.architecture import HfArchitecture, renamed
from pipeline.stages.prepare.families.experts import experts_of, layers_behind
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown

TAPS = range(2, 9)
"""Sizes of convolutions that the kernels have."""
SIZE = "conv_L_cache"


def _layers(keys: Keys, model: ModelConfig) -> list[int]:
    """Those of `layer_types`, by default all that are not in `full_attn_idxs`."""
    kinds = keys.layer_kinds(model.num_layers, ("full_attention", "conv"))
    if kinds is None:
        full = keys.get("full_attn_idxs", list)
        is_full = [full is None or i in full for i in range(model.num_layers)]
    else:
        is_full = [kind == "full_attention" for kind in kinds]
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
        models="LFM2-8B-A1B, LFM2-24B-A2B",
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
}
