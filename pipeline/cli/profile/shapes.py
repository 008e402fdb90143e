"""Shapes of known models, to be profiled with random weights: the duration of a step does not depend on the values."""

from typing import Any

from pipeline.cli.profile.family_shapes import FAMILY_SHAPES
from pipeline.cli.profile.shape import shape
from pipeline.runtime.model.rope import Rope
from pipeline.runtime.model.special_layers import Experts

_SMOLLM2_135M = shape(
    "smollm2-135m",
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=(9, 3, 64),
    vocab=49152,
    max_position=8192,
    rope_theta=1e5,
)
_QWEN2_05B = shape(
    "qwen2-0.5b",
    "qwen2",
    layers=24,
    hidden=896,
    intermediate=4864,
    heads=(14, 2, 64),
    vocab=151936,
    max_position=32768,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    eos_id=151645,
    qkv_bias=True,
)
_QWEN3_06B = shape(
    "qwen3-0.6b",
    "qwen3",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=(16, 8, 128),
    vocab=151936,
    max_position=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    eos_id=151645,
    qk_norm=True,
)
_LLAMA_1B = shape(
    "llama-1b",
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=(32, 8, 64),
    vocab=128256,
    max_position=131072,
    rope_theta=5e5,
)
_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
_POST_NORMS: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_kind": "all"}
_GEMMA3_1B = shape(
    "gemma3-1b",
    "gemma3_text",
    layers=26,
    hidden=1152,
    intermediate=6912,
    heads=(4, 1, 256),
    vocab=262144,
    max_position=32768,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    activation="gelu_tanh",
    post_norms=True,
    qk_norm=True,
    embedding_scale=1152**0.5,
    sliding_window=512,
    sliding_layers=[i for i in range(26) if (i + 1) % 6],
    sliding_rope=Rope(1e4),
)
_PHI4_MINI = shape(
    "phi4-mini",
    "phi3",
    layers=32,
    hidden=3072,
    intermediate=8192,
    heads=(24, 8, 128),
    vocab=200064,
    max_position=131072,
    rope_theta=1e4,
    rotary_dim=96,
)
_SMOLLM3_3B = shape(
    "smollm3-3b",
    "smollm3",
    layers=36,
    hidden=2048,
    intermediate=11008,
    heads=(16, 4, 128),
    vocab=128256,
    max_position=65536,
    rope_theta=5e6,
    layers_without_rope=list(range(3, 36, 4)),
)
_OLMO2_1B = shape(
    "olmo2-1b",
    "olmo2",
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=(16, 16, 128),
    vocab=100352,
    max_position=4096,
    rope_theta=5e5,
    tie_embeddings=False,
    **_POST_NORMS,
)
_GRANITE_2B = shape(
    "granite3-2b",
    "granite",
    layers=40,
    hidden=2048,
    intermediate=8192,
    heads=(32, 8, 64),
    vocab=49155,
    max_position=131072,
    rope_theta=5e6,
    embedding_scale=12.0,
    residual_multiplier=0.22,
    query_scale=0.015625,
    logit_scale=0.125,
)
_PYTHIA_1B = shape(
    "pythia-1b",
    "gpt_neox",
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=(8, 8, 256),
    vocab=50304,
    max_position=2048,
    rope_theta=1e4,
    tie_embeddings=False,
    parallel=True,
    gated=False,
    activation="gelu",
    rotary_dim=64,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    **_LAYER_NORM,
)
_COMMAND_R7B = shape(
    "command-r7b",
    "cohere2",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=(32, 8, 128),
    vocab=256000,
    max_position=132096,
    rope_theta=5e4,
    norm="layer",
    parallel=True,
    shared_norm=True,
    interleaved_rope=True,
    logit_scale=0.25,
    sliding_window=4096,
    sliding_layers=[i for i in range(32) if (i + 1) % 4],
    layers_without_rope=list(range(3, 32, 4)),
)
# Qwen3-30B-A3B with half as many experts, narrower, and with fewer layers and tokens.
_MOE_3B = shape(
    "moe-3b-a0.6b",
    "qwen3_moe",
    layers=20,
    hidden=1536,
    intermediate=512,
    heads=(16, 4, 128),
    vocab=65536,
    max_position=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    qk_norm=True,
    experts=Experts(num=64, num_per_token=8, intermediate_size=512, normalized=True),
)
SHAPES = {
    config.name: config
    for config in (
        *(
            _SMOLLM2_135M,
            _LLAMA_1B,
            _QWEN2_05B,
            _QWEN3_06B,
            _GEMMA3_1B,
            _PHI4_MINI,
            _SMOLLM3_3B,
            _OLMO2_1B,
            _GRANITE_2B,
        ),
        *(_PYTHIA_1B, _COMMAND_R7B, _MOE_3B, *FAMILY_SHAPES),
    )
}
