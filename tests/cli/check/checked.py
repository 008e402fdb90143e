"""`pipeline check-model` on tiny models of all architectures."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main

CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma 3": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "head_dim": 256,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 6912,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 200064,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0 + i for i in range(48)], "short_factor": 48 * [1.0]},
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    },
    "SmolLM2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "Llama 3.2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "head_dim": 64,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "eos_token_id": [128001, 128008, 128009],
    },
    "Mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 5120,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_hidden_layers": 40,
        "torch_dtype": "bfloat16",
    },
    "Qwen2.5": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "sliding_window": 32768,
        "max_window_layers": 21,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "Qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "head_dim": 128,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "attention_bias": False,
    },
    "Qwen3.5, for texts and images": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "intermediate_size": 3584,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "layer_types": 6 * [*3 * ["linear_attention"], "full_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
        },
        "vision_config": {"model_type": "qwen3_5", "depth": 12},
    },
    "Gemma 4 E2B": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "num_kv_shared_layers": 20,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "sliding_window": 512,
            "layer_types": 7 * [*4 * ["sliding_attention"], "full_attention"],
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {},
        "audio_config": {},
    },
    "Gemma 4 26B-A4B": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 2816,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "head_dim": 256,
            "global_head_dim": 512,
            "intermediate_size": 2112,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "layer_types": 5 * [*5 * ["sliding_attention"], "full_attention"],
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {},
    },
    "Laguna": {
        "model_type": "laguna",
        "architectures": ["LagunaForCausalLM"],
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": 10 * [48, 64, 64, 64],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "layer_types": 10 * ["full_attention", *3 * ["sliding_attention"]],
        "mlp_layer_types": ["dense", *39 * ["sparse"]],
        "moe_routed_scaling_factor": 2.5,
    },
    "OLMo hybrid": {
        "model_type": "olmo_hybrid",
        "architectures": ["OlmoHybridForCausalLM"],
        "hidden_size": 3840,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "num_key_value_heads": 30,
        "intermediate_size": 11008,
        "vocab_size": 100352,
        "max_position_embeddings": 65536,
        "linear_num_key_heads": 30,
        "linear_num_value_heads": 30,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
    },
}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def check(model: str, *more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["check-model", model, "--tokens", "80", "--set", "execute.num_threads=1", *more])
    out, err = capsys.readouterr()
    return code, out, err


def results(out: str) -> list[tuple[str, str]]:
    """Program and result of each row of the table. A cell that is too long for its column continues in further lines,
    whose last cell is empty."""
    rows: list[tuple[str, str]] = []
    for line in out.splitlines():
        if line.startswith("│"):
            program, *_, result = [cell.strip() for cell in line.split("│")[1:-1]]
            if result:
                rows.append((program, result))
            else:
                rows[-1] = (f"{rows[-1][0]} {program}".rstrip(), rows[-1][1])
    return rows
