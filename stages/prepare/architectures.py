"""The supported architectures: how to read their config.json, and what differs in their .gguf files.

A Llama-shaped architecture is one entry in each of the two tables.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.runtime.model_folder import Architecture
from pipeline.stages.prepare.files import shown

Window = tuple[int | None, list[int] | None]
"""`sliding_window` and `sliding_layers` of ModelConfig."""

LAYER_KINDS = ("full_attention", "sliding_attention")


class ConfigFault(ValueError):
    """A wrong value in config.json: the key, its value, and what would be valid."""


def no_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """Llama's rule: no layer has a window, even if the file names one."""
    return None, None


def windows_everywhere(config: Mapping[str, Any], num_layers: int) -> Window:
    """Mistral's rule: every layer has the window unless it is null; 4096 if the key is absent."""
    return _count(config, "sliding_window", 4096), None


def windows_by_layer(config: Mapping[str, Any], num_layers: int) -> Window:
    """Qwen's rule: with `use_sliding_window`, the layers in `layer_types` or, if absent, from `max_window_layers`
    on."""
    uses = config.get("use_sliding_window")
    if not isinstance(uses, bool | None):
        raise ConfigFault(f"use_sliding_window is {shown(uses)}; it must be true or false")
    window = _count(config, "sliding_window", 4096) if uses else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = _count(config, "max_window_layers", 28, least=0)
        layers = list(range(min(28 if first is None else first, num_layers), num_layers))
    else:
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in LAYER_KINDS for kind in kinds):
            raise ConfigFault(
                f"layer_types is {shown(kinds)}; it must be a list of num_hidden_layers = {num_layers} values, each "
                f"one of {', '.join(LAYER_KINDS)}"
            )
        layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        if layers and window is None:
            raise ConfigFault(
                "layer_types has layers with sliding_attention, but use_sliding_window or sliding_window disables the "
                "window: they must agree"
            )
    if window is None or not layers:
        return None, None
    return window, None if len(layers) == num_layers else layers


def _count(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int | None:
    """An integer; `default` if the key is absent, None if it is null. Raises ConfigFault below `least`."""
    value = config.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigFault(f"{key} is {shown(value)}; it must be an integer of at least {least}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class HfArchitecture:
    """How to read the config.json of one `model_type`."""

    class_name: str
    """The causal model's class, as in `architectures`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for absent keys, if they differ from Llama's."""
    always: Mapping[str, bool] = field(default_factory=dict)
    """Flags of ModelConfig that the architecture fixes; config.json does not override them."""
    windows: Callable[[Mapping[str, Any], int], Window] = no_windows
    """Takes config.json and the number of layers. Raises ConfigFault."""


HF_ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "llama": HfArchitecture(class_name="LlamaForCausalLM"),
    "mistral": HfArchitecture(
        class_name="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072},
        always={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        windows=windows_everywhere,
    ),
    "qwen2": HfArchitecture(
        class_name="Qwen2ForCausalLM",
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """What is specific to the files of one `general.architecture`."""

    models: str
    """Model families, for error messages."""
    interleaved_rope: bool = False
    """Rows of q and k are ordered for rotary embeddings of adjacent pairs (LLAMA_ROPE_TYPE_NORM in llama.cpp's
    `llama_model_rope_type`). If False, for rotation of halves as in Hugging Face's layout (LLAMA_ROPE_TYPE_NEOX)."""
    qk_norm: bool = False
    has_windows: bool = False
    """The file's sliding window applies to every layer. If False, a window is refused: its layers are unknown."""


GGUF_ARCHITECTURES: dict[Architecture, GgufArchitecture] = {
    "llama": GgufArchitecture(models="Llama, Mistral, SmolLM2", interleaved_rope=True, has_windows=True),
    "qwen2": GgufArchitecture(models="Qwen2, Qwen2.5"),
    "qwen3": GgufArchitecture(models="Qwen3", qk_norm=True),
}


def flags_of(architecture: HfArchitecture, config: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of ModelConfig: those that the architecture fixes, and the others from config.json.

    Raises ConfigFault if a value is not a bool.
    """
    keys = {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    flags = dict(architecture.always)
    for flag, key in keys.items():
        if flag not in flags:
            try:
                flags[flag] = bool(msgspec.convert(config.get(key), bool | None))
            except msgspec.ValidationError:
                raise ConfigFault(f"{key} is {shown(config[key])}; it must be true or false") from None
    return flags
