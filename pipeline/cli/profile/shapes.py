"""Shapes of known models, to be profiled with random weights: the duration of a step does not depend on the values."""

from typing import Any

from pipeline.cli.profile.shape import shape
from pipeline.runtime.model.architecture_names import Architecture
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Rope
from pipeline.runtime.model.special_layers import Experts

Sizes = tuple[Architecture, int, int, int, tuple[int, int, int], int, int, float]
"""Architecture, layers, hidden, intermediate, heads (query, KV, head_dim), vocabulary, max_position, rope_theta"""
_SIZES: dict[str, Sizes] = {
    "smollm2-135m": ("llama", 30, 576, 1536, (9, 3, 64), 49152, 8192, 1e5),
    "llama-1b": ("llama", 16, 2048, 8192, (32, 8, 64), 128256, 131072, 5e5),
    "qwen2-0.5b": ("qwen2", 24, 896, 4864, (14, 2, 64), 151936, 32768, 1e6),
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, (16, 8, 128), 151936, 40960, 1e6),
    "gemma3-1b": ("gemma3_text", 26, 1152, 6912, (4, 1, 256), 262144, 32768, 1e6),
    "phi4-mini": ("phi3", 32, 3072, 8192, (24, 8, 128), 200064, 131072, 1e4),
    "smollm3-3b": ("smollm3", 36, 2048, 11008, (16, 4, 128), 128256, 65536, 5e6),
    "olmo2-1b": ("olmo2", 16, 2048, 8192, (16, 16, 128), 100352, 4096, 5e5),
    "granite3-2b": ("granite", 40, 2048, 8192, (32, 8, 64), 49155, 131072, 5e6),
    "pythia-1b": ("gpt_neox", 16, 2048, 8192, (8, 8, 256), 50304, 2048, 1e4),
    "command-r7b": ("cohere2", 32, 4096, 14336, (32, 8, 128), 256000, 132096, 5e4),
    # Qwen3-30B-A3B with half as many experts, narrower, and with fewer layers and tokens.
    "moe-3b-a0.6b": ("qwen3_moe", 20, 1536, 512, (16, 4, 128), 65536, 40960, 1e6),
    "gemma2-2b": ("gemma2", 26, 2304, 9216, (8, 4, 256), 256000, 8192, 1e4),
    "glm4-9b": ("glm4", 40, 4096, 13696, (32, 2, 128), 151552, 32768, 1e4),
    "falcon-7b": ("falcon", 32, 4544, 18176, (71, 1, 64), 65024, 2048, 1e4),
    "gpt2-xl": ("gpt2", 48, 1600, 6400, (25, 25, 64), 50257, 1024, 1e4),
    "opt-1.3b": ("opt", 24, 2048, 8192, (32, 32, 64), 50272, 2048, 1e4),
    "mpt-7b": ("mpt", 32, 4096, 16384, (32, 32, 128), 50432, 2048, 1e4),
    "bloom-1b": ("bloom", 24, 1536, 6144, (16, 16, 96), 250880, 2048, 1e4),
    "phi-2": ("phi", 32, 2560, 10240, (32, 32, 80), 51200, 2048, 1e4),
    "stablelm-3b": ("stablelm", 32, 2560, 6912, (32, 32, 80), 50304, 4096, 1e4),
    "starcoder2-3b": ("starcoder2", 30, 3072, 12288, (24, 2, 128), 49152, 16384, 1e4),
    "olmoe-7b-a1b": ("olmoe", 16, 2048, 1024, (16, 16, 128), 50304, 4096, 1e4),
    "qwen3-30b-a3b": ("qwen3_moe", 48, 2048, 6144, (32, 4, 128), 151936, 40960, 1e6),
    "gpt-oss-20b": ("gpt_oss", 24, 2880, 2880, (64, 8, 64), 201088, 131072, 1.5e5),
}
_QWEN: dict[str, Any] = {"rms_norm_eps": 1e-6, "eos_id": 151645}
_UNTIED: dict[str, Any] = {"tie_embeddings": False}
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
_BIASES: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN: dict[str, Any] = {"gated": False, "activation": "gelu_tanh"}
_POST_NORMS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_kind": "all"}


def _windows(size: int, layers: list[int]) -> dict[str, Any]:
    return {"sliding_window": size, "sliding_layers": layers}


def _slopes(num_heads: int) -> list[float]:
    """Of ALiBi, for a power of two."""
    return [2.0 ** (-8.0 * (i + 1) / num_heads) for i in range(num_heads)]


_FEATURES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": _QWEN | {"qkv_bias": True},
    "qwen3-0.6b": _QWEN | {"qk_norm": True},
    "gemma3-1b": {"rms_norm_eps": 1e-6, "activation": "gelu_tanh", "post_norms": True, "qk_norm": True}
    | {"embedding_scale": 1152**0.5, "sliding_rope": Rope(1e4)}
    | _windows(512, [i for i in range(26) if (i + 1) % 6]),
    "phi4-mini": {"rotary_dim": 96},
    "smollm3-3b": {"layers_without_rope": list(range(3, 36, 4))},
    "olmo2-1b": _UNTIED | _POST_NORMS,
    "granite3-2b": {
        "embedding_scale": 12.0,
        "residual_multiplier": 0.22,
        "query_scale": 0.015625,
        "logit_scale": 0.125,
    },
    "pythia-1b": _UNTIED
    | _LAYER_NORM
    | _BIASES
    | {"gated": False, "activation": "gelu"}
    | {"parallel": True, "rotary_dim": 64},
    "command-r7b": {
        "norm": "layer",
        "parallel": True,
        "shared_norm": True,
        "interleaved_rope": True,
        "logit_scale": 0.25,
    }
    | _windows(4096, [i for i in range(32) if (i + 1) % 4])
    | {"layers_without_rope": list(range(3, 32, 4))},
    "moe-3b-a0.6b": {"rms_norm_eps": 1e-6, "qk_norm": True}
    | {"experts": Experts(num=64, num_per_token=8, intermediate_size=512, normalized=True)},
    "gemma2-2b": {"activation": "gelu_tanh", "post_norms": True, "embedding_scale": 48.0}
    | {"attention_softcap": 50.0, "logit_softcap": 30.0}
    | _windows(4096, list(range(0, 26, 2))),
    "glm4-9b": _UNTIED | {"qkv_bias": True, "rotary_dim": 64, "interleaved_rope": True, "post_norms": True},
    "falcon-7b": _LAYER_NORM | {"parallel": True, "shared_norm": True, "gated": False, "activation": "gelu"},
    "gpt2-xl": _LAYER_NORM | _BIASES | _PLAIN | {"position_embeddings": 1024, "rotary_dim": 0},
    "opt-1.3b": _LAYER_NORM
    | _BIASES
    | {"gated": False, "activation": "relu"}
    | {"position_embeddings": 2050, "position_offset": 2, "rotary_dim": 0},
    "mpt-7b": {"rotary_dim": 0, "norm": "layer", "gated": False, "activation": "gelu", "alibi_slopes": _slopes(32)},
    "bloom-1b": _LAYER_NORM | _BIASES | _PLAIN | {"rotary_dim": 0, "embedding_norm": True, "alibi_slopes": _slopes(16)},
    "phi-2": _UNTIED
    | _LAYER_NORM
    | _BIASES
    | _PLAIN
    | {"rotary_dim": 32, "parallel": True, "shared_norm": True, "head_bias": True},
    "stablelm-3b": _UNTIED | _LAYER_NORM | {"rotary_dim": 20},
    "starcoder2-3b": _LAYER_NORM | _BIASES | _PLAIN | {"sliding_window": 4096},
    "olmoe-7b-a1b": _UNTIED
    | {"qk_norm": True, "qk_norm_kind": "all"}
    | {"experts": Experts(num=64, num_per_token=8, intermediate_size=1024)},
    "qwen3-30b-a3b": _UNTIED
    | {"rms_norm_eps": 1e-6, "qk_norm": True}
    | {"experts": Experts(num=128, num_per_token=8, intermediate_size=768, normalized=True)},
    "gpt-oss-20b": _UNTIED
    | {"qkv_bias": True, "out_bias": True, "sinks": True, "activation": "swiglu_oai"}
    | _windows(128, list(range(0, 24, 2)))
    | {
        "experts": Experts(
            num=32, num_per_token=4, intermediate_size=2880, normalized=True, router_bias=True, bias=True
        )
    },
}


def _shape(name: str, sizes: Sizes) -> ModelConfig:
    architecture, layers, hidden, intermediate, heads, vocab, max_position, rope_theta = sizes
    return shape(
        name,
        architecture,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        vocab=vocab,
        max_position=max_position,
        rope_theta=rope_theta,
        **_FEATURES.get(name, {}),
    )


SHAPES = {name: _shape(name, sizes) for name, sizes in _SIZES.items()}
