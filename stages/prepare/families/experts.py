"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss, GLM-4.5 and ERNIE 4.5."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import Experts
from pipeline.stages.prepare.families.architecture import (
    HfArchitecture,
    Window,
    renamed,
    window_everywhere,
    windows_by_pattern,
)
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import MAX_COUNT

NUM_EXPERTS = {"num_local_experts": "num_experts", "num_experts_per_token": "num_experts_per_tok"}
"""Files have either name; transformers writes the first since version 5."""


def experts_of(keys: Keys, inner_key: str, *, normalized: bool, **others: Any) -> dict[str, Any]:
    """The fields of a model whose layers all have experts, or those in `layers`."""
    experts = Experts(
        num=keys.count("num_experts"),
        num_per_token=keys.count("num_experts_per_tok"),
        intermediate_size=keys.count(inner_key),
        normalized=normalized,
        **others,
    )
    return {"experts": experts}


def sparse_layers(keys: Keys, model: ModelConfig) -> list[int] | None:
    """Qwen's rule: each `decoder_sparse_step`-th layer has experts, but not those in `mlp_only_layers`."""
    dense, step = keys.get("mlp_only_layers", list) or [], keys.count("decoder_sparse_step", 1)
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense):
        raise keys.fault("mlp_only_layers", "a list of numbers of layers")
    layers = [i for i in range(model.num_layers) if i not in dense and (i + 1) % step == 0]
    if not layers:
        raise keys.fault("decoder_sparse_step", "at most num_hidden_layers: no layer would have experts")
    return None if len(layers) == model.num_layers else layers


def _mixtral(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    return experts_of(keys, "intermediate_size", normalized=True)


def _mixtral_layout(model: ModelConfig) -> Layout:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    experts = {name: Piece(f"block_sparse_moe.experts.{{}}.{stored}") for name, stored in names.items()}
    return Layout(pieces=renamed(mlp__router="block_sparse_moe.gate"), experts=experts)


def _qwen2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    found = experts_of(
        keys,
        "moe_intermediate_size",
        normalized=keys.flag("norm_topk_prob"),
        shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
        layers=sparse_layers(keys, model),
    )
    return {**found, "qkv_bias": keys.flag("qkv_bias", True)}


def _qwen2_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """With `use_sliding_window`, the layers in `layer_types` or, if absent, each second one before
    `max_window_layers`."""
    keys = Keys(config, {}, {})
    if not keys.flag("use_sliding_window"):
        return None, None
    kinds = keys.layer_kinds(num_layers)
    if kinds is None:
        layers = list(range(0, min(keys.count("max_window_layers", 28, least=0), num_layers), 2))
    else:
        layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return (keys.count("sliding_window", 4096), layers) if layers else (None, None)


def _qwen3(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    normalized = keys.flag("norm_topk_prob")
    return experts_of(keys, "moe_intermediate_size", normalized=normalized, layers=sparse_layers(keys, model))


def _qwen3_windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """With `use_sliding_window`, all layers."""
    keys = Keys(config, {}, {})
    uses = keys.flag("use_sliding_window") and not ("sliding_window" in config and config["sliding_window"] is None)
    return (keys.count("sliding_window", 4096), None) if uses else (None, None)


def _gate_layout(model: ModelConfig) -> Layout:
    return Layout(pieces=renamed(mlp__router="mlp.gate"))


def _olmoe(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("clip_qkv", what="clipping queries, keys and values")
    return experts_of(keys, "intermediate_size", normalized=keys.flag("norm_topk_prob"))


def _gpt_oss(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    limit, alpha = keys.number("swiglu_limit", 7.0), keys.number("swiglu_alpha", 1.702)
    found = experts_of(keys, "intermediate_size", normalized=True, router_bias=True, bias=True)
    return {**found, "swiglu_alpha": alpha, "swiglu_limit": limit}


def _gpt_oss_layout(model: ModelConfig) -> Layout:
    """Tensors have all experts, [experts, inputs, outputs], and the outputs of gate and up alternate."""
    assert model.experts is not None
    inner, fused = model.experts.intermediate_size, "mlp.experts.gate_up_proj"
    experts = {
        "gate_proj": Piece(fused, inner, 0, 1, transposed=True, bare=True),
        "up_proj": Piece(fused, inner, 1, 2, transposed=True, bare=True),
        "down_proj": Piece("mlp.experts.down_proj", transposed=True, bare=True),
    }
    return Layout(experts=experts)


def _glm(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """The first layers are dense."""
    found = experts_of(
        keys,
        "moe_intermediate_size",
        scoring="sigmoid",
        normalized=keys.flag("norm_topk_prob"),
        scale=keys.number("routed_scaling_factor", 1.0),
        selection_bias=True,
        num_groups=keys.count("n_group"),
        groups_per_token=keys.count("topk_group"),
        shared_intermediate_size=_shared_size(keys, "n_shared_experts"),
        layers=layers_behind(keys, model, "first_k_dense_replace"),
    )
    return {**found, "qk_norm": keys.flag("use_qk_norm")}


def _shared_size(keys: Keys, key: str) -> int:
    """The size of the shared experts, of which `key` is the number: they are computed as one. Raises ConfigFault."""
    size, num = keys.count("moe_intermediate_size"), keys.count(key, least=0)
    if size > MAX_COUNT:
        raise keys.fault("moe_intermediate_size", f"an integer from 1 to {MAX_COUNT}")
    if size * num > MAX_COUNT:
        most = MAX_COUNT // size
        raise ConfigFault(
            f"{keys.name(key)} is {shown(num)}; it must be at most {most}, of moe_intermediate_size {size}"
        )
    return size * num


def layers_behind(keys: Keys, model: ModelConfig, key: str) -> list[int] | None:
    """All layers but the first, of which `key` is the number."""
    dense = keys.count(key, least=0)
    if dense >= model.num_layers:
        raise keys.fault(key, f"below num_hidden_layers = {model.num_layers}: no layer would have experts")
    return list(range(dense, model.num_layers)) if dense else None


SHARED = {f"mlp.shared_expert.{name}_proj": Piece(f"mlp.shared_experts.{name}_proj") for name in ("gate", "up", "down")}


def _glm_layout(model: ModelConfig) -> Layout:
    bias = {"mlp.selection": Piece("mlp.gate.e_score_correction", bare=True)}
    return Layout(pieces=renamed(mlp__router="mlp.gate") | bias | SHARED)


def _ernie(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """Each `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` has experts."""
    keys.refuse_unless("use_bias", False, what="a mixture of experts with biases")
    first, last = keys.count("moe_layer_start_index", least=0), keys.count("moe_layer_end_index", least=-1)
    step, end = keys.count("moe_layer_interval"), model.num_layers if last == -1 else last + 1
    layers = [i for i in range(first, min(end, model.num_layers)) if (i + 1) % step == 0]
    if not layers:
        raise ConfigFault(
            f"moe_layer_start_index is {shown(first)}; from there to moe_layer_end_index = {shown(last)} one of the "
            f"{model.num_layers} layers, counted from 1, must be a multiple of moe_layer_interval = {shown(step)}: no "
            "layer would have experts"
        )
    return experts_of(
        keys,
        "moe_intermediate_size",
        normalized=True,
        selection_bias=True,
        shared_intermediate_size=_shared_size(keys, "moe_num_shared_experts"),
        layers=None if len(layers) == model.num_layers else layers,
    )


def _ernie_layout(model: ModelConfig) -> Layout:
    bias = {"mlp.selection": Piece("mlp.moe_statics.e_score_correction", bare=True, as_row=True)}
    return Layout(pieces=renamed(mlp__router="mlp.gate") | bias | SHARED)


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NO_BIASES = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "mixtral": HfArchitecture(
        class_name="MixtralForCausalLM",
        aliases=NUM_EXPERTS,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        always=NO_BIASES,
        windows=window_everywhere,
        fields=_mixtral,
        layout=_mixtral_layout,
    ),
    "qwen2_moe": HfArchitecture(
        class_name="Qwen2MoeForCausalLM",
        models="Qwen1.5-MoE, Qwen2-MoE",
        aliases=NUM_EXPERTS,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        always={"out_bias": False, "mlp_bias": False},
        windows=_qwen2_windows,
        fields=_qwen2,
        layout=_gate_layout,
    ),
    "qwen3_moe": HfArchitecture(
        class_name="Qwen3MoeForCausalLM",
        models="Qwen3-MoE",
        aliases=NUM_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        always={"mlp_bias": False, "qk_norm": True},
        windows=_qwen3_windows,
        fields=_qwen3,
        layout=_gate_layout,
    ),
    "olmoe": HfArchitecture(
        class_name="OlmoeForCausalLM",
        models="OLMoE",
        aliases=NUM_EXPERTS,
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        always={"mlp_bias": False, "qk_norm": True, "qk_norm_kind": "all"},
        fields=_olmoe,
        layout=_gate_layout,
    ),
    "gpt_oss": HfArchitecture(
        class_name="GptOssForCausalLM",
        models="gpt-oss",
        aliases={**NUM_EXPERTS, "experts_per_token": "num_experts_per_tok"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": GPT_OSS_ROPE,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
        },
        always={"mlp_bias": False, "activation": "swiglu_oai", "sinks": True},
        windows=windows_by_pattern(2, 128),
        fields=_gpt_oss,
        layout=_gpt_oss_layout,
    ),
    "glm4_moe": HfArchitecture(
        class_name="Glm4MoeForCausalLM",
        models="GLM-4.5, 4.6, 4.7",
        aliases={"num_local_experts": "n_routed_experts"},
        keys={"num_experts": "n_routed_experts"},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        always={"out_bias": False, "mlp_bias": False},
        fields=_glm,
        layout=_glm_layout,
    ),
    "ernie4_5_moe": HfArchitecture(
        class_name="Ernie4_5_MoeForCausalLM",
        models="ERNIE 4.5 MoE",
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
        always={**NO_BIASES, "interleaved_rope": True},
        fields=_ernie,
        layout=_ernie_layout,
    ),
}
