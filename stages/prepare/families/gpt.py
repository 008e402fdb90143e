"""GPT-2, GPT-BigCode (StarCoder), GPT-NeoX (Pythia) and OPT."""

from typing import Any

import msgspec

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import (
    FOUR_TIMES,
    LAYER_NORM,
    HfArchitecture,
    qkv_by_head,
    qkv_slices,
    renamed,
)
from pipeline.stages.prepare.families.keys import Keys

BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
GPT2_ALIASES = {
    name: GPT2_KEYS[name]
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
}
GPT2_DEFAULTS = {
    "hidden_act": "gelu_new",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GPT2_NAMES = renamed(
    model__embed_tokens="transformer.wte",
    model__embed_positions="transformer.wpe",
    model__norm="transformer.ln_f",
    input_layernorm="ln_1",
    post_attention_layernorm="ln_2",
    self_attn__o_proj="attn.c_proj",
    mlp__up_proj="mlp.c_fc",
    mlp__down_proj="mlp.c_proj",
)
GPT2_LINEARS = ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def _gpt2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("scale_attn_weights", True, what="attention without a scale")
    keys.refuse_unless("scale_attn_by_inverse_layer_idx", False, what="a scale of attention that depends on the layer")
    keys.refuse_unless("add_cross_attention", False, what="cross-attention")
    return {"position_embeddings": model.max_position}


def _gpt2_layout(model: ModelConfig) -> Layout:
    """Matrices are [inputs, outputs]."""
    linears = {part: msgspec.structs.replace(GPT2_NAMES[part], transposed=True) for part in GPT2_LINEARS}
    return Layout("transformer.h.{}.", GPT2_NAMES | linears | qkv_slices(model, "attn.c_attn", transposed=True))


def _gpt_bigcode(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("scale_attn_weights", True, what="attention without a scale")
    keys.refuse_unless("add_cross_attention", False, what="cross-attention")
    return {
        "num_kv_heads": 1 if keys.flag("multi_query", True) else model.num_heads,
        "position_embeddings": model.max_position,
    }


def _gpt_bigcode_layout(model: ModelConfig) -> Layout:
    """GPT-2's names. Matrices are [outputs, inputs]. Without multi-query attention, c_attn has the query, key and value
    of each head together; with it, its one group is the same as all queries, then the key, then the value."""
    return Layout("transformer.h.{}.", GPT2_NAMES | qkv_by_head(model, "attn.c_attn"))


def _gpt_neox(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    has_bias = keys.flag("attention_bias", True)
    return {"parallel": keys.flag("use_parallel_residual", True), "qkv_bias": has_bias, "out_bias": has_bias}


def _gpt_neox_layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        model__embed_tokens="gpt_neox.embed_in",
        model__norm="gpt_neox.final_layer_norm",
        lm_head="embed_out",
        self_attn__o_proj="attention.dense",
        mlp__up_proj="mlp.dense_h_to_4h",
        mlp__down_proj="mlp.dense_4h_to_h",
    )
    return Layout("gpt_neox.layers.{}.", pieces | qkv_by_head(model, "attention.query_key_value"))


def _opt(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("do_layer_norm_before", True, what="a norm after each layer")
    keys.refuse_unless("word_embed_proj_dim", model.hidden_size, what="a projection of embeddings")
    keys.refuse_unless("layer_norm_elementwise_affine", True, what="a norm without weights")
    keys.refuse_unless("_remove_final_layer_norm", False, what="a model without the last norm")
    has_bias = keys.flag("enable_bias", True)
    return {
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "mlp_bias": has_bias,
        "position_embeddings": model.max_position + 2,
        "position_offset": 2,
    }


def _opt_layout(model: ModelConfig) -> Layout:
    pieces = renamed(
        model__embed_tokens="model.decoder.embed_tokens",
        model__embed_positions="model.decoder.embed_positions",
        model__norm="model.decoder.final_layer_norm",
        input_layernorm="self_attn_layer_norm",
        post_attention_layernorm="final_layer_norm",
        self_attn__o_proj="self_attn.out_proj",
        mlp__up_proj="fc1",
        mlp__down_proj="fc2",
    )
    return Layout("model.decoder.layers.{}.", pieces)


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "gpt2": HfArchitecture(
        class_name="GPT2LMHeadModel",
        models="GPT-2",
        aliases=GPT2_ALIASES,
        keys=GPT2_KEYS,
        defaults=GPT2_DEFAULTS,
        always={**LAYER_NORM, **BIASES, "gated": False, "rotary_dim": 0},
        inner=FOUR_TIMES,
        fields=_gpt2,
        layout=_gpt2_layout,
    ),
    "gpt_bigcode": HfArchitecture(
        class_name="GPTBigCodeForCausalLM",
        models="StarCoder, SantaCoder",
        aliases=GPT2_ALIASES,
        keys=GPT2_KEYS,
        defaults={**GPT2_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"},
        always={**LAYER_NORM, **BIASES, "gated": False, "rotary_dim": 0},
        inner=FOUR_TIMES,
        fields=_gpt_bigcode,
        layout=_gpt_bigcode_layout,
    ),
    "gpt_neox": HfArchitecture(
        class_name="GPTNeoXForCausalLM",
        models="GPT-NeoX, Pythia",
        keys={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        defaults={"hidden_act": "gelu", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        always={**LAYER_NORM, "mlp_bias": True, "gated": False},
        fields=_gpt_neox,
        layout=_gpt_neox_layout,
    ),
    "opt": HfArchitecture(
        class_name="OPTForCausalLM",
        models="OPT",
        keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={"hidden_act": "relu", "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        always={**LAYER_NORM, "gated": False, "rotary_dim": 0, "rms_norm_eps": 1e-5},
        fields=_opt,
        layout=_opt_layout,
    ),
}
