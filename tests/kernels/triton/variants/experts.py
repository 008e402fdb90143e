"""Launches of mixtures of experts, in the sizes of real models."""

from dataclasses import dataclass

import torch

from pipeline.kernels.triton import experts
from tests.kernels.triton.variants.dense import BF16
from tests.kernels.triton.variants.dense import _matrix as matrix_of


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    num: int
    choices: int


MIXTRAL = Sizes(4096, 14336, 8, 2)
QWEN3_A3B = Sizes(2048, 768, 128, 8)


def launches() -> None:
    """One of each kind."""
    _layer(QWEN3_A3B, "bf16", 4)
    _layer(QWEN3_A3B, "q4_k", 64)


def all_launches() -> None:
    for sizes in (MIXTRAL, QWEN3_A3B):
        for format in ("bf16", "int4g128", "int8g128", "int4g32", "int8g32", "q4_k", "q6_k"):
            _layer(sizes, format, 16)


def _layer(sizes: Sizes, format: str, num_tokens: int) -> None:
    num, count, hidden, inner = sizes.num, sizes.choices, sizes.hidden, sizes.inner
    chosen = torch.empty(num_tokens, count, dtype=torch.int32)
    weights, out = torch.empty(num_tokens, count), torch.empty(num_tokens, hidden)
    logits, shared = torch.empty(2, num_tokens, num + 1), torch.empty(2, num_tokens, hidden)
    places, counts = torch.empty(num, num_tokens, dtype=torch.int32), torch.empty(num, dtype=torch.int32)
    middle = torch.empty(num_tokens * count, inner, dtype=BF16)
    parts = torch.empty(num_tokens * count, hidden)
    # An expert's rows: the kernels take the others' as they are.
    up, last = matrix_of(format, inner, hidden), matrix_of(format, hidden, inner)
    experts.route(chosen, weights, logits, num, 1.0, normalized=True)
    experts.sort(places, counts, chosen)
    experts.gate_up(middle, torch.empty(num_tokens, hidden, dtype=BF16), places, counts, up, up, count)
    experts.down(parts, middle, places, counts, last, num_tokens)
    experts.combine(out, parts, weights, shared, logits)
