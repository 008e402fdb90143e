"""Phi-1 to Phi-2, and Phi-3, Phi-3.5 and Phi-4."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import (
    LAYER_NORM,
    HfArchitecture,
    gate_up_slices,
    qkv_slices,
    renamed,
    window_everywhere,
)
from pipeline.stages.prepare.families.keys import Keys


def _phi(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("qk_layernorm", False, what="a norm of queries and keys")
    return {}


def _phi_layout(model: ModelConfig) -> Layout:
    names = renamed(
        self_attn__o_proj="self_attn.dense",
        mlp__up_proj="mlp.fc1",
        mlp__down_proj="mlp.fc2",
        model__norm="model.final_layernorm",
    )
    return Layout(pieces=names)


def _phi3_layout(model: ModelConfig) -> Layout:
    return Layout(pieces=qkv_slices(model, "self_attn.qkv_proj") | gate_up_slices(model))


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "phi": HfArchitecture(
        class_name="PhiForCausalLM",
        models="Phi-1, Phi-1.5, Phi-2",
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        always={
            **LAYER_NORM,
            "parallel": True,
            "shared_norm": True,
            "gated": False,
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "head_bias": True,
        },
        fields=_phi,
        layout=_phi_layout,
    ),
    "phi3": HfArchitecture(
        class_name="Phi3ForCausalLM",
        models="Phi-3, Phi-3.5, Phi-4",
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        always={"qkv_bias": False, "out_bias": False, "mlp_bias": False},
        windows=window_everywhere,
        layout=_phi3_layout,
    ),
}
