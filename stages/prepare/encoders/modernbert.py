"""ModernBERT, and EuroBERT, a Llama whose tokens see all others."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.runtime.model.pooler import PoolingKind
from pipeline.stages.prepare.encoders.heads import (
    CLASSIFIER,
    SEQUENCE,
    TOKEN_HEAD,
    TOKENS,
    Head,
    HeadModule,
    head_activation,
)
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window, gate_up_slices, qkv_slices, renamed
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown

POOLINGS: dict[str, PoolingKind] = {"cls": "cls", "bos": "cls", "mean": "mean"}


def _windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """All layers but every third, or those that `layer_types` names, see half of `local_attention` to each side."""
    keys = Keys(config, {}, {"local_attention": 128, "global_attn_every_n_layers": 3})
    kinds = keys.layer_kinds(num_layers)
    every = keys.count("global_attn_every_n_layers")
    if kinds is None:
        kinds = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if not layers:
        return None, None
    return keys.count("local_attention") // 2 + 1, None if len(layers) == num_layers else layers


def _modernbert(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    bias = keys.flag("attention_bias")
    return {"norm_bias": keys.flag("norm_bias"), "qkv_bias": bias, "out_bias": bias}


def _layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        model__embed_tokens="model.embeddings.tok_embeddings",
        model__embed_norm="model.embeddings.norm",
        model__norm="model.final_norm",
        input_layernorm="attn_norm",
        post_attention_layernorm="mlp_norm",
        self_attn__o_proj="attn.Wo",
        mlp__down_proj="mlp.Wo",
    )
    stacked = qkv_slices(model, "attn.Wqkv") | gate_up_slices(model, "mlp.Wi")
    return Layout("model.layers.{}.", pieces | stacked)


def _pooling(keys: Keys, default: str) -> PoolingKind:
    value = keys.get("classifier_pooling", str, default)
    if value not in POOLINGS:
        raise ConfigFault(f"classifier_pooling is {shown(value)}; supported are {', '.join(POOLINGS)}")
    return POOLINGS[value]


def _head(pooling: PoolingKind, keys: Keys) -> Head:
    dense = HeadModule(
        name="head.dense",
        outputs="hidden_size",
        activation=head_activation(keys, "classifier_activation", "gelu"),
        bias=keys.flag("classifier_bias"),
        norm="head.norm",
        norm_bias=keys.flag("norm_bias"),
        norm_eps=keys.number("norm_eps", 1e-5),
    )
    return Head(pooling, (dense, CLASSIFIER))


def _eurobert_head(keys: Keys) -> Head:
    dense = HeadModule(name="dense", outputs="hidden_size", activation="gelu")
    return Head(_pooling(keys, "late"), (dense, CLASSIFIER))


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "modernbert": HfArchitecture(
        class_name="ModernBertModel",
        models="ModernBERT",
        keys={
            "hidden_act": "hidden_activation",
            "rms_norm_eps": "norm_eps",
            "rope_theta": "global_rope_theta",
            "rope_local_base_freq": "local_rope_theta",
        },
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_theta": 160000.0,
            "rope_local_base_freq": 10000.0,
            "rope_by_layer": True,
        },
        always={"norm": "layer", "causal": False, "embedding_norm": True, "skips_first_norm": True},
        windows=_windows,
        fields=_modernbert,
        layout=_layout,
        heads={SEQUENCE: lambda keys: _head(_pooling(keys, "cls"), keys), TOKENS: lambda keys: _head("all", keys)},
    ),
    "eurobert": HfArchitecture(
        class_name="EuroBertModel",
        models="EuroBERT",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192},
        always={"causal": False},
        heads={SEQUENCE: _eurobert_head, TOKENS: lambda keys: TOKEN_HEAD},
    ),
}
