"""Synthetic models: random weights in a folder or directly in GPU memory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from pipeline.kernels.matrix import Matrix
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.weights import Weights
from tools.gpu_check import gpu

Shape = tuple[int, ...]


def tensors_of(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of a Llama's tensors, with Hugging Face's names."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def write_weights(folder: Path, config: ModelConfig, seed: int) -> None:
    """Write model.safetensors in bfloat16. Matrices preserve the scale of their inputs. Norm weights differ from 1, so
    that a test notices if they are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensors_of(config).items():
        numbers = torch.randn(shape, generator=generator)
        match shape:
            case [_]:
                numbers = 1 + 0.1 * numbers
            case [_, columns] if name != "model.embed_tokens.weight" or config.tie_embeddings:
                numbers *= columns**-0.5
        tensors[name] = numbers.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_prepared(folder: Path, config: ModelConfig, seed: int) -> ModelConfig:
    """Write a folder like prepare's, without the tokenizer. Returns the config in its model.json."""
    import msgspec

    folder.mkdir(parents=True, exist_ok=True)
    config = msgspec.structs.replace(config, weight_files=["model.safetensors"])
    write_weights(folder, config, seed)
    config.save(folder)
    return config


def transformers_sizes(config: ModelConfig) -> dict[str, Any]:
    """The fields of a transformers config for these sizes."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_checkpoint(folder: Path, config: ModelConfig, seed: int) -> None:
    """Write a folder like those on the Hugging Face hub, for a server to prepare."""
    from transformers import LlamaConfig

    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder, config, seed)
    more = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    LlamaConfig(**transformers_sizes(config), **more).save_pretrained(folder)
    synthetic_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))


def prepared_mixture(folder: Path, config: ModelConfig, seed: int) -> Path:
    """A prepared folder of a Mixtral with 4 experts, 2 of which compute a token, and the sizes of `config`."""
    import msgspec
    from transformers import MixtralConfig, MixtralForCausalLM

    from pipeline.config.settings import Settings
    from pipeline.stages.prepare.stage import prepare

    source = folder / "source"
    config = msgspec.structs.replace(config, vocab_size=max(256, config.vocab_size))  # the tokenizer has all bytes
    torch.manual_seed(seed)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.1}
    MixtralForCausalLM(MixtralConfig(**transformers_sizes(config), **experts)).save_pretrained(source)
    synthetic_tokenizer(config.vocab_size).save(str(source / "tokenizer.json"))
    settings = msgspec.structs.replace(Settings(), model=str(source), cache_dir=str(folder / "cache"))
    return prepare(settings)


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Write a LoRA adapter of every matrix of a Llama's layers, in PEFT's format."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    targets: dict[str, None] = {}
    for name, shape in tensors_of(config).items():
        if name.endswith("proj.weight"):
            module = name.removesuffix(".weight")
            targets[module.rpartition(".")[2]] = None
            # About a fifth of the weight's own numbers.
            a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            b = torch.randn(shape[0], rank, generator=generator) * 0.1 * rank**-0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config_of_peft = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config_of_peft))
    return folder


def write_eagle_head(folder: Path, config: ModelConfig, seed: int) -> None:
    """Write a random EAGLE head for a Llama, as vLLM reads it."""
    folder.mkdir(parents=True)
    hidden = config.hidden_size
    kind = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}
    head = {**transformers_sizes(config), **kind, "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(head))
    generator = torch.Generator().manual_seed(seed)
    begin = "model.layers.0."
    shapes = {name.removeprefix("model."): shape for name, shape in tensors_of(config).items() if begin in name}
    # The first layer's input is normed already.
    del shapes["layers.0.input_layernorm.weight"]
    tensors = {"fc.weight": torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * numbers if len(shape) == 1 else numbers * shape[1] ** -0.5
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")


def synthetic_tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of `size` tokens, each of which decodes to text: all bytes, then strings of letters,
    shortest first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    assert len(vocabulary) <= size, f"a byte-level tokenizer has at least {len(vocabulary)} tokens"
    merges: list[tuple[str, str]] = []
    heads = letters
    while len(vocabulary) < size:
        longer = []
        for head in heads:
            for letter in letters:
                if len(vocabulary) < size:
                    merges.append((head, letter))
                    vocabulary[head + letter] = len(vocabulary)
                    longer.append(head + letter)
        heads = longer
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class WeightsOnDevice(Weights):
    """Random weights in GPU memory, for models whose weights would take minutes to read.

    The duration of a step does not depend on the values, except for values that a chip computes faster, such as zeros.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> None:
        """`config` names no weight files. `dtype` is bfloat16 or float32."""
        assert not config.weight_files
        super().__init__(Path(config.name), config, "f32" if dtype == torch.float32 else "bf16")
        self._dtype = dtype
        self._generator = torch.Generator(gpu.device()).manual_seed(seed)

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """A new random matrix for each call, [rows, columns]."""
        numbers = torch.empty(rows, columns, dtype=self._dtype, device=gpu.device())
        # The variance keeps the scale of outputs equal to that of inputs.
        most = (3.0 / columns) ** 0.5
        numbers.uniform_(-most, most, generator=self._generator)
        self.taken[self._float_format] = None
        return Matrix(self._float_format, numbers, rows, columns)

    def vector(self, name: str, size: int) -> Tensor:
        """Ones, [size] float32."""
        return torch.ones(size)
