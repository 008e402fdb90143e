"""Architectures with layer norms and Llama's order of ops: StarCoder 2, StableLM, Nemotron."""

from typing import Any

from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import Layout, ModelConfig
from pipeline.stages.prepare.families.architecture import LAYER_NORM, HfArchitecture, renamed, window_everywhere
from pipeline.stages.prepare.families.keys import Keys


def _starcoder2(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    has_bias = keys.flag("use_bias", True)
    return {"qkv_bias": has_bias, "out_bias": has_bias, "mlp_bias": has_bias}


def _starcoder2_layout(model: ModelConfig) -> Layout:
    return Layout(pieces=renamed(mlp__up_proj="mlp.c_fc", mlp__down_proj="mlp.c_proj"))


def _stablelm(keys: Keys, model: ModelConfig) -> dict[str, Any]:
    keys.refuse_unless("qk_layernorm", False, what="a norm of queries and keys")
    parallel = keys.flag("use_parallel_residual")
    return {"qkv_bias": keys.flag("use_qkv_bias"), "parallel": parallel, "shared_norm": parallel}


ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    "starcoder2": HfArchitecture(
        class_name="Starcoder2ForCausalLM",
        models="StarCoder 2",
        keys={"rms_norm_eps": "norm_epsilon"},
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        always={**LAYER_NORM, "gated": False},
        windows=window_everywhere,
        fields=_starcoder2,
        layout=_starcoder2_layout,
    ),
    "stablelm": HfArchitecture(
        class_name="StableLmForCausalLM",
        models="StableLM",
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        always={**LAYER_NORM, "out_bias": False, "mlp_bias": False},
        fields=_stablelm,
    ),
    "nemotron": HfArchitecture(
        class_name="NemotronForCausalLM",
        models="Nemotron-4, Minitron",
        keys={"rms_norm_eps": "norm_eps"},
        defaults={
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        always={**LAYER_NORM, "norm_offset": 1.0, "gated": False},
    ),
}
