"""The models whose steps are measured, and the bytes that their steps read."""

from dataclasses import dataclass

from pipeline.cli.profile.shapes import SHAPES
from pipeline.runtime.model_folder import Llama3Rope, ModelConfig

LLAMA_8B = ModelConfig(
    name="llama-8b",
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192),
    tie_embeddings=False,
    eos_ids=[2],
    weight_files=[],
)
LLAMA_1B = ModelConfig(
    name="llama-1b",
    architecture="llama",
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_position=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=Llama3Rope(32.0, 1.0, 4.0, 8192),
    tie_embeddings=True,
    eos_ids=[2],
    weight_files=[],
)
SMOLLM2_135M = SHAPES["smollm2-135m"]
SMALL = ModelConfig(
    name="small",
    architecture="llama",
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=2048,
    max_position=1024,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_embeddings=True,
    eos_ids=[2],
    weight_files=[],
)
"""The model whose outputs are compared with the CPU's."""
TINY = ModelConfig(
    name="tiny",
    architecture="llama",
    num_layers=1,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    max_position=128,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_embeddings=True,
    eos_ids=[2],
    weight_files=[],
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
