"""Cohere's Command R and Command R7B / Command A (cohere2)."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, windows_by_pattern
from pipeline.stages.prepare.families.keys import Keys

ALWAYS = {
    "norm": "layer",
    "parallel": True,
    "shared_norm": True,
    "interleaved_rope": True,
    "mlp_bias": False,
    "qk_norm_kind": "each_head",
}
DEFAULTS = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
EPS = {"rms_norm_eps": "layer_norm_eps"}


def _cohere(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale", 0.0625), "qk_norm": keys.flag("use_qk_norm")}


def _cohere2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    """Layers without a window have no rotary embedding."""
    full = [i for i in range(model.num_layers) if model.window_of(i) is None]
    return {"logit_scale": keys.number("logit_scale", 0.0625), "layers_without_rope": full}


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "cohere": HfArchitecture(
        class_name="CohereForCausalLM",
        models="Command R",
        keys=EPS,
        defaults={**DEFAULTS, "rope_theta": 500000.0},
        always=ALWAYS,
        fields=_cohere,
    ),
    "cohere2": HfArchitecture(
        class_name="Cohere2ForCausalLM",
        models="Command R7B, Command A",
        keys=EPS,
        defaults=DEFAULTS,
        always=ALWAYS,
        windows=windows_by_pattern(4, has_key=True),
        fields=_cohere2,
    ),
}
