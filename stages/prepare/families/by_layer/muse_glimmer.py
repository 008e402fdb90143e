"""Muse Glimmer (text)."""

from collections.abc import Mapping
from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, Window
from pipeline.stages.prepare.families.gemma import layout_of_four_norms
from pipeline.stages.prepare.families.keys import ConfigFault, Keys

PATTERN = 4
"""The last layer, and each fourth one before it, has no window and no rotary embedding."""


def _windows(config: Mapping[str, Any], num_layers: int) -> Window:
    """The layers in `layer_types` have the window."""
    keys = Keys(config, {}, {})
    kinds = keys.layer_kinds(num_layers)
    has_window = [not _is_global(i, num_layers) for i in range(num_layers)]
    if kinds is not None:
        has_window = [kind == "sliding_attention" for kind in kinds]
    layers = [i for i, has in enumerate(has_window) if has]
    return (keys.count("sliding_window", 2048), layers) if layers else (None, None)


def _is_global(layer: int, num_layers: int) -> bool:
    return (num_layers - 1 - layer) % PATTERN == 0


def _fields(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("attention_bias", False, what="attention with biases")
    post_eps = keys.number("post_norm_eps", 1e-8)
    if not 0 < post_eps < 1:
        raise keys.fault("post_norm_eps", "a number above 0, below 1")
    return {
        "query_scale": keys.number("qk_scale_factor", 3.87) * model.head_dim**-0.5,
        "logit_scale": keys.number("output_multiplier", 0.19611613513818404),
        "logit_softcap": keys.number("final_logit_softcapping", 20.0),
        "post_norm_eps": post_eps,
        "layers_without_rope": _layers_without_rope(keys, model),
    }


def _layers_without_rope(keys: Keys, model: ModelConfig) -> list[int]:
    """Those with 0 in `layer_rope_theta`. transformers gives the others the base of all layers, whatever the list
    says."""
    thetas = keys.get("layer_rope_theta", list)
    if thetas is None:
        return [i for i in range(model.num_layers) if _is_global(i, model.num_layers)]
    if len(thetas) != model.num_layers or any(theta not in (0, model.rope_theta) for theta in thetas):
        raise ConfigFault(
            f"layer_rope_theta must have num_hidden_layers = {model.num_layers} values, each 0 or rope_theta = "
            f"{model.rope_theta:g}"
        )
    return [i for i, theta in enumerate(thetas) if theta == 0]


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "muse_glimmer_text": HfArchitecture(
        class_name="MuseGlimmerForConditionalGeneration",
        other_class_names=("MuseGlimmerTextModel",),
        models="Muse Glimmer",
        keys={"hidden_act": "hidden_activation"},
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        always={
            "qkv_bias": False,
            "out_bias": False,
            "mlp_bias": False,
            "norm_offset": 1.0,
            "last_norm_offset": 0.0,
            "post_norms": True,
            "qk_norm": True,
            "qk_norm_weights": False,
            "attention_gate": True,
            "embedding_norm": True,
            "embedding_norm_weights": False,
        },
        windows=_windows,
        fields=_fields,
        layout=layout_of_four_norms,
    ),
}
