"""OLMo 1, 2 and 3, and EXAONE 4, which has norms in the same places as OLMo 2."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, renamed, windows_by_pattern
from pipeline.stages.prepare.families.keys import Keys

POST_NORMS = {"pre_norms": False, "post_norms": True, "qk_norm": True, "mlp_bias": False}
OLMO2 = {**POST_NORMS, "qk_norm_kind": "all"}


def _layout(model: ModelConfig) -> Layout:
    return Layout(
        pieces=renamed(self_attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
    )


def _olmo(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("clip_qkv", what="clipping queries, keys and values")
    return {}


def _exaone4(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """Layers without a window have no rotary embedding, unless sliding_window is null."""
    if keys.optional_number("sliding_window") is None:
        return {}
    return {"layers_without_rope": [i for i in range(model.num_layers) if model.window_of(i) is None]}


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "olmo": HfArchitecture(
        class_name="OlmoForCausalLM",
        models="OLMo",
        defaults={"rms_norm_eps": 1e-5},
        always={"norm": "layer", "norm_weights": False, "mlp_bias": False, "rms_norm_eps": 1e-5},
        fields=_olmo,
    ),
    "olmo2": HfArchitecture(
        class_name="Olmo2ForCausalLM", models="OLMo 2", defaults={"rms_norm_eps": 1e-5}, always=OLMO2, layout=_layout
    ),
    "olmo3": HfArchitecture(
        class_name="Olmo3ForCausalLM",
        models="OLMo 3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_by_layer": True},
        always=OLMO2,
        windows=windows_by_pattern(4),
        layout=_layout,
    ),
    "exaone4": HfArchitecture(
        class_name="Exaone4ForCausalLM",
        models="EXAONE 4",
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        always={**POST_NORMS, "qkv_bias": False, "out_bias": False},
        windows=windows_by_pattern(4, has_key=True),
        fields=_exaone4,
        layout=_layout,
    ),
}
