"""A typical model of each supported architecture, to find out what it needs from a back end."""

from pathlib import Path
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.sources.config_json import ConfigReader

SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LAYERS = {name: {"full_attn_idxs": [2, 5]} for name in ("lfm2", "lfm2_moe")}
"""Keys of architectures whose default has none of the layers that all their models have."""
WRITTEN_AS = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "gemma4_unified_text": "gemma4"}
"""Architectures that llama.cpp's converter writes under another one's name."""


def typical_config(name: Architecture) -> ModelConfig:
    """A model with the defaults of transformers for everything but the sizes and `LAYERS`."""
    architecture = HF_ARCHITECTURES[name]
    config: dict[str, Any] = {architecture.keys.get(key, key): value for key, value in SIZES.items()}
    config |= LAYERS.get(name, {})
    if "num_key_value_heads" in architecture.defaults:  # it may not divide the number of heads above
        config["num_key_value_heads"] = 8
    return ConfigReader(Path("config.json"), {"model_type": name, **config}).model(name, [], {})


def models_of(name: Architecture) -> str:
    """The model families of an architecture."""
    architecture = HF_ARCHITECTURES[name]
    return architecture.models or architecture.class_name.removesuffix("ForCausalLM")


def gguf_of(name: Architecture) -> str:
    """The names of an architecture in .gguf files; empty if such files are not supported."""
    is_causal = HF_ARCHITECTURES[name].always.get("causal", True)
    names = [
        gguf
        for gguf, one in GGUF_ARCHITECTURES.items()
        if (one.model_type or gguf) == name and one.always.get("causal", True) == is_causal
    ]
    return ", ".join(names) or WRITTEN_AS.get(name, "")
