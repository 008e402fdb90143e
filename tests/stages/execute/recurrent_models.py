"""Tiny random models with recurrent layers, and transformers' computation of them in float64: its forms for prompts and
for steps differ in float32."""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints

VOCAB_SIZE = 608
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Variant:
    kind: str
    """`model_type`"""
    class_name: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return self.kind.removesuffix("_text")


LFM2 = {"conv_L_cache": 3, "block_multiple_of": 32, "layer_types": ["conv", "conv", "full_attention", "conv"]}
LFM3 = {
    "conv_L_cache": 7,
    "head_dim": 16,
    "sliding_window": 21,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
}
VARIANTS = {
    "qwen3_5": Variant("qwen3_5_text", "Qwen3_5ForCausalLM", {"head_dim": 32, "rope_parameters": ROPE}),
    "qwen3_5, heads of 256": Variant(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        {
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": ROPE,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
        },
    ),
    "qwen3_5_moe": Variant(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {**EXPERTS, "head_dim": 32, "rope_parameters": ROPE}
    ),
    "qwen3_next": Variant(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**EXPERTS, "head_dim": 32, "rope_parameters": ROPE, "mlp_only_layers": [1]},
    ),
    "olmo_hybrid": Variant("olmo_hybrid", "OlmoHybridForCausalLM", {"linear_num_key_heads": 4}),
    "olmo_hybrid, rope": Variant(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        {"linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "lfm2": Variant("lfm2", "Lfm2ForCausalLM", LFM2),
    "lfm2, seven taps": Variant(
        "lfm2",
        "Lfm2ForCausalLM",
        {**LFM2, "conv_L_cache": 7, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "lfm3": Variant("lfm3", "Lfm3ForCausalLM", LFM3),
    "lfm3, without gates": Variant(
        "lfm3", "Lfm3ForCausalLM", {**LFM3, "use_attention_gate": False, "use_sandwich_norm": False}
    ),
    "lfm2_moe": Variant(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {**EXPERTS, **LFM2, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
}


def config_of(variant: Variant) -> Any:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(variant.kind, vocab_size=VOCAB_SIZE, **{**SIZES, **ids, **variant.changes})
    config._experts_implementation = "eager"  # the grouped matmul takes no float64
    config._attn_implementation = "eager"
    return config


def make(variant: Variant) -> Any:
    """The model in transformers, float32."""
    module = importlib.import_module(f"transformers.models.{variant.package}.modeling_{variant.package}")
    torch.manual_seed(0)
    model = getattr(module, variant.class_name)(config_of(variant))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0, 0.5 if "conv1d" in name or "conv.conv" in name else 0.15)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 1)
            else:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(0, 0.3)
    return model.eval()


@contextmanager
def in_float64(variant: Variant, folder: Path) -> Iterator[Any]:
    """transformers' module with float64 wherever it has float32."""
    name = f"transformers.models.{variant.package}.modeling_{variant.package}"
    source = inspect.getsource(importlib.import_module(name))
    source = (
        source.replace("float32", "float64").replace(".float()", ".double()").replace("torch.float,", "torch.float64,")
    )
    path = folder / f"modeling_{variant.package}_64.py"
    path.write_text(source.replace("dtype=torch.float)", "dtype=torch.float64)"))
    spec = importlib.util.spec_from_file_location(f"{name}_64", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def logits_of(variant: Variant, folder: Path, model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The logits behind each id of each prompt in float64, [ids, vocab] each."""
    with in_float64(variant, folder) as module, torch.inference_mode():
        wide = getattr(module, variant.class_name)(config_of(variant)).double().eval()
        wide.load_state_dict(model.double().state_dict())
        return [wide(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]


def _mend(path: Path, config: Any) -> None:
    """transformers saves the three parts of a convolution as equal ones, although they are not."""
    tensors = load_file(path)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
    for layer in range(config.num_hidden_layers):
        names = [f"model.layers.{layer}.linear_attn.{name}_conv1d.weight" for name in "qkv"]
        if names[0] in tensors:
            whole = torch.cat([tensors[name] for name in names])
            tensors |= {name: part.clone() for name, part in zip(names, whole.split(sizes), strict=True)}
    save_file(tensors, path, {"format": "pt"})


def write(folder: Path, variant: Variant) -> tuple[Path, Any]:
    """A prepared folder of the model, and the model in transformers."""
    model = make(variant)
    source = checkpoints.save_folder(folder / "source", model)
    if variant.kind == "olmo_hybrid":
        _mend(source / "model.safetensors", config_of(variant))
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache"))), model
