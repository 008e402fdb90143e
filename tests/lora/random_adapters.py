"""Random adapters in PEFT's format, and models with the adapters merged into their weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from pipeline.lora.peft_config import PeftConfig
from pipeline.runtime.model.model_config import ModelConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + MLP


def shape_of(config: ModelConfig, target: str) -> tuple[int, int]:
    """Outputs and inputs."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q_proj": (queries, config.hidden_size),
        "k_proj": (keys, config.hidden_size),
        "v_proj": (keys, config.hidden_size),
        "o_proj": (config.hidden_size, queries),
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }[target]


def module_of(layer: int, target: str) -> str:
    return f"model.layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}"


def write_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: tuple[str, ...] = ALL,
    scale: float = 0.1,
    dtype: Any = np.float32,
    **fields: Any,
) -> Path:
    """An adapter of every layer. `fields` are further ones of adapter_config.json; `rank_pattern` has the names of
    projections."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(config.num_layers):
        for target in targets:
            outputs, inputs = shape_of(config, target)
            own = fields.get("rank_pattern", {}).get(target, rank)
            name = f"base_model.model.{module_of(layer, target)}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, scale, (own, inputs)).astype(dtype)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, scale, (outputs, own)).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(peft), "utf-8")
    return folder


def merge(model: Any, config: ModelConfig, folder: Path) -> Any:
    """Add an adapter to a transformers model's weights, as PEFT's merge does: W + scaling * B A."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    fields = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    weights = model.state_dict()
    with torch.no_grad():
        for layer in range(config.num_layers):
            for target in ALL:
                name = module_of(layer, target)
                if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is None:
                    continue
                b = tensors[f"base_model.model.{name}.lora_B.weight"]
                rank = len(a)
                alpha = fields.get("alpha_pattern", {}).get(target, fields["lora_alpha"])
                scaling = alpha / rank**0.5 if fields.get("use_rslora") else alpha / rank
                change = scaling * (torch.from_numpy(b).double() @ torch.from_numpy(a).double())
                weights[f"{name}.weight"] += change.float()
    return model


def peft_config(**fields: Any) -> PeftConfig:
    return PeftConfig(**{"peft_type": "LORA", "r": 8, **fields})
