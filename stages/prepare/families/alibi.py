"""Falcon, BLOOM and MPT: models with ALiBi, and Falcon's with rotary embeddings."""

import math
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import (
    FOUR_TIMES,
    LAYER_NORM,
    HfArchitecture,
    alibi_slopes,
    qkv_by_head,
    qkv_slices,
    renamed,
)
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown

BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
DENSE = renamed(
    model__embed_tokens="transformer.word_embeddings",
    model__embed_norm="transformer.word_embeddings_layernorm",
    model__norm="transformer.ln_f",
    self_attn__o_proj="self_attention.dense",
    mlp__up_proj="mlp.dense_h_to_4h",
    mlp__down_proj="mlp.dense_4h_to_h",
)


def _falcon(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    new, parallel = keys.flag("new_decoder_architecture"), keys.flag("parallel_attn", True)
    heads = model.num_heads
    if new:
        kv_heads = keys.count("num_kv_heads", heads)
        parallel_norms = keys.count("num_ln_in_parallel_attn", 2)
        if not parallel:
            raise ConfigFault("parallel_attn is false, but new_decoder_architecture is true: they must agree")
    else:
        kv_heads = 1 if keys.flag("multi_query", True) else heads
        parallel_norms = 1
    if heads % kv_heads:
        raise ConfigFault(f"num_kv_heads is {kv_heads}; it must be a divisor of num_attention_heads = {heads}")
    has_bias, alibi = keys.flag("bias"), keys.flag("alibi")
    return {
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": has_bias,
        "num_kv_heads": kv_heads,
        "parallel": parallel,
        "shared_norm": parallel and parallel_norms == 1,
        # Falcon adds the bias to scores before it scales them.
        "alibi_slopes": alibi_slopes(heads, model.head_dim**-0.5) if alibi else None,
        "rotary_dim": 0 if alibi else None,
    }


def _falcon_layout(model: ModelConfig) -> Layout:
    pieces = DENSE | qkv_by_head(model, "self_attention.query_key_value")
    if model.parallel and not model.shared_norm:
        pieces |= renamed(input_layernorm="ln_attn", post_attention_layernorm="ln_mlp")
    return Layout("transformer.h.{}.", pieces)


def _bloom(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("apply_residual_connection_post_layernorm", False, what="a residual after the norm")
    return {"alibi_slopes": alibi_slopes(model.num_heads)}


def _bloom_layout(model: ModelConfig) -> Layout:
    return Layout("transformer.h.{}.", DENSE | qkv_by_head(model, "self_attention.query_key_value"))


def _mpt(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    attention = keys.get("attn_config", dict) or {}
    inside = Keys(attention, {}, {})
    inside.refuse_unless("clip_qkv", what="clipping queries, keys and values")
    inside.refuse_unless("qk_ln", False, what="a norm of queries and keys")
    inside.refuse_unless("prefix_lm", False, what="a prefix language model")
    inside.refuse_unless("attn_type", "multihead_attention", what="this attention")
    inside.refuse_unless("alibi", True, what="attention without ALiBi")
    keys.refuse_unless("logit_scale", what="a scale of logits")
    bias_max = inside.count("alibi_bias_max", 8)
    scale = inside.optional_number("softmax_scale")
    return {"alibi_slopes": mpt_slopes(model.num_heads, bias_max), "query_scale": scale}


def mpt_slopes(num_heads: int, bias_max: int) -> list[float]:
    """The slopes of MPT's ALiBi (`build_mpt_alibi_tensor` in transformers)."""
    total = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (i + 1) / total) for i in range(total)]
    return slopes if total == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _mpt_layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        model__embed_tokens="transformer.wte",
        model__norm="transformer.norm_f",
        input_layernorm="norm_1",
        post_attention_layernorm="norm_2",
        self_attn__o_proj="attn.out_proj",
        mlp__up_proj="ffn.up_proj",
        mlp__down_proj="ffn.down_proj",
    )
    return Layout("transformer.blocks.{}.", pieces | qkv_slices(model, "attn.Wqkv"))


def _mpt_inner(keys: Keys) -> int:
    """transformers always takes four times the hidden size."""
    ratio = keys.get("expansion_ratio", int, 4)
    if ratio != 4:
        raise ConfigFault(f"expansion_ratio is {shown(ratio)}; 4 is supported")
    return FOUR_TIMES(keys)


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "falcon": HfArchitecture(
        class_name="FalconForCausalLM",
        models="Falcon 1 and 2",
        keys={
            "intermediate_size": "ffn_hidden_size",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation",
        },
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        always={**LAYER_NORM, "gated": False},
        inner=FOUR_TIMES,
        fields=_falcon,
        layout=_falcon_layout,
    ),
    "bloom": HfArchitecture(
        class_name="BloomForCausalLM",
        models="BLOOM",
        aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        keys={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "rms_norm_eps": "layer_norm_epsilon",
            "max_position_embeddings": "seq_length",
        },
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        always={**LAYER_NORM, **BIASES, "gated": False, "embedding_norm": True, "rotary_dim": 0},
        inner=FOUR_TIMES,
        fields=_bloom,
        layout=_bloom_layout,
    ),
    "mpt": HfArchitecture(
        class_name="MptForCausalLM",
        other_class_names=("MPTForCausalLM",),
        models="MPT",
        aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        always={
            "norm": "layer",
            "gated": False,
            "rotary_dim": 0,
            "qkv_bias": False,
            "out_bias": False,
            "mlp_bias": False,
        },
        inner=_mpt_inner,
        fields=_mpt,
        layout=_mpt_layout,
    ),
}
