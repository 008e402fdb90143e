"""The measured model in both forms: the .gguf file, and its weights in bfloat16 as a folder in Hugging Face layout."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Llama3Rope
from pipeline.stages.prepare.stage import gguf_file, prepare

NAME = "model"
"""The name under which the servers serve it."""


class ModelPaths(msgspec.Struct, frozen=True):
    """Where the forms are, inside the output folder."""

    gguf: Path
    folder: Path

    @classmethod
    def below(cls, out: Path) -> "ModelPaths":
        return cls(out / "model" / "model.gguf", out / "model" / "bf16")


def weights_of(gguf: Path) -> str:
    """The weights' format for labels, from the file's name: Q4_1 for model-Q4_1.gguf."""
    match = re.search(r"[.\-_]((?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32))$", gguf.stem, re.IGNORECASE)
    return match[1].upper() if match else "GGUF"


def make_gguf(model: str, paths: ModelPaths) -> Path:
    """Link `paths.gguf` to the model's .gguf file, and return that file. Raises UserError if the model has none."""
    file = gguf_file(Settings(model=model))
    paths.gguf.parent.mkdir(parents=True, exist_ok=True)
    _link(paths.gguf, file)
    return file


def make_folder(model: str, paths: ModelPaths) -> None:
    """Write `paths.folder`: links to the tokenizer and the weights that prepare makes with `quantization = "none"`, and
    the config and the chat template for transformers. Raises UserError if the architecture is not Llama."""
    source = prepare(Settings(model=model, quantization="none"))
    config = ModelConfig.load(source)
    paths.folder.mkdir(parents=True, exist_ok=True)
    (weights,) = config.weight_paths(source)
    _link(paths.folder / "model.safetensors", weights)
    _link(paths.folder / "tokenizer.json", source / "tokenizer.json")
    _write(paths.folder / "config.json", _config_json(config))
    _write(paths.folder / "tokenizer_config.json", _tokenizer_config(config, source))


def _config_json(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if (
        config.architecture != "llama"
        or config.sliding_window is not None
        or not isinstance(scaling, Llama3Rope | None)
    ):
        raise UserError(
            f"vLLM can't be compared: this tool writes no config.json for {config.architecture}, or for sliding "
            "windows; leave vllm out of --servers"
        )
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": config.eos_ids[0] if len(config.eos_ids) == 1 else config.eos_ids,
        "bos_token_id": config.bos_id,
    }
    if scaling is not None:
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    return found


def _tokenizer_config(config: ModelConfig, source: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokenizer.id_to_token(config.eos_ids[0]),
    }
    if config.bos_id is not None:
        found["bos_token"] = tokenizer.id_to_token(config.bos_id)
    template = source / "chat_template.jinja"
    if template.is_file():
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
