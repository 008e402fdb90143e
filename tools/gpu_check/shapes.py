"""The models whose steps are measured, and the bytes that their steps read."""

from dataclasses import dataclass

from pipeline.cli.profile.shape import shape
from pipeline.cli.profile.shapes import SHAPES
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Llama3Rope

LLAMA_8B = shape(
    "llama-8b",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=(32, 8, 128),
    vocab=128256,
    max_position=8192,
    rope_theta=500000.0,
    rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192),
    tie_embeddings=False,
)
LLAMA_1B = shape(
    "llama-1b",
    layers=16,
    hidden=2048,
    intermediate=8192,
    heads=(32, 8, 64),
    vocab=128256,
    max_position=8192,
    rope_theta=500000.0,
    rope_scaling=Llama3Rope(32.0, 1.0, 4.0, 8192),
)
SMOLLM2_135M = SHAPES["smollm2-135m"]
SMALL = shape(
    "small", layers=4, hidden=256, intermediate=512, heads=(8, 2, 64), vocab=2048, max_position=1024, rope_theta=10000.0
)
"""The model whose outputs are compared with the CPU's."""
TINY = shape(
    "tiny", layers=1, hidden=32, intermediate=64, heads=(4, 2, 16), vocab=64, max_position=128, rope_theta=10000.0
)
"""Replaces all other models if kernels are interpreted."""

GROUP_BYTES = 4
"""A scale and a minimum for each group in int4, float16 each."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a decode step reads."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def step_bytes(config: ModelConfig, batch: int, context: int, layer_bits: float = 16.0) -> StepBytes:
    """Bytes for `batch` rows of `context` tokens each. Layer matrices have `layer_bits` bits per weight; head, keys and
    values are bfloat16. An input embedding that is not tied to the head is ignored: a step reads only a few of its
    rows."""
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    weights = num_layer_weights(config) * layer_bits / 8 + 2 * config.hidden_size * config.vocab_size
    return StepBytes(int(weights), batch * context * keys)


def num_layer_weights(config: ModelConfig) -> int:
    """Number of weights in the matrices of all layers."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    attention = hidden * (2 * queries + 2 * config.num_kv_heads * config.head_dim)
    mlp = 3 * hidden * config.intermediate_size
    return config.num_layers * (attention + mlp)


def bits_in_groups(code_bits: int, group: int) -> float:
    """Average bits per weight in groups with a scale and a minimum."""
    return code_bits + 8 * GROUP_BYTES / group
