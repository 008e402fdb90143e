"""Shapes, requests and tolerances of models in the CPU library."""

from pipeline.runtime import messages as m
from tests.kernels.cpu.samplers import EMULATED

GROUPED_SHAPE = {"hidden_size": 96, "intermediate_size": 64}
SUPER_BLOCK_SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "head_dim": 32}
DRAWN = m.GenerationOptions(temperature=1.5, seed=2**64 - 3, ignore_eos=True)

MAX_ERROR = {"wide": 5e-3, "bf16": 0.1}
"""Of logits with a standard deviation around 1. With activations in float32 only the order of sums differs, but by that
a key or value rounds to its other neighbour in bfloat16 now and then, which is what 2e-3 of it are; most logits are
within 1e-4. With activations in bfloat16 each of them is off by up to a 256th."""


def max_error(isa: str) -> float:
    """How far logits may be off: all other instruction sets keep activations in float32."""
    return MAX_ERROR["bf16" if isa in ("amx", "avx512_bf16", *EMULATED) else "wide"]
