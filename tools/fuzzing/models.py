"""Small valid models to mutate: folders in Hugging Face layout and .gguf files, made without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.gguf.tensor_names import gguf_name
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.weights.tensors import expected_shapes

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
PLAIN = {**CONFIG, "attention_bias": False, "num_hidden_layers": 1}
GPTQ = {**PLAIN, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}}
NF4 = {
    **PLAIN,
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
MODERN_BERT = {
    "model_type": "modernbert",
    "architectures": ["ModernBertModel"],
    **{key: CONFIG[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "local_attention": 12,
    "norm_eps": 1e-5,
    "matryoshka_dimensions": [4, 8],
}
LABELS = {"architectures": ["ModernBertForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
MODULES = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
        )
    ],
    "config_sentence_transformers.json": {"prompts": {"query": "search: "}, "default_prompt_name": "query"},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.Tanh"},
}
"""Files of sentence-transformers."""
TOKENIZER_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ x }}"}],
}

Packer = Callable[[tuple[int, ...], np.random.Generator], dict[str, "np.ndarray[Any, Any]"]]
"""The tensors of a module with a weight of some shape, by the last parts of their names."""


def build(folder: Path) -> list[Path]:
    """The models: each is a folder or a .gguf file below `folder`."""
    made = [_folder(folder / "llama", CONFIG, shards=1), _folder(folder / "qwen3", QWEN, shards=2)]
    made += [_quantized(folder / "gptq", GPTQ, _gptq), _quantized(folder / "nf4", NF4, _nf4)]
    made += [_embedder(folder / "embedder"), _classifier(folder / "classifier")]
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
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file(
            {name: weights[name].astype(np.float16) for name in weights if weight_map[name] == shard}, folder / shard
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _embedder(folder: Path) -> Path:
    _folder(folder, MODERN_BERT, shards=1)
    for name, content in MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    dense = {"linear.weight": np.ones((8, 32), np.float32), "linear.bias": np.ones(8, np.float32)}
    save_file(dense, folder / "2_Dense/model.safetensors")
    return folder


def _classifier(folder: Path) -> Path:
    _folder(folder, {**MODERN_BERT, **LABELS, "matryoshka_dimensions": None}, shards=1)
    shapes = {"head.dense.weight": (32, 32), "head.norm.weight": (32,), "classifier.weight": (2, 32)}
    head = {name: np.ones(shape, np.float32) for name, shape in {**shapes, "classifier.bias": (2,)}.items()}
    save_file({**_weights(_read(MODERN_BERT)), **head}, folder / "model.safetensors", {"format": "pt"})
    return folder


def _quantized(folder: Path, config: dict[str, Any], pack: Packer) -> Path:
    """A folder whose layers are packed."""
    _folder(folder, config, shards=1)
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, shape in expected_shapes(_read(config)).items():
        module = name.removesuffix(".weight")
        packed = pack(shape, rng) if module.endswith("_proj") else {"weight": rng.random(shape, np.float32)}
        tensors |= {f"{module}.{part}": array for part, array in packed.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _gptq(shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, "np.ndarray[Any, Any]"]:
    """Random codes in two groups of mixed columns."""
    num_rows, num_columns = shape
    return {
        "qweight": rng.integers(-(2**31), 2**31, (num_columns // 8, num_rows), np.int32),
        "qzeros": rng.integers(-(2**31), 2**31, (2, num_rows // 8), np.int32),
        "scales": rng.random((2, num_rows), np.float32).astype(np.float16),
        "g_idx": rng.permutation(num_columns).astype(np.int32) // (num_columns // 2),
    }


def _nf4(shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, "np.ndarray[Any, Any]"]:
    num = shape[0] * shape[1]
    state = {"quant_type": "nf4", "blocksize": 64, "shape": shape, "nested_blocksize": 256, "nested_offset": 0.5}
    return {
        "weight": rng.integers(0, 256, (num // 2, 1), np.uint8),
        "weight.absmax": rng.integers(0, 256, num // 64, np.uint8),
        "weight.quant_map": rng.random(16, np.float32),
        "weight.nested_absmax": rng.random(-(-num // 64 // 256) or 1, np.float32),
        "weight.nested_quant_map": rng.random(256, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


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
