"""Gemma 4 (text)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.special_layers import OtherHeads, PerLayerInputs
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window, renamed
from pipeline.stages.prepare.families.experts import experts_of
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.shape import MAX_COUNT

WINDOW, UNIFIED_WINDOW, PATTERN = 512, 1024, 6
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def _windows(config: Mapping[str, Any], num_layers: int, window: int = WINDOW) -> Window:
    """The layers in `layer_types` have the window; by default all but each sixth. The last layer never has one, as in
    transformers."""
    keys = Keys(config, {}, {})
    kinds = keys.layer_kinds(num_layers)
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % PATTERN else "full_attention" for i in range(num_layers)]
    layers = [i for i in range(num_layers - 1) if kinds[i] == "sliding_attention"]
    return (keys.count("sliding_window", window), layers) if layers else (None, None)


def _other_heads(keys: Keys, model: ModelConfig) -> OtherHeads | None:
    """The heads of layers without a window, in the keys of the first files, or in those that transformers writes: for
    each layer what differs from the others."""
    layers = [i for i in range(model.num_layers) if model.window_of(i) is None]
    same = keys.flag("attention_k_eq_v")
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    head_dim = keys.count("global_head_dim", 512)
    num_kv_heads = keys.count("num_global_key_value_heads", model.num_kv_heads) if same else model.num_kv_heads
    if (by_layer := keys.get("per_layer_config", dict)) is not None:
        names = {key: f"{key} in per_layer_config" for key in names}
        head_dim, num_kv_heads = _overrides(by_layer, layers, model)
    if model.num_heads % num_kv_heads:
        raise ConfigFault(
            f"{names['num_key_value_heads']} is {shown(num_kv_heads)}; it must be a divisor of num_attention_heads = "
            f"{model.num_heads}"
        )
    if head_dim % 2 or head_dim > MAX_COUNT:
        raise ConfigFault(
            f"{names['head_dim']} is {shown(head_dim)}; it must be even, up to {MAX_COUNT}: rotary embeddings rotate "
            "pairs"
        )
    if not same and (head_dim, num_kv_heads) == (model.head_dim, model.num_kv_heads):
        return None
    return OtherHeads(layers=layers, num_kv_heads=num_kv_heads, head_dim=head_dim, values_are_keys=same)


def _overrides(by_layer: Mapping[str, Any], layers: list[int], model: ModelConfig) -> tuple[int, int]:
    """The size and the number of KV heads in `per_layer_config`, which must be those of all layers without a window."""
    plain = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads}
    # transformers pads the numbers with zeros.
    numbered = {int(key): value for key, value in by_layer.items() if key.isdecimal()}
    found = [numbered.get(i) or {} for i in layers]
    is_complete = len(numbered) == len(by_layer) and not numbered.keys() - set(layers)
    if not is_complete or any(not isinstance(one, dict) or one != found[0] for one in found):
        raise ConfigFault(
            f"per_layer_config is {shown(by_layer)}; it must be the same for all layers without a window, which are "
            f"{shown(layers)} by layer_types, and absent for the others"
        )
    if unknown := found[0].keys() - plain.keys():
        raise ConfigFault(
            f"per_layer_config has {shown(min(unknown))} for layer {layers[0]}; supported are {' and '.join(plain)}"
        )
    names = {key: f"{key} in per_layer_config" for key in plain}
    sizes = Keys({names[key]: value for key, value in {**plain, **found[0]}.items()}, names, {})
    return sizes.count("head_dim"), sizes.count("num_key_value_heads")


def _fields(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("use_bidirectional_attention", "vision", what="bidirectional attention")
    num_shared = keys.count("num_kv_shared_layers", 0, least=0)
    first = model.num_layers - num_shared
    kinds = [model.window_of(i) is None for i in range(model.num_layers)]
    most = model.num_layers - 1 - max(kinds.index(kind) for kind in set(kinds))
    if num_shared > most:
        raise ConfigFault(
            f"num_kv_shared_layers is {num_shared}; each of these layers must have one of its kind (layer_types) "
            f"before all of them: it may be at most {most}"
        )
    size = keys.count("hidden_size_per_layer_input", 256, least=0)
    inputs = PerLayerInputs(size=size, vocab_size=keys.count("vocab_size_per_layer_input", 262144)) if size else None
    if inputs is not None and inputs.vocab_size < model.vocab_size:
        raise ConfigFault(
            f"vocab_size_per_layer_input is {inputs.vocab_size}; it must be at least vocab_size = {model.vocab_size}"
        )
    inner = model.intermediate_size
    is_wide = bool(num_shared) and keys.flag("use_double_wide_mlp")
    return {
        "embedding_scale": model.hidden_size**0.5,
        "query_scale": 1.0,
        "logit_softcap": keys.optional_number("final_logit_softcapping"),
        "other_heads": _other_heads(keys, model),
        "first_shared_kv_layer": first if num_shared else None,
        "intermediate_sizes": [inner] * first + [2 * inner] * num_shared if is_wide else None,
        "per_layer_inputs": inputs,
        **_experts(keys),
    }


def _experts(keys: Keys) -> dict[str, Any]:
    if not keys.flag("enable_moe_block"):
        return {}
    if keys.get("num_experts", int) is None:
        raise ConfigFault("enable_moe_block is True, but num_experts is None; it must be an integer of at least 1")
    return experts_of(keys, "moe_intermediate_size", normalized=True, beside_dense=True, router_norm=True, factors=True)


def _layout(model: ModelConfig) -> Layout:
    outside = {
        "model.per_layer_embeddings": Piece("model.embed_tokens_per_layer"),
        "model.per_layer_projection": Piece("model.per_layer_model_projection"),
        "model.per_layer_norm": Piece("model.per_layer_projection_norm"),
    }
    experts = model.experts
    inner = 0 if experts is None else experts.intermediate_size
    beside_dense = renamed(
        mlp__router="router.proj",
        mlp__experts_norm="pre_feedforward_layernorm_2",
        mlp__experts_post_norm="post_feedforward_layernorm_2",
        mlp__dense_post_norm="post_feedforward_layernorm_1",
    ) | {
        "mlp.router_norm": Piece("router.scale", bare=True),
        "mlp.expert_factors": Piece("router.per_expert_scale", bare=True),
    }
    stacked = {
        "gate_proj": Piece("experts.gate_up_proj", end=inner, bare=True),
        "up_proj": Piece("experts.gate_up_proj", begin=inner, bare=True),
        "down_proj": Piece("experts.down_proj", bare=True),
    }
    return Layout(
        pieces=renamed(
            self_attn_post_norm="post_attention_layernorm",
            post_attention_layernorm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
            per_layer__gate_proj="per_layer_input_gate",
            per_layer__out_proj="per_layer_projection",
            per_layer__post_norm="post_per_layer_input_norm",
        )
        | {"layer_scale": Piece("layer_scalar", bare=True)}
        | (outside if model.per_layer_inputs is not None else {})
        | ({} if experts is None else beside_dense),
        experts={} if experts is None else stacked,
    )


DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rope_by_layer": True,
    "rope_parameters": ROPES,
}
ALWAYS = {"mlp_bias": False, "post_norms": True, "qk_norm": True, "value_norm": True, "layer_scales": True}
ACTIVATION = {"hidden_act": "hidden_activation"}

ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "gemma4_text": HfArchitecture(
        class_name="Gemma4ForCausalLM",
        other_class_names=("Gemma4TextModel",),
        models="Gemma 4",
        keys={**ACTIVATION, "num_experts_per_tok": "top_k_experts"},
        defaults=DEFAULTS,
        always=ALWAYS,
        windows=_windows,
        fields=_fields,
        layout=_layout,
    ),
    "gemma4_unified_text": HfArchitecture(
        class_name="Gemma4UnifiedForCausalLM",
        other_class_names=("Gemma4UnifiedTextModel",),
        models="Gemma 4 12B",
        keys=ACTIVATION,
        defaults={**DEFAULTS, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
        always=ALWAYS,
        windows=partial(_windows, window=UNIFIED_WINDOW),
        fields=_fields,
        layout=_layout,
    ),
}
