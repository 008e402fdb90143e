"""The architectures as their checkpoints describe them: how a config.json is read, and what a .gguf file does its own
way. What a Llama-shaped architecture needs is an entry in each of the two tables.
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
    """What is wrong with a key of config.json: its name and value, and what would be right."""


def no_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """Llama's rule: all layers see everything, whatever the file says."""
    return None, None


def windows_everywhere(config: Mapping[str, Any], num_layers: int) -> Window:
    """Mistral's rule: every layer has the window, unless it is null. Where the key is absent it is 4096."""
    return _count(config, "sliding_window", 4096), None


def windows_by_layer(config: Mapping[str, Any], num_layers: int) -> Window:
    """Qwen's rule: no window unless `use_sliding_window`; then the layers that `layer_types` names, or without it those
    from `max_window_layers` on."""
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
                f"layer_types is {shown(kinds)}; it must be a list of num_hidden_layers = {num_layers} kinds, each one "
                f"of {', '.join(LAYER_KINDS)}"
            )
        layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        if layers and window is None:
            raise ConfigFault(
                "layer_types names layers with sliding_attention, but use_sliding_window or sliding_window says that "
                "there is no window: the two must agree"
            )
    if window is None or not layers:
        return None, None
    return window, None if len(layers) == num_layers else layers


def _count(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int | None:
    """A number, `default` where the key is absent, None where it is null."""
    value = config.get(key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigFault(f"{key} is {shown(value)}; it must be a whole number from {least}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class HfArchitecture:
    """How the config.json of one `model_type` is read."""

    class_name: str
    """Of the causal model, as `architectures` names it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for keys that are absent, where it isn't what it takes for a Llama's."""
    always: Mapping[str, bool] = field(default_factory=dict)
    """Flags of ModelConfig that all models of this architecture have, whatever their config.json says."""
    windows: Callable[[Mapping[str, Any], int], Window] = no_windows
    """From config.json and the number of layers. Raises ConfigFault."""


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
    """What the files of one `general.architecture` do their own way."""

    models: str
    """Who is called so, for people."""
    turns_neighbours: bool = False
    """Rows of q and k are ordered for a rotation of neighbouring pairs; else for that of halves, as in Hugging Face's
    layout (LLAMA_ROPE_TYPE_NORM and _NEOX in llama.cpp's `llama_model_rope_type`)."""
    qk_norm: bool = False
    has_windows: bool = False
    """A sliding window that the file names is that of every layer; else which layers have it isn't known."""


GGUF_ARCHITECTURES: dict[Architecture, GgufArchitecture] = {
    "llama": GgufArchitecture(models="Llama, Mistral, SmolLM2", turns_neighbours=True, has_windows=True),
    "qwen2": GgufArchitecture(models="Qwen2, Qwen2.5"),
    "qwen3": GgufArchitecture(models="Qwen3", qk_norm=True),
}


def flags_of(architecture: HfArchitecture, config: Mapping[str, Any]) -> dict[str, bool]:
    """The flags of ModelConfig: those that are the architecture's, and what config.json says of the others.

    Raises ConfigFault where a key is no flag.
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
