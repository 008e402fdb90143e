"""GLM-4: "glm" for GLM-4-9B, "glm4" for GLM-4-0414."""

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import HfArchitecture, gate_up_slices, renamed

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
ALWAYS = {"interleaved_rope": True, "out_bias": False, "mlp_bias": False}


def _layout(model: ModelConfig) -> Layout:
    return Layout(pieces=gate_up_slices(model))


def _layout4(model: ModelConfig) -> Layout:
    norms = renamed(self_attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
    return Layout(pieces=gate_up_slices(model) | norms)


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "glm": HfArchitecture(
        class_name="GlmForCausalLM", models="GLM-4-9B", defaults=DEFAULTS, always=ALWAYS, layout=_layout
    ),
    "glm4": HfArchitecture(
        class_name="Glm4ForCausalLM",
        models="GLM-4-0414",
        defaults=DEFAULTS,
        always={**ALWAYS, "post_norms": True},
        layout=_layout4,
    ),
}
