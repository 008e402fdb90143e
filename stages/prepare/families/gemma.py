"""Gemma 1, 2, 3 and 4 (text)."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, renamed, windows_by_pattern
from pipeline.stages.prepare.families.keys import ConfigFault, Keys

ALWAYS = {"norm_offset": 1.0, "mlp_bias": False}
DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ACTIVATION = {"hidden_act": "hidden_activation"}


def _common(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    if not keys.has_default("rope_by_layer"):  # Gemma 3's key
        keys.refuse_unless("use_bidirectional_attention", False, what="bidirectional attention")
    return {"embedding_scale": model.hidden_size**0.5}


def _gemma(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    # transformers takes "gelu" of old config.json files for what the models were trained with.
    activation = "gelu_tanh" if model.activation == "gelu" else model.activation
    return {**_common(keys, model), "activation": activation}


def _scaled(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    scalar = keys.number("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise ConfigFault(f"query_pre_attn_scalar is {scalar:g}; it must be a positive number")
    return {
        **_common(keys, model),
        "query_scale": scalar**-0.5,
        "logit_softcap": keys.optional_number("final_logit_softcapping"),
    }


def _gemma2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    return {**_scaled(keys, model), "attention_softcap": keys.optional_number("attn_logit_softcapping")}


def _gemma3(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    # transformers reads the key, and ignores it.
    keys.refuse_unless("attn_logit_softcapping", what="a soft cap of Gemma 3's attention scores")
    fields = _scaled(keys, model)
    if keys.flag("use_bidirectional_attention"):
        # The window is that of both sides.
        window = None if model.sliding_window is None else model.sliding_window // 2 + 1
        fields |= {"causal": False, "sliding_window": window}
    return fields


def layout_of_four_norms(model: ModelConfig) -> Layout:
    """Names where both halves of a layer have norms before and after them."""
    return Layout(
        pieces=renamed(
            self_attn_post_norm="post_attention_layernorm",
            post_attention_layernorm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        )
    )


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "gemma": HfArchitecture(
        class_name="GemmaForCausalLM",
        defaults={**DEFAULTS, "num_key_value_heads": 16},
        always=ALWAYS,
        fields=_gemma,
    ),
    "gemma2": HfArchitecture(
        class_name="Gemma2ForCausalLM",
        models="Gemma 2",
        keys=ACTIVATION,
        defaults={
            **DEFAULTS,
            "num_key_value_heads": 4,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        always={**ALWAYS, "post_norms": True},
        windows=windows_by_pattern(2),
        fields=_gemma2,
        layout=layout_of_four_norms,
    ),
    "gemma3_text": HfArchitecture(
        class_name="Gemma3ForCausalLM",
        other_class_names=("Gemma3TextModel",),
        models="Gemma 3",
        keys=ACTIVATION,
        defaults={
            **DEFAULTS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_by_layer": True,
        },
        always={**ALWAYS, "post_norms": True, "qk_norm": True},
        windows=windows_by_pattern(6, has_key=True),
        fields=_gemma3,
        layout=layout_of_four_norms,
    ),
}
