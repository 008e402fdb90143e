"""Gemma 4's .gguf files: layers of different sizes, and layers that read the keys and values of others."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import ProportionalRope, Rope
from pipeline.runtime.model.special_layers import Experts, OtherHeads, PerLayerInputs
from pipeline.stages.prepare.gguf.architecture import GgufArchitecture, GgufKeys, experts_of
from pipeline.stages.prepare.gguf.file import GgufTensor
from pipeline.stages.prepare.gguf.ropes import LINEAR, LONGROPE, YARN, read_scaling
from pipeline.stages.prepare.sources.source import ModelError

NEVER = 1e30
"""The divisor of frequencies of pairs that don't rotate."""
OWN_KV = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


def _read(keys: GgufKeys, model: ModelConfig) -> dict[str, Any]:
    """The heads of the keys without `_swa` are those of layers without a window."""
    metadata, name, num_layers = keys.metadata, keys.architecture, model.num_layers
    window = keys.count("attention.sliding_window")
    windowed = [] if window is None else keys.windowed_layers(None) or []
    full = [i for i in range(num_layers) if i not in windowed]
    read_scaling(metadata, name, model.max_position, refused=(LINEAR, YARN, LONGROPE))
    kv_heads = _of_each_layer(keys, "attention.head_count_kv")
    inner = _of_each_layer(keys, "feed_forward_length")
    head_dim = keys.count("attention.key_length_swa") or model.head_dim
    metadata.refuse_unless(f"{name}.attention.value_length_swa", head_dim, "a value size other than the key size")
    num_kv_heads = _only(keys, "attention.head_count_kv", [kv_heads[i] for i in windowed or full])
    other_heads = None
    if full and windowed:
        same = f"blk.{full[0]}.attn_v.weight" not in keys.tensors
        num_full = _only(keys, "attention.head_count_kv", [kv_heads[i] for i in full])
        if same or (num_full, model.head_dim) != (num_kv_heads, head_dim):
            other_heads = OtherHeads(layers=full, num_kv_heads=num_full, head_dim=model.head_dim, values_are_keys=same)
    num_shared = metadata.get(f"{name}.attention.shared_kv_layers", int, 0)
    first = num_layers - num_shared
    kinds = [i in windowed for i in range(num_layers)]
    if num_shared and (first < 1 or num_shared < 0 or set(kinds[first:]) - set(kinds[:first])):
        raise ModelError(
            f"{metadata.path}: {name}.attention.shared_kv_layers is {num_shared}; each of these layers must have "
            "one of its kind before all of them"
        )
    size, table = keys.count("embedding_length_per_layer_input"), keys.tensors.get("per_layer_token_embd.weight")
    return {
        "head_dim": head_dim if windowed else model.head_dim,
        "num_kv_heads": num_kv_heads,
        "other_heads": other_heads,
        "first_shared_kv_layer": first if num_shared else None,
        "intermediate_size": inner[0],
        "intermediate_sizes": inner if len(set(inner)) > 1 else None,
        "sliding_window": window if windowed else None,
        "sliding_layers": windowed or None,
        "rope_theta": keys.number("rope.freq_base", 1e6),
        "sliding_rope": Rope(keys.number("rope.freq_base_swa", 1e4) or 1e4) if windowed else None,
        "embedding_scale": model.hidden_size**0.5,
        "logit_softcap": keys.number("final_logit_softcapping"),
        "layer_scales": "blk.0.layer_output_scale.weight" in keys.tensors,
        "per_layer_inputs": PerLayerInputs(size=size, vocab_size=table.shape[0]) if size and table else None,
        "experts": _experts(keys, model),
    }


def _experts(keys: GgufKeys, model: ModelConfig) -> Experts | None:
    experts = experts_of(keys, model, normalized=True)
    if experts is None:
        return None
    first = 0 if experts.layers is None else experts.layers[0]
    factors = f"blk.{first}.{WHOLE_NAMES['mlp.expert_factors.weight']}" in keys.tensors
    return msgspec.structs.replace(experts, beside_dense=True, router_norm=True, factors=factors)


def _of_each_layer(keys: GgufKeys, key: str) -> list[int]:
    """An integer that a file has once, or for each layer."""
    name = f"{keys.architecture}.{key}"
    if isinstance(value := keys.metadata.get(name, (int, list)), list):
        found = keys.metadata.list_of(name, int) or []
        if len(found) == keys.num_layers and min(found) > 0:
            return found
    elif value is not None and value > 0:
        return [int(value)] * keys.num_layers
    raise ModelError(
        f"{keys.metadata.path}: {name} is {value}; it must be a positive integer, or one for each of "
        f"{keys.num_layers} layers"
    )


def _only(keys: GgufKeys, key: str, found: list[int]) -> int:
    if len(set(found)) > 1:
        raise ModelError(
            f"{keys.metadata.path}: {keys.architecture}.{key} is {found} in layers of one kind: not supported"
        )
    return found[0]


def with_proportional_rope(config: ModelConfig, tensor: GgufTensor, path: Path) -> ModelConfig:
    """The config with the rotary embedding of layers without a window: the divisors of the first pairs are 1, and those
    of the others so large that they don't rotate. Raises ModelError for other divisors."""
    half = max(heads.dim for heads in config.all_heads) // 2
    factors = tensor.data.view("<f4") if tensor.kind == gguf.GGMLQuantizationType.F32 else np.zeros(0, np.float32)
    num = int(np.count_nonzero(factors == 1))
    if factors.shape != (half,) or not num or (factors[:num] != 1).any() or (factors[num:] < NEVER / 2).any():
        raise ModelError(f"{path}: tensor {tensor.name} must be F32 of {half} numbers, ones and then {NEVER:g}")
    if num == half:
        return config
    return msgspec.structs.replace(config, rope_scaling=ProportionalRope(part=num / half))


def drop_unused(tensors: dict[str, GgufTensor], config: ModelConfig) -> list[str]:
    """Remove the keys and values of layers that read those of others, which some files have. Returns lines about
    them."""
    readers = [i for i in range(config.num_layers) if config.kv_source(i) != i]
    unused = [name for i in readers for part in OWN_KV if (name := f"blk.{i}.{part}") in tensors]
    for name in unused:
        del tensors[name]
    more = f" and {len(unused) - 1} more" if unused[1:] else ""
    return [f"ignored {unused[0]!r}{more}: the layer reads the keys and values of another"] if unused else []


LAYER_NAMES = {
    "layer_output_scale": "layer_scale",
    "inp_gate": "per_layer.gate_proj",
    "proj": "per_layer.out_proj",
    "post_norm": "per_layer.post_norm",
    "pre_ffw_norm_2": "mlp.experts_norm",
    "post_ffw_norm_2": "mlp.experts_post_norm",
    "post_ffw_norm_1": "mlp.dense_post_norm",
}
WHOLE_NAMES = {
    "mlp.router_norm.weight": "ffn_gate_inp.scale",
    "mlp.expert_factors.weight": "ffn_down_exps.scale",
}
NAMES = {
    "per_layer_token_embd": "model.per_layer_embeddings",
    "per_layer_model_proj": "model.per_layer_projection",
    "per_layer_proj_norm": "model.per_layer_norm",
}
ARCHITECTURES = {
    "gemma4": GgufArchitecture(
        models="Gemma 4",
        model_type="gemma4_text",
        always={
            "activation": "gelu_tanh",
            "post_norms": True,
            "qk_norm": True,
            "value_norm": True,
            "query_scale": 1.0,
        },
        read=_read,
        reads_windows=True,
        reads_scaling=True,
        reads_sizes=True,
        reads_experts=True,
    ),
}
