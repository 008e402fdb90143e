"""Tiny random models, made by transformers and written as a prepared folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Llama3Rope

VOCAB_SIZE = 300
EOS_ID = 2

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "biased": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "all heads": {"num_kv_heads": 6},
    "one kv head": {"num_kv_heads": 1, "num_heads": 4, "head_dim": 8},
    "llama3 rope": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64), "rope_theta": 500.0},
    "mistral": {"architecture": "mistral"},
    "sliding window": {"architecture": "mistral", "sliding_window": 21},
    "narrow window": {"architecture": "mistral", "sliding_window": 5, "head_dim": 32},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True, "tie_embeddings": True, "rms_norm_eps": 1e-6},
    "qwen2, windows above": {
        "architecture": "qwen2",
        "qkv_bias": True,
        "sliding_window": 21,
        "sliding_layers": [1, 2],
        "num_kv_heads": 6,
    },
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 32, "tie_embeddings": True, "rope_theta": 1e6},
    "qwen3, windows between": {
        "architecture": "qwen3",
        "qk_norm": True,
        "qkv_bias": True,
        "out_bias": True,
        "sliding_window": 9,
        "sliding_layers": [0, 2],
        "num_heads": 5,
        "num_kv_heads": 1,
        "rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64),
    },
}


def config_of(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "name": "tiny",
        "architecture": "llama",
        "num_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_embeddings": False,
        "eos_ids": [EOS_ID],
        "weight_files": ["model.safetensors"],
    }
    return ModelConfig(**{**fields, **changes})


def reference_model(config: ModelConfig, seed: int = 0) -> Any:
    """A random model of this shape, float32, whose logits differ enough to detect errors."""
    shape: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": 0.15,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        assert isinstance(scaling, Llama3Rope)
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    torch.manual_seed(seed)
    theirs = AutoConfig.for_model(config.architecture, **shape, **_own_keys(config), rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(theirs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # With norms of all ones and biases of all zeros, a test would pass even if they were not read.
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
    return model.eval()


def _own_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that only some architectures have."""
    windows = ["sliding_attention" if config.window_of(i) else "full_attention" for i in range(config.num_layers)]
    match config.architecture:
        case "llama":
            assert config.qkv_bias == config.out_bias and config.sliding_window is None
            return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        case "mistral":
            assert config.sliding_layers is None
            return {"sliding_window": config.sliding_window}
        case "qwen2":
            assert config.qkv_bias and not config.out_bias
            return {"use_sliding_window": True, "sliding_window": config.sliding_window, "layer_types": windows}
        case "qwen3":
            assert config.qk_norm and config.qkv_bias == config.out_bias
            own = {"use_sliding_window": True, "sliding_window": config.sliding_window, "layer_types": windows}
            return {**own, "attention_bias": config.qkv_bias}
    raise AssertionError(f"tiny_architectures.py makes models of {config.architecture}")


def write(folder: Path, config: ModelConfig, seed: int = 0) -> Any:
    """Write the model and its model.json into `folder`, and return it."""
    model = reference_model(config, seed)
    model.save_pretrained(folder)
    config.save(folder)
    return model


def reference_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab_size], one row for each position."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
