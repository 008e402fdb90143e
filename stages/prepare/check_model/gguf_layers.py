"""Keys of transformers' configs for what prepare has read of a .gguf file: the scaling of rotary embeddings, and layers
of different sizes."""

from typing import Any

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import LinearRope, Llama3Rope, LongRope, ProportionalRope, RopeScaling, YarnRope


def scaling_keys(scaling: RopeScaling | None) -> dict[str, Any]:
    """The parameters of a rotary embedding, but its base."""
    match scaling:
        case None:
            return {"rope_type": "default"}
        case LinearRope(factor):
            return {"rope_type": "linear", "factor": factor}
        case ProportionalRope():
            return {"rope_type": "proportional", "partial_rotary_factor": scaling.part, "factor": scaling.factor}
        case Llama3Rope():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position,
            }
        case YarnRope():
            return {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_position,
                "attention_factor": scaling.magnitude,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "truncate": scaling.truncate,
            }
        case LongRope():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                "attention_factor": scaling.magnitude,
                "original_max_position_embeddings": scaling.original_max_position,
            }


def sizes_by_layer(ours: ModelConfig) -> dict[str, Any]:
    """Those of Gemma 4."""
    other, inputs, first = ours.other_heads, ours.per_layer_inputs, ours.first_shared_kv_layer
    return {
        "final_logit_softcapping": ours.logit_softcap,
        "global_head_dim": ours.head_dim if other is None else other.head_dim,
        "num_global_key_value_heads": None if other is None else other.num_kv_heads,
        "attention_k_eq_v": other is not None and other.values_are_keys,
        "num_kv_shared_layers": 0 if first is None else ours.num_layers - first,
        "use_double_wide_mlp": ours.intermediate_sizes is not None,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "enable_moe_block": ours.experts is not None,
        "vocab_size_per_layer_input": ours.vocab_size if inputs is None else inputs.vocab_size,
    }
