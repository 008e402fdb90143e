"""Llama, and architectures that have its tensors: Mistral, Qwen, SmolLM3, Granite, Seed-OSS, Ministral and others."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window, renamed, windows_by_pattern
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.families.ropes import original_context, rope_of
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import as_float


def windows_everywhere(config: Mapping[str, Any], num_layers: int) -> Window:
    """Mistral's rule: every layer has the window unless it is null; 4096 if the key is absent."""
    return _window(config, 4096), None


def windows_by_layer(config: Mapping[str, Any], num_layers: int) -> Window:
    """Qwen's rule: with `use_sliding_window`, the layers in `layer_types` or, if absent, from `max_window_layers`
    on."""
    uses = config.get("use_sliding_window")
    if not isinstance(uses, bool | None):
        raise ConfigFault(f"use_sliding_window is {shown(uses)}; it must be true or false")
    window = _window(config, 4096) if uses else None
    kinds = Keys(config, {}, {}).layer_kinds(num_layers)
    if kinds is None:
        first = _count(config, "max_window_layers", 28, least=0)
        layers = list(range(min(28 if first is None else first, num_layers), num_layers))
    else:
        layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        if layers and window is None:
            raise ConfigFault(
                "layer_types has layers with sliding_attention, but use_sliding_window or sliding_window disables the "
                "window: they must agree"
            )
    if window is None or not layers:
        return None, None
    return window, None if len(layers) == num_layers else layers


def _window(config: Mapping[str, Any], default: int) -> int | None:
    return _count(config, "sliding_window", default)


def _count(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int | None:
    """An integer; `default` if the key is absent, None if it is null. Raises ConfigFault below `least`."""
    value = config.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigFault(f"{key} is {shown(value)}; it must be an integer of at least {least}")
    return value


def _smollm3_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """With `use_sliding_window`, the layers in `layer_types`, or those without rotary embedding."""
    keys = Keys(config, {}, {})
    if not keys.flag("use_sliding_window") or config.get("sliding_window") is None:
        return None, None
    kinds = keys.layer_kinds(num_layers)
    layers = _layers_without_rope(keys, num_layers)
    if kinds is not None:
        layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return (keys.count("sliding_window"), layers) if layers else (None, None)


def _layers_without_rope(keys: Keys, num_layers: int) -> list[int]:
    """`no_rope_layers`, which is 1 for each layer with a rotary embedding."""
    listed = keys.get("no_rope_layers", list)
    if listed is None:
        interval = keys.count("no_rope_layer_interval", 4)
        return [i for i in range(num_layers) if (i + 1) % interval == 0]
    if len(listed) != num_layers or any(value not in (0, 1) for value in listed):
        raise keys.fault("no_rope_layers", f"a list of num_hidden_layers = {num_layers} values, each 0 or 1")
    return [i for i, value in enumerate(listed) if not value]


def _granite(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    scaling = keys.number("logits_scaling", 1.0)
    if scaling <= 0:
        raise keys.fault("logits_scaling", "a positive number")
    return {
        "embedding_scale": keys.number("embedding_multiplier", 1.0),
        "residual_multiplier": keys.number("residual_multiplier", 1.0),
        "query_scale": keys.number("attention_multiplier", 1.0),
        "logit_scale": 1 / scaling,
    }


def _ministral3(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    key, rope = rope_of(keys)
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return {}
    if not isinstance(beta, int | float) or isinstance(beta, bool):
        raise ConfigFault(f"{key} has llama_4_scaling_beta {shown(beta)}; it must be a number")
    return {"query_growth": as_float(beta), "query_growth_period": original_context(rope, key, keys)}


def _without_activation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Apertus' config.json without its activation, which has parameters and is none of those of other models."""
    Keys(config, {}, {}).refuse_unless("hidden_act", "xielu", what="an Apertus with another activation")
    return {key: value for key, value in config.items() if key != "hidden_act"}


def _apertus_layout(model: ModelConfig) -> Layout:
    return Layout(
        pieces=renamed(
            input_layernorm="attention_layernorm",
            post_attention_layernorm="feedforward_layernorm",
            mlp__xielu="mlp.act_fn",
        )
    )


APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
NO_BIASES = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "llama": HfArchitecture(class_name="LlamaForCausalLM", models="Llama, SmolLM, Falcon3"),
    "mistral": HfArchitecture(
        class_name="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        always=NO_BIASES,
        windows=windows_everywhere,
    ),
    "qwen2": HfArchitecture(
        class_name="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        always={"qkv_bias": True, "out_bias": False, "mlp_bias": False},
        windows=windows_by_layer,
    ),
    "qwen3": HfArchitecture(
        class_name="Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        always={"mlp_bias": False, "qk_norm": True},
        windows=windows_by_layer,
    ),
    "smollm3": HfArchitecture(
        class_name="SmolLM3ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
        windows=_smollm3_windows,
        fields=lambda keys, model: {"layers_without_rope": _layers_without_rope(keys, model.num_layers)},
    ),
    "granite": HfArchitecture(class_name="GraniteForCausalLM", models="Granite 3", fields=_granite),
    "seed_oss": HfArchitecture(
        class_name="SeedOssForCausalLM",
        models="Seed-OSS",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 524288, "head_dim": 128},
        fields=lambda keys, model: {
            "qkv_bias": keys.flag("attention_bias", True),
            "out_bias": keys.flag("attention_out_bias"),
        },
    ),
    "ministral": HfArchitecture(
        class_name="MinistralForCausalLM",
        models="Ministral 8B",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        always=NO_BIASES,
        windows=windows_by_pattern(0),
    ),
    "ministral3": HfArchitecture(
        class_name="Ministral3ForCausalLM",
        models="Ministral 3",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": MINISTRAL3_ROPE,
        },
        always=NO_BIASES,
        windows=windows_by_pattern(0, None),
        fields=_ministral3,
    ),
    "helium": HfArchitecture(
        class_name="HeliumForCausalLM",
        defaults={
            "num_key_value_heads": 20,
            "max_position_embeddings": 4096,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
        always={"interleaved_rope": True, "out_bias": False},
    ),
    "ernie4_5": HfArchitecture(
        class_name="Ernie4_5ForCausalLM",
        models="ERNIE 4.5",
        keys={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        always={"interleaved_rope": True},
    ),
    "arcee": HfArchitecture(
        class_name="ArceeForCausalLM",
        models="AFM (Arcee)",
        defaults={"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        always={"gated": False},
    ),
    "apertus": HfArchitecture(
        class_name="ApertusForCausalLM",
        models="Apertus",
        defaults={
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "rope_parameters": APERTUS_ROPE,
        },
        always={"activation": "xielu", "gated": False, "mlp_bias": False, "qk_norm": True},
        adapt=_without_activation,
        layout=_apertus_layout,
    ),
}
