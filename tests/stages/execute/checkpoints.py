"""Tiny random models, made by transformers and written as a prepared folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pipeline.model_folder import Llama3Rope, ModelConfig

VOCAB_SIZE = 300
EOS_ID = 2

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "all heads": {"num_kv_heads": 6},
    "one kv head": {"num_kv_heads": 1, "num_heads": 4, "head_dim": 8},
    "llama3 rope": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 64), "rope_theta": 500.0},
    "mistral": {"architecture": "mistral"},
    "sliding window": {"architecture": "mistral", "sliding_window": 21},
    "narrow window": {"architecture": "mistral", "sliding_window": 5, "head_dim": 32},
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


def reference_model(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """A random model of this shape, float32, whose logits differ enough from one another to mean something."""
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
    torch.manual_seed(seed)
    if config.architecture == "mistral":
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        model = MistralForCausalLM(MistralConfig(**shape, rope_parameters=rope, sliding_window=config.sliding_window))
    else:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling is not None:
            scaling = config.rope_scaling
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
        biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
        model = LlamaForCausalLM(LlamaConfig(**shape, **biases, rope_parameters=rope))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Norms of all ones and biases of all zeros would hide that they are read at all.
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
    return model.eval()


def write(folder: Path, config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """Write the model and its model.json into `folder`, and return it."""
    model = reference_model(config, seed)
    model.save_pretrained(folder)
    config.save(folder)
    return model


def reference_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """At every position: [len(ids), vocab_size]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
