"""Models of every architecture of .gguf files, saved as llama.cpp's converter does."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from tests.stages.execute import tiny_architectures
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.gguf import gemma4_keys

Array = np.ndarray[Any, Any]
Kind = gguf.GGMLQuantizationType
Conversion = Callable[[str, Array, Any], Array]

IDS = np.random.default_rng(0).integers(3, 600, 70).tolist()


def plain(name: str, data: Array, config: Any) -> Array:
    return data


def norms_plus_one(name: str, data: Array, config: Any) -> Array:
    return data + 1 if name.endswith("norm.weight") else data


def plus_one_in_layer_norms(name: str, data: Array, config: Any) -> Array:
    return data + 1 if name.endswith("norm.weight") else data


def permuted(name: str, data: Array, config: Any) -> Array:
    if "q_proj" in name:
        return checkpoints.permute(data, config.num_attention_heads)
    return checkpoints.permute(data, config.num_key_value_heads) if "k_proj" in name else data


def qkv_apart(name: str, data: Array, config: Any) -> Array:
    """From groups of query heads, a key head and a value head to all queries, all keys, all values."""
    if "query_key_value" not in name:
        return data
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    else:
        kv_heads = heads
    dim = config.hidden_size // heads
    groups = data.reshape(kv_heads, heads // kv_heads + 2, dim, *data.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])


def squeezed(name: str, data: Array, config: Any) -> Array:
    return data.squeeze()


def experts_apart(name: str, data: Array, config: Any) -> dict[str, Array]:
    """A tensor by the name that gguf-py knows. Gate and up of all experts are one in transformers, in gpt-oss row by
    row, and its matrices are transposed."""
    if name.endswith("e_score_correction_bias"):
        return {name.replace("_bias", ".bias").replace("gate.moe", "moe"): data.reshape(-1)}
    stem, _, last = name.rpartition(".")
    if last == "layer_scalar" or (config.model_type == "gemma4_text" and ".experts." in name):
        return {f"{name}.weight": data}
    if not stem.endswith("mlp.experts"):
        return {name: data}
    part, kind = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
    is_gpt_oss = config.model_type == "gpt_oss"
    if is_gpt_oss and kind == "weight":
        data = data.swapaxes(1, 2)
    if part == "down_proj":
        return {f"{stem}.down_proj.{kind}": data}
    half = data.shape[1] // 2
    gate, up = (data[:, ::2], data[:, 1::2]) if is_gpt_oss else (data[:, :half], data[:, half:])
    return {f"{stem}.gate_proj.{kind}": gate, f"{stem}.up_proj.{kind}": up}


def untransposed(name: str, data: Array, config: Any) -> Array:
    is_linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    return data.T.copy() if is_linear else data


@dataclass(frozen=True)
class Case:
    variant: str
    arch: gguf.MODEL_ARCH
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Keys without the architecture's name."""
    convert: Conversion = plain
    pre: str = "gpt-2"


A = gguf.MODEL_ARCH
EXPERTS = {"expert_count": 6, "expert_used_count": 3}
GLM_EXPERTS = {
    **EXPERTS,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
CASES = {
    "gemma": Case("gemma", A.GEMMA, convert=norms_plus_one),
    "gemma2": Case(
        "gemma2",
        A.GEMMA2,
        {"attention.sliding_window": 21, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        norms_plus_one,
    ),
    "gemma4": Case("gemma4", A.GEMMA4, gemma4_keys.SHARED_KV),
    "gemma4, dense": Case("gemma4, dense", A.GEMMA4, gemma4_keys.DENSE),
    "gemma4, experts": Case("gemma4, experts", A.GEMMA4, gemma4_keys.EXPERTS),
    "gemma3": Case("gemma3", A.GEMMA3, {"attention.sliding_window": 21}, norms_plus_one),
    "gemma3, linear rope": Case(
        "gemma3, linear rope",
        A.GEMMA3,
        {"attention.sliding_window": 21, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        norms_plus_one,
    ),
    "gemma3, other windows": Case(
        "gemma3",
        A.GEMMA3,
        {"attention.sliding_window": 21, "attention.sliding_window_pattern": [False, True, True, False, False, True]},
        norms_plus_one,
    ),
    "gemma3, each second layer": Case(
        "gemma3", A.GEMMA3, {"attention.sliding_window": 21, "attention.sliding_window_pattern": 2}, norms_plus_one
    ),
    "llama, yarn": Case(
        "llama, yarn",
        A.LLAMA,
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        permuted,
    ),
    "llama, linear rope": Case("llama, linear rope", A.LLAMA, {"rope.scaling.factor": 3.0}, permuted),
    "llama, linear rope by its old key": Case("llama, linear rope", A.LLAMA, {"rope.scale_linear": 3.0}, permuted),
    "phi2": Case("phi", A.PHI2),
    "phi3": Case("phi3", A.PHI3, {"attention.sliding_window": 21}),
    "phi3, longrope": Case(
        "phi3, long longrope",
        A.PHI3,
        {"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": (1 + np.log(64) / np.log(8)) ** 0.5},
    ),
    "chatglm": Case("glm", A.CHATGLM),
    "glm4": Case("glm4", A.GLM4),
    "olmo": Case("olmo", A.OLMO, convert=permuted),
    "olmo2": Case("olmo2", A.OLMO2),
    "olmo3": Case("olmo3, by pattern", A.OLMO2, {"attention.sliding_window": 21}),
    "olmo3, yarn": Case(
        "olmo3",
        A.OLMO2,
        {
            "attention.sliding_window": 21,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_attn_factor": 0.1 * math.log(4.0) + 1.0,
        },
    ),
    "ernie4_5": Case("ernie4_5", A.ERNIE4_5),
    "apertus": Case("apertus", A.APERTUS),
    "arcee": Case("arcee", A.ARCEE, convert=permuted),
    "smollm3": Case("smollm3", A.SMOLLM3, convert=permuted),
    "granite": Case(
        "granite",
        A.GRANITE,
        {"embedding_scale": 6.0, "logit_scale": 1.5, "residual_scale": 0.4, "attention.scale": 0.2},
        permuted,
    ),
    "seed_oss": Case("seed_oss", A.SEED_OSS),
    "exaone4": Case("exaone4, no windows", A.EXAONE4),
    "exaone4, windows": Case(
        "exaone4",
        A.EXAONE4,
        {"attention.sliding_window": 21, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "command-r": Case("cohere, no qk norm", A.COMMAND_R, {"logit_scale": 0.5}),
    "command-r with norms": Case("cohere", A.COMMAND_R, {"logit_scale": 0.0625}),
    "cohere2": Case("cohere2, by pattern", A.COHERE2, {"logit_scale": 0.0625, "attention.sliding_window": 21}),
    "starcoder2": Case("starcoder2, no window", A.STARCODER2),
    "stablelm": Case("stablelm", A.STABLELM),
    "stablelm, parallel": Case("stablelm, parallel", A.STABLELM),
    "nemotron": Case("nemotron", A.NEMOTRON, convert=plus_one_in_layer_norms),
    "gptneox": Case("gpt_neox", A.GPTNEOX, {"use_parallel_residual": True}, qkv_apart),
    "gpt2": Case("gpt2", A.GPT2, convert=untransposed),
    "starcoder": Case("gpt_bigcode", A.STARCODER, pre="starcoder"),
    "falcon 7b": Case("falcon 7b", A.FALCON, {"attention.head_count_kv": 1}, qkv_apart),
    "falcon 40b": Case("falcon 40b", A.FALCON, {"attention.head_count_kv": 2}, qkv_apart),
    "bloom": Case("bloom", A.BLOOM, convert=qkv_apart),
    "mixtral": Case("mixtral", A.LLAMA, {"expert_count": 5, "expert_used_count": 2}, permuted, "llama-bpe"),
    "mixtral, a tensor for each expert": Case(
        "mixtral", A.LLAMA, {"expert_count": 5, "expert_used_count": 2}, permuted, "llama-bpe"
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        A.QWEN2MOE,
        {**EXPERTS, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
        squeezed,
        "qwen2",
    ),
    "qwen3moe": Case("qwen3_moe", A.QWEN3MOE, {**EXPERTS, "expert_feed_forward_length": 32}, pre="qwen2"),
    "olmoe": Case("olmoe", A.OLMOE, EXPERTS, pre="olmo"),
    "glm4moe": Case("glm4_moe", A.GLM4_MOE, GLM_EXPERTS, pre="glm4"),
    "glm4moe, groups": Case(
        "glm4_moe, groups",
        A.GLM4_MOE,
        {**GLM_EXPERTS, "expert_group_count": 3, "expert_group_used_count": 2, "expert_shared_count": 2},
        pre="glm4",
    ),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        A.ERNIE4_5_MOE,
        {
            **EXPERTS,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
        },
    ),
    "gpt-oss": Case(
        "gpt_oss, each second layer",
        A.GPT_OSS,
        {
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "attention.sliding_window": 21,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        pre="gpt-4o",
    ),
    "mpt": Case("mpt", A.MPT, {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 0.0}),
}
GGUF_ONLY = {
    "exaone4, no windows": tiny_architectures.Variant(
        "exaone4", {"sliding_window": None, "layer_types": 3 * ["full_attention"]}
    ),
    "cohere2, by pattern": tiny_architectures.Variant(
        "cohere2", {"sliding_window": 21}, {**tiny_architectures.SIZES, "num_hidden_layers": 4}
    ),
    "olmo3, by pattern": tiny_architectures.Variant(
        "olmo3", {"sliding_window": 21}, {**tiny_architectures.SIZES, "num_hidden_layers": 4}
    ),
    "gpt_oss, each second layer": tiny_architectures.Variant(
        "gpt_oss", {**VARIANTS["gpt_oss"].changes, "swiglu_limit": 7.0}
    ),
    "starcoder2, no window": tiny_architectures.Variant("starcoder2"),
    "llama, yarn": tiny_architectures.Variant("llama", {"rope_parameters": tiny_architectures.YARN}),
    "llama, linear rope": tiny_architectures.Variant(
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}}
    ),
}


def by_expert(name: str, data: Array) -> dict[str, Array]:
    """A tensor for each expert, as before llama.cpp stacked them."""
    if "_exps." not in name:
        return {name: data}
    return {name.replace("_exps", f".{number}"): matrix for number, matrix in enumerate(data)}


def rope_factors(case: Case, rope: Mapping[str, Any]) -> dict[str, Array]:
    """The tensors of a rotary embedding, by their names."""
    if case.arch == A.GEMMA4:
        return {"rope_freqs.weight": gemma4_keys.divisors(case.metadata, rope["partial_rotary_factor"])}
    kinds = ("long", "short") if "longrope" in case.variant else ()
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}


def save(
    path: Path,
    model: Any,
    case: Case,
    blocks: Mapping[str, tuple[Array, Any]] = {},
    *,
    has_expert_tensors: bool = False,
) -> Path:
    """Write a file. `blocks` are tensors instead of the model's or beside them, and their types, by their names in the
    file. `has_expert_tensors`: each expert has its own."""
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4: that of layers with a window
    name = gguf.MODEL_ARCH_NAMES[case.arch]

    def size(*names: str) -> int:
        return int(next(getattr(config, one) for one in names if getattr(config, one, None) is not None))

    heads, layers = size("num_attention_heads", "n_head", "n_heads"), size("num_hidden_layers", "n_layer", "n_layers")
    hidden = size("hidden_size", "n_embd", "d_model")
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer = gguf.GGUFWriter(path, name)
    is_bloom = case.arch == A.BLOOM  # it has no limit
    writer.add_context_length(2048 if is_bloom else size("max_position_embeddings", "n_positions", "max_seq_len"))
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    own_size = None if case.arch == A.FALCON else getattr(config, "intermediate_size", None)
    writer.add_feed_forward_length(own_size or 4 * hidden)
    writer.add_head_count(heads)
    eps_keys = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps_values = [getattr(config, key) for key in eps_keys if getattr(config, key, None) is not None]
    eps = eps_values[0] if eps_values else 1e-5  # OLMo's config has none
    is_rms = GGUF_ARCHITECTURES[name].eps.endswith("rms_epsilon")
    (writer.add_layer_norm_rms_eps if is_rms else writer.add_layer_norm_eps)(eps)
    values: dict[str, Any] = {"attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads}
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        values["rope.freq_base"] = float(rope["rope_theta"])
        values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if head_dim * heads != hidden:
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for key, value in {**values, **gemma4_keys.xielu_keys(model), **case.metadata}.items():
        add: dict[type, Any] = {
            str: writer.add_string,
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add[type(value) if not isinstance(value, np.floating) else float](
            key if key.startswith(("tokenizer.", "xielu.")) else f"{name}.{key}", value
        )
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), case.pre, config.vocab_size)
    names = gguf.get_tensor_name_map(case.arch, layers)
    tensors = {
        name: part
        for original, tensor in model.state_dict().items()
        for name, part in experts_apart(original, tensor.float().numpy(), config).items()
    }
    for tensor_name, data in tensors.items():
        if (tensor_name == "lm_head.weight" and config.tie_word_embeddings) or ".act_fn." in tensor_name:
            continue
        if whole := gemma4_keys.WHOLE_NAMES.get(tensor_name.split(".", 3)[-1]):
            writer.add_tensor(f"blk.{tensor_name.split('.')[2]}.{whole}", data)
            continue
        short = tensor_name.removeprefix("transformer.")  # as BLOOM's tensors are named on the hub
        found = names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))
        found = found or names.get_name(short, try_suffixes=(".weight", ".bias"))
        found = found or (tensor_name if tensor_name.startswith("cls.output") else None)
        assert found is not None, tensor_name
        if case.variant == "falcon 40b":  # the converter swaps the names
            swapped = {"ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"}
            for theirs, ours in swapped.items():
                if f".{theirs}." in tensor_name:
                    found = f"{found.rsplit('.', 2)[0]}.{ours}.{tensor_name.rsplit('.', 1)[1]}"
        if found in blocks:
            continue
        made = np.ascontiguousarray(case.convert(tensor_name, data, config))
        parts = by_expert(found, made) if has_expert_tensors else {found: made}
        for part_name, part in parts.items():
            writer.add_tensor(part_name, part)
    for block_name, (stored, kind) in blocks.items():
        writer.add_tensor(block_name, stored, raw_dtype=kind)
    for factors_name, factors in rope_factors(case, rope).items():
        writer.add_tensor(factors_name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def original(name: str, case: Case) -> Any:
    """The original model of a case, with matrices in bfloat16 as they are kept."""
    variant = GGUF_ONLY.get(case.variant) or VARIANTS[case.variant]
    if name == "smollm3":  # files don't say which layers have no rotary embedding; llama.cpp takes each fourth
        variant = tiny_architectures.Variant("smollm3", {}, {**tiny_architectures.SIZES, "num_hidden_layers": 4})
    if name.startswith(("gemma2", "gemma3")):  # the same for windows and scales
        layers = {"gemma2": 3, "gemma3": 6}[name[:6]]
        changes = {key: value for key, value in variant.changes.items() if key != "layer_types"}
        sizes = {**variant.sizes, "num_hidden_layers": layers, "query_pre_attn_scalar": variant.sizes["head_dim"]}
        if (pattern := case.metadata.get("attention.sliding_window_pattern")) is not None:
            has_window = pattern if isinstance(pattern, list) else [i % pattern < pattern - 1 for i in range(layers)]
            changes["layer_types"] = [("sliding" if yes else "full") + "_attention" for yes in has_window]
        variant = tiny_architectures.Variant(variant.kind, changes, sizes)
    model = tiny_architectures.make(variant)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in parameter_name:
                parameter.copy_(parameter.bfloat16())
    return model


def saved(folder: Path, name: str) -> tuple[Path, Any]:
    """The file of a case, and its original model."""
    model = original(name, CASES[name])
    return save(folder / "tiny.gguf", model, CASES[name], has_expert_tensors="each expert" in name), model
