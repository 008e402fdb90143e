"""The forms in which users have a model's folder: what `save_pretrained` of several versions and classes writes, and
what people do to it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.stages.execute import tiny_architectures
from tests.stages.execute.tiny_architectures import VOCAB_SIZE, Variant
from tests.stages.prepare import checkpoints

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}
TEXT = {**SIZES, "vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def _gemma3() -> Any:
    text = {**TEXT, "query_pre_attn_scalar": 16, "sliding_window": 21, "sliding_window_pattern": 2}
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def _mistral3(kind: str = "mistral", **changes: Any) -> Any:
    text = {**TEXT, "model_type": kind, "rope_parameters": ROPE, **changes}
    vision = {**VISION, "model_type": "pixtral"}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision))


QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64}
QWEN_VL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, {"embed_dim": 32, "hidden_size": 64}),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, {"fullatt_block_indexes": [0]}),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, {"deepstack_visual_indexes": [0]}),
}
"""By name: the classes of the config and of the model, and what their vision_config has besides QWEN_VISION."""


def _qwen_vl(config: Any, model: Any, vision: dict[str, Any]) -> Any:
    text = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
    return model(config(text_config=text, vision_config={**QWEN_VISION, **vision}))


def _variant(kind: str, **changes: Any) -> Callable[[], Any]:
    return lambda: tiny_architectures.make(Variant(kind, {**SIZES, **changes}, {}))


def _named(name: str) -> Callable[[], Any]:
    return lambda: tiny_architectures.make(tiny_architectures.VARIANTS[name])


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _variant("llama", rope_parameters=ROPE),
    "llama, tied": _variant("llama", rope_parameters=ROPE, tie_word_embeddings=True),
    "qwen2, tied": _variant("qwen2", tie_word_embeddings=True),
    "gemma2": _variant("gemma2", query_pre_attn_scalar=16, sliding_window=21),
    "phi3, LongRoPE": lambda: tiny_architectures.make(
        Variant(
            "phi3",
            {
                "rope_parameters": tiny_architectures.LONG,
                "original_max_position_embeddings": 128,
                "max_position_embeddings": 512,
            },
        )
    ),
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    **{name: partial(_qwen_vl, *parts) for name, parts in QWEN_VL.items()},
    "idefics3": lambda: Idefics3ForConditionalGeneration(
        Idefics3Config(text_config={**TEXT, "model_type": "llama"}, vision_config=VISION, image_token_id=5)
    ),
    "ministral3": lambda: _mistral3(
        "ministral3", rope_parameters=tiny_architectures.VARIANTS["ministral3"].changes["rope_parameters"]
    ),
    **{name: _named(name) for name in ("gpt2", "gpt_neox", "opt", "bloom", "qwen3_moe", "mixtral", "starcoder2")},
}


IMAGE_MODELS = ("gemma3", "mistral3", "idefics3", *QWEN_VL)
"""Those for texts and images."""


@cache
def model(name: str) -> Any:
    """A model whose weights are random, by its name in MODELS."""
    torch.manual_seed(0)
    made = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter.dim() == 1 and "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.eval()


@dataclass
class Folder:
    """A model's folder, which forms change."""

    path: Path

    def config(self, **changes: Any) -> None:
        """Set keys of config.json."""
        path = self.path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def text_config(self, **changes: Any) -> None:
        """Set keys of the text model's config."""
        text = json.loads((self.path / "config.json").read_text())["text_config"]
        self.config(text_config={**text, **changes})

    def without(self, *keys: str, part: str | None = None) -> None:
        """Remove keys of config.json, or of an object in it."""
        path = self.path / "config.json"
        config = json.loads(path.read_text())
        where = config if part is None else config[part]
        for key in keys:
            where.pop(key, None)
        path.write_text(json.dumps(config))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.path / SINGLE)

    def save(self, tensors: dict[str, Tensor], name: str = SINGLE) -> None:
        copies = {tensor: value.clone().contiguous() for tensor, value in tensors.items()}
        save_file(copies, self.path / name, {"format": "pt"})

    def add(self, **tensors: Tensor) -> None:
        """Add tensors; double underscores in names are dots."""
        self.save({**self.tensors, **{name.replace("__", "."): value for name, value in tensors.items()}})

    def rename(self, change: Callable[[str], str]) -> None:
        self.save({change(name): value for name, value in self.tensors.items()})

    def shards(self, *shards: dict[str, Tensor], index: dict[str, str] | None = None) -> None:
        """Replace the file by several, with an index that has the last place of each tensor."""
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        for name, shard in zip(names, shards, strict=True):
            self.save(shard, name)
        (self.path / SINGLE).unlink(missing_ok=True)
        (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index or weight_map}))


def write(path: Path, name: str, *changes: Callable[[Folder], None]) -> Path:
    """The folder of a model in a form."""
    saved = _saved(path.parent / "saved" / name, name)
    shutil.copytree(saved, path)
    for change in changes:
        change(Folder(path))
    return path


def _saved(path: Path, name: str) -> Path:
    if not path.exists():
        checkpoints.save_folder(path, model(name))
    return path


def random_head(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(7)) * 0.15).to(dtype)


def reference(path: Path) -> Any:
    """What transformers makes of a folder, float32. Fails if it makes up weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoConfig.from_pretrained(path).model_type
    loader = AutoModelForImageTextToText if kind in IMAGE_MODELS else AutoModelForCausalLM
    made, info = loader.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"], "no reference: transformers makes up weights"
    return made.eval()
