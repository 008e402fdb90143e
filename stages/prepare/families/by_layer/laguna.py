"""Laguna: mixtures of experts whose layers have different numbers of query heads."""

from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.rope import Rope
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window, renamed
from pipeline.stages.prepare.families.experts import experts_of
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.families.ropes import PART, rope_of
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import as_float

GATINGS = {True: "per-head", False: "per-element"}
"""Names of values of `gating`."""
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, PART: 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, PART: 1.0},
}


def _windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """The layers in `layer_types`; by default none."""
    keys = Keys(config, {}, {})
    kinds = keys.layer_kinds(num_layers) or []
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    return (keys.count("sliding_window", 512), layers) if layers else (None, None)


def _fields(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("moe_apply_router_weight_on_input", False, what="a weight of the input of experts")
    gating = keys.get("gating", str)
    if gating not in GATINGS.values():
        raise keys.fault("gating", 'true, "per-head" or "per-element"')
    if model.qkv_bias and gating == GATINGS[False]:
        raise ConfigFault("attention_bias is true: biases are not supported with gating per element")
    return {
        **experts_of(
            keys,
            "moe_intermediate_size",
            scoring="sigmoid",
            normalized=True,
            selection_bias=True,
            scale=keys.number("moe_routed_scaling_factor", 1.0),
            softcap=keys.number("moe_router_logit_softcapping", 0.0),
            shared_intermediate_size=keys.count("shared_expert_intermediate_size"),
            layers=_sparse_layers(keys, model),
        ),
        "gate_per_head": gating == GATINGS[True],
        "query_heads": _query_heads(keys, model),
        "sliding_rope": _sliding_rope(keys, model),
    }


def _with_named_gating(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with a name for `gating`, which is true by default."""
    gating = config.get("gating", True)
    return {**config, "gating": GATINGS[gating] if isinstance(gating, bool) else gating}


def _query_heads(keys: Keys, model: ModelConfig) -> list[int] | None:
    heads = keys.get("num_attention_heads_per_layer", list)
    if heads is None or heads == [model.num_heads] * model.num_layers:
        return None
    numbers = [num for num in heads if isinstance(num, int) and not isinstance(num, bool)]
    is_valid = all(0 < num <= MAX_HEADS and num % model.num_kv_heads == 0 for num in numbers)
    if len(numbers) != model.num_layers or len(heads) != model.num_layers or not is_valid:
        raise keys.fault(
            "num_attention_heads_per_layer",
            f"a list of num_hidden_layers = {model.num_layers} multiples of num_key_value_heads = "
            f"{model.num_kv_heads}, each at most {MAX_HEADS}",
        )
    return list(numbers)


def _sparse_layers(keys: Keys, model: ModelConfig) -> list[int] | None:
    """The layers with experts: those in `mlp_layer_types`, by default all but the first."""
    kinds = keys.get("mlp_layer_types", list)
    if kinds is None:
        kinds = ["dense", *(model.num_layers - 1) * ["sparse"]]
    layers = [i for i, kind in enumerate(kinds) if kind == "sparse"]
    if len(kinds) != model.num_layers or any(kind not in ("dense", "sparse") for kind in kinds) or not layers:
        raise keys.fault(
            "mlp_layer_types",
            f'a list of num_hidden_layers = {model.num_layers} values, "dense" or "sparse", not all dense',
        )
    return None if len(layers) == model.num_layers else layers


def _sliding_rope(keys: Keys, model: ModelConfig) -> Rope | None:
    """Layers with a window may rotate another part of a head."""
    if model.sliding_window is None:
        return None
    key, rope = rope_of(keys)
    own = rope.get("sliding_attention")
    part = own.get(PART, 1.0) if isinstance(own, dict) else 1.0
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
        raise ConfigFault(f"{key} has {PART} {shown(part)} for sliding_attention; it must be a number above 0, up to 1")
    dim = int(model.head_dim * as_float(part))
    if dim % 2:
        raise ConfigFault(f"{key} rotates {dim} of head_dim = {model.head_dim} in sliding_attention; it must be even")
    found = model.sliding_rope or Rope(model.rope_theta, model.rope_scaling)
    same = model.head_dim if model.rotary_dim is None else model.rotary_dim
    return model.sliding_rope if dim == same else msgspec.structs.replace(found, dim=dim)


def _layout(model: ModelConfig) -> Layout:
    shared = {name: f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
    return Layout(
        pieces=renamed(mlp__router="mlp.gate", self_attn__gate_proj="self_attn.g_proj")
        | {f"mlp.shared_expert.{name}_proj": Piece(stored) for name, stored in shared.items()}
        | {"mlp.selection": Piece("mlp.experts.e_score_correction", bare=True)}
    )


MAX_HEADS = 1024
ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "laguna": HfArchitecture(
        class_name="LagunaForCausalLM",
        models="Laguna",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            PART: 1.0,
            "rope_by_layer": True,
            "rope_parameters": ROPES,
        },
        always={
            "mlp_bias": False,
            "qk_norm": True,
            "attention_gate": True,
            "gate_function": "softplus",
        },
        windows=_windows,
        adapt=_with_named_gating,
        fields=_fields,
        layout=_layout,
    ),
}
