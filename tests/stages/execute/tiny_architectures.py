"""A tiny random model of each architecture, made by transformers from a config and prepared from its folder."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints

VOCAB_SIZE = 608
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
HEADS = {**SIZES, "num_key_value_heads": 4}
NO_GQA = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 21}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 5000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GLM_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_layer_start_index": 1}
LAGUNA = {
    **EXPERTS,
    **KINDS,
    "head_dim": 32,
    "shared_expert_intermediate_size": 48,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    },
}
GEMMA4 = {
    **SIZES,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 21,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 24}


@dataclass(frozen=True)
class Variant:
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    max_model_len: int = 0


VARIANTS: dict[str, Variant] = {
    "gemma": Variant("gemma", {"head_dim": 32}),
    "gemma2": Variant("gemma2", {"sliding_window": 21, "attn_logit_softcapping": 5.0}, GEMMA),
    "gemma2, no caps": Variant(
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 9}, GEMMA
    ),
    "gemma3": Variant("gemma3_text", KINDS, GEMMA),
    "gemma4": Variant(
        "gemma4_text",
        {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32},
        GEMMA4,
    ),
    "gemma4, dense": Variant(
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "global_head_dim": 64,
        },
        GEMMA4,
    ),
    "gemma4_unified": Variant(
        "gemma4_unified_text",
        {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
        {key: value for key, value in GEMMA4.items() if key != "vocab_size_per_layer_input"},
    ),
    "gemma4, experts": Variant(
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
        GEMMA4,
    ),
    "gemma4, heads of 512": Variant(
        "gemma4_text",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_attention_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 16,
        },
        GEMMA4,
    ),
    "gemma3, linear rope": Variant(
        "gemma3_text",
        {
            **KINDS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        GEMMA,
    ),
    "apertus": Variant("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "laguna": Variant(
        "laguna",
        {
            **LAGUNA,
            "num_attention_heads_per_layer": [4, 2, 6],
            "moe_routed_scaling_factor": 2.5,
            "moe_router_logit_softcapping": 2.0,
        },
    ),
    "laguna, gates of numbers": Variant("laguna", {**LAGUNA, "gating": "per-element"}),
    "phi": Variant("phi"),
    "phi3": Variant("phi3", {"sliding_window": 21}),
    "phi3, short longrope": Variant(
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 128, "max_position_embeddings": 512},
        max_model_len=128,
    ),
    "phi3, long longrope": Variant(
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 8, "max_position_embeddings": 512},
        max_model_len=512,
    ),
    "glm": Variant("glm", {"head_dim": 16}),
    "glm4": Variant("glm4", {"head_dim": 16}),
    "olmo": Variant("olmo"),
    "olmo2": Variant("olmo2"),
    "olmo3": Variant(
        "olmo3",
        {
            **KINDS,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "exaone4": Variant("exaone4", KINDS),
    "smollm3": Variant("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "granite": Variant(
        "granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 1.5,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "seed_oss": Variant("seed_oss", {"head_dim": 32}),
    "falcon 3": Variant("llama", {"head_dim": 32}),
    "falcon 7b": Variant("falcon", {"multi_query": True, "parallel_attn": True}, NO_GQA),
    "falcon 40b": Variant("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, NO_GQA),
    "falcon 11b": Variant(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, NO_GQA
    ),
    "falcon rw": Variant("falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}, NO_GQA),
    "gpt_neox": Variant("gpt_neox", sizes=NO_GQA),
    "gpt_neox, sequential": Variant(
        "gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}, NO_GQA
    ),
    "gpt2": Variant("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}, {}),
    "gpt_bigcode": Variant("gpt_bigcode", {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}, {}),
    "gpt_bigcode, no multi-query": Variant(
        "gpt_bigcode",
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 256,
            "n_inner": 96,
            "multi_query": False,
            "activation_function": "gelu",
        },
        {},
    ),
    "opt": Variant("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, NO_GQA),
    "mpt": Variant("mpt", {"d_model": 96, "n_heads": 6, "n_layers": 3, "max_seq_len": 256}, {}),
    "bloom": Variant("bloom", {"hidden_size": 96, "n_head": 6, "n_layer": 3}, {}),
    "stablelm": Variant("stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": Variant("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "starcoder2": Variant("starcoder2", {"sliding_window": 21}),
    "nemotron": Variant("nemotron"),
    "cohere": Variant("cohere", {"use_qk_norm": True}),
    "cohere, no qk norm": Variant("cohere", {"logit_scale": 0.5}),
    "cohere2": Variant("cohere2", KINDS),
    "ministral": Variant("ministral", {**KINDS, "head_dim": 32}),
    "ministral3": Variant(
        "ministral3",
        {
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16},
            "head_dim": 16,
        },
    ),
    "helium": Variant("helium", {"head_dim": 16}),
    "ernie4_5": Variant("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "arcee": Variant("arcee", {"mlp_bias": True}),
    "mixtral": Variant("mixtral", {"num_local_experts": 5}),
    "qwen2_moe": Variant("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen2_moe, some layers": Variant(
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe": Variant("qwen3_moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe, some layers": Variant("qwen3_moe", {**EXPERTS, "head_dim": 32, "mlp_only_layers": [1]}),
    "olmoe": Variant("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "glm4_moe": Variant("glm4_moe", {**GLM_EXPERTS, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, groups": Variant("glm4_moe", {**GLM_EXPERTS, "n_group": 3, "topk_group": 2, "n_shared_experts": 2}),
    "ernie4_5_moe": Variant("ernie4_5_moe", ERNIE_EXPERTS),
    "ernie4_5_moe, some layers": Variant(
        "ernie4_5_moe", {**ERNIE_EXPERTS, "moe_layer_interval": 2, "moe_num_shared_experts": 0}
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        {
            **KINDS,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


EQUAL_LAYERS = {
    name: variant
    for name, variant in VARIANTS.items()
    if variant.kind not in ("gemma4_text", "gemma4_unified_text", "laguna")
}
"""Those that several ranks compute, too."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def without_choice(variant: Variant) -> Variant:
    """The variant whose experts compute every token: rounding errors can't change which of them do."""
    changes = variant.changes
    num = next((changes[name] for name in NUM_EXPERTS if name in changes), 0)
    if not num:
        return variant
    groups = {"topk_group": changes["n_group"]} if "n_group" in changes else {}
    key = next((name for name in ("moe_k", "top_k_experts") if name in changes), "num_experts_per_tok")
    return replace(variant, changes={**changes, key: num, **groups})


def make(variant: Variant, seed: int = 0) -> Any:
    """The model in transformers, float32, whose logits differ enough to detect errors."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(variant.kind, vocab_size=VOCAB_SIZE, **{**variant.sizes, **ids, **variant.changes})
    # transformers' SDPA ignores softcaps.
    how = {"attn_implementation": "eager"} if variant.kind == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, **how)
    checkpoints.randomize(model, seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.15)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
    return model.eval()


def write(folder: Path, variant: Variant) -> tuple[Path, Any]:
    """A prepared folder of the model, and the model in transformers."""
    model = make(variant)
    source = checkpoints.save_folder(folder / "source", model)
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache"))), model
