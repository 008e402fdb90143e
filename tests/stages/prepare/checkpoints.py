"""Tiny models to prepare: Hugging Face folders by transformers, .gguf files by the gguf package, wheels by zipfile."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import format_key
from pipeline.stages.execute.weights import TensorFile

TEXTS = (
    "The quick brown fox, 12 345 dogs.\n\n  It's 7 o'clock;\tdon't we've I'LL HE'S\r\n",
    "x = [1, 2,  3]\n    if x:\n\n        return 42  # naïve Straße ÉCOLE",
    "漢字と仮名 1２٣ 🙂🙃 a\u200bb\u00a0c  ",
    "<s>user\nhello</s> <tool> <s><s>",
    "",
    "   ",
)


def train_tokenizer(pre: Any) -> Tokenizer:
    """A byte-level BPE with merges, some over digits and spaces, so that wrong splits are detected."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS[:3]] * 8, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    return train_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 608,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def tiny_mistral(**changes: Any) -> MistralForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 608,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
    }
    return MistralForCausalLM(MistralConfig(**{**settings, **changes})).eval()


def tiny(model_type: str, **changes: Any) -> Any:
    """A tiny model of any architecture, with norms and biases different from their initial values."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 608,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
    return model.eval()


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model of transformers weights with which what it computes differs enough to detect errors."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() or ".ln_" in name
            if parameter.dim() > 1 and not is_norm:
                parameter.normal_(0, 0.15)
            else:
                # With norms of all ones and biases of all zeros, a test would pass even if they were not read.
                parameter.add_(torch.randn_like(parameter) * (0.1 if is_norm else 0.5))


def save_folder(
    folder: Path,
    model: Any,
    *,
    shard_size: str = "5GB",
    tokenizer_config: Mapping[str, Any] | None = None,
    add_bos: bool = False,
) -> Path:
    """A Hugging Face folder with a tokenizer."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer = byte_level()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **(tokenizer_config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a config.json; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def permute(weight: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """The order of the rows of q and k in llama.cpp."""
    shape = (num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def save_gguf(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    tokenizer: Tokenizer | None = None,
    pre: str = "gpt-2",
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    blocks: Mapping[str, tuple["np.ndarray[Any, Any]", gguf.GGMLQuantizationType]] | None = None,
    extra_tensors: Mapping[str, "np.ndarray[Any, Any]"] | None = None,
    without: str = "",
    chat_template: str = "{{ messages }}",
    alignment: int = 32,
    tensors_per_file: int = 0,
) -> Path:
    """A .gguf file as llama.cpp's converter writes it; matrices are stored as `kind`.

    With `tensors_per_file` it writes parts (NAME-00001-of-00003.gguf, …) instead of `path`.
    `blocks` replaces the content and the kind of some tensors, with the rows of q and k in the order of the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_chat_template(chat_template)
    _add_vocabulary(writer, tokenizer or byte_level(), pre, config.vocab_size)
    for key, value in (metadata or {}).items():
        add: dict[type, Callable[[str, Any], None]] = {
            str: writer.add_string,
            bytes: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        writer.kv_data[0].pop(key, None)
        add[type(value)](key, value)
    for name, tensor in model.state_dict().items():
        if name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if blocks is not None and name in blocks:
            data, own_kind = blocks[name]
            writer.add_tensor(gguf_name(name), data, raw_dtype=own_kind)
            continue
        weight = tensor.float().numpy()
        if "q_proj" in name and architecture == "llama":
            weight = permute(weight, config.num_attention_heads)
        if "k_proj" in name and architecture == "llama":
            weight = permute(weight, config.num_key_value_heads)
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str, size: int) -> None:
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 5 if token.startswith("[PAD") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def weight_files(folder: Path) -> list[TensorFile]:
    """The files of a prepared folder, as the executor reads them."""
    return [TensorFile(path) for path in ModelConfig.load(folder).weight_paths(folder)]


def formats_of(folder: Path) -> dict[str, str]:
    """The format of each tensor in a prepared folder."""
    return {
        name: FLOATS.get(entry.dtype) or file.metadata[format_key(name)]
        for file in weight_files(folder)
        for name, entry in file.entries.items()
    }


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a prepared folder, quantized ones as uint8."""
    found = {}
    for file in weight_files(folder):
        for name, entry in file.entries.items():
            dtype = DTYPES[entry.dtype]
            array = file.array(name, np.dtype(f"<i{dtype.itemsize}")).copy()
            found[name] = torch.from_numpy(array).view(dtype)
    return found


def save_wheel(folder: Path, files: Mapping[str, bytes | Path], name: str = "tiny-model", version: str = "1.0") -> str:
    """A wheel that pip accepts, in `folder`. Returns its sha256."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content.read_bytes() if isinstance(content, Path) else content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()
