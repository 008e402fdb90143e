"""Adapters that tools/models/make_peft_reference.py lets PEFT make, and their matrices."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

REFERENCE = Path(__file__).parents[1] / "data" / "peft_reference.json"
IDS = np.random.default_rng(5).integers(3, 600, 24).tolist()
"""The prompt."""


@dataclass(frozen=True)
class PeftCase:
    base: str
    """A model of tests/stages/execute/tiny_architectures.py."""
    config: dict[str, Any] = field(default_factory=dict)
    """Arguments of PEFT's LoraConfig."""


ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "all projections": PeftCase("falcon 3", {"r": 8, "lora_alpha": 12, "target_modules": ALL}),
    "ranks and alphas": PeftCase(
        "falcon 3",
        {
            "r": 5,
            "lora_alpha": 7,
            "target_modules": ALL,
            "rank_pattern": {"q_proj": 13, "up_proj": 1, "model.layers.1.self_attn.v_proj": 16},
            "alpha_pattern": {"down_proj": 3, "^model.layers.0.self_attn.q_proj": 2},
        },
    ),
    "rsLoRA": PeftCase("falcon 3", {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"}),
    "some layers": PeftCase(
        "falcon 3", {"r": 3, "lora_alpha": 8, "target_modules": ["k_proj", "up_proj"], "layers_to_transform": [1]}
    ),
    "stacked projections": PeftCase(
        "phi3", {"r": 6, "lora_alpha": 12, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
    ),
    "interleaved rotary embedding": PeftCase("glm", {"r": 4, "target_modules": ["q_proj", "k_proj", "gate_up_proj"]}),
    "no gate": PeftCase("starcoder2", {"r": 4, "target_modules": ["q_proj", "v_proj", "c_fc", "c_proj"]}),
}


def tensors_of(shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Random matrices of these shapes, in the order of their names: the same wherever this runs."""
    random = np.random.default_rng(11)
    return {name: random.normal(0, 0.1, shapes[name]).astype(np.float32) for name in sorted(shapes)}


def write_case(folder: Path, stored: dict[str, Any]) -> Path:
    """The adapter of a case in the reference, as PEFT saved it."""
    folder.mkdir()
    save_file(tensors_of(stored["shapes"]), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(stored["config"]), "utf-8")
    return folder
