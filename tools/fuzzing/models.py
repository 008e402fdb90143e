"""Small valid models to mutate: folders in Hugging Face layout and .gguf files, made without torch."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.prepare.gguf.model import gguf_name
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.tensors import expected_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
QWEN = {
    **CONFIG,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "use_sliding_window": True,
    "sliding_window": 32,
    "layer_types": ["full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
    "rope_scaling": None,
}
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ x }}"}],
}


def build(folder: Path) -> list[Path]:
    """The models: each is a folder or a .gguf file below `folder`."""
    made = [_folder(folder / "llama", CONFIG, shards=1), _folder(folder / "qwen3", QWEN, shards=2)]
    made.append(_gguf(folder / "plain.gguf", gguf.GGMLQuantizationType.F32, "gpt2"))
    made.append(_gguf(folder / "blocks.gguf", gguf.GGMLQuantizationType.Q8_0, "llama"))
    return made


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", "<end>", *alphabet, "an", "ana"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "n"), ("an", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="<unk>")
    tokenizer.enable_truncation(max_length=64)
    return tokenizer


def _weights(config: ModelConfig) -> dict[str, "np.ndarray[Any, Any]"]:
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in expected_shapes(config).items()}


def _read(config: dict[str, Any]) -> ModelConfig:
    return ConfigReader(Path("config.json"), config).model("tiny", [], {})


def _folder(folder: Path, config: dict[str, Any], shards: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    _tokenizer().save(str(folder / "tokenizer.json"))
    weights = _weights(_read(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(weights)}
    for shard in set(places.values()):
        save_file({name: weights[name].astype(np.float16) for name in weights if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _gguf(path: Path, kind: gguf.GGMLQuantizationType, tokenizer: str) -> Path:
    config = _read(CONFIG)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_custom_alignment(64)
    writer.add_chat_template("{{ messages }}")
    vocab = _tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([3 if token.startswith("<") else 1 for token in tokens])
    writer.add_token_merges(["a n", "an a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, array in _weights(config).items():
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
