"""Launches of mixtures of experts, in the sizes of real models."""

from dataclasses import dataclass

import torch

from pipeline.kernels.experts import ExpertActivation, RouteOptions
from pipeline.kernels.triton import experts
from pipeline.kernels.triton.experts import ExpertLinear, Order
from tests.kernels.triton.variants.dense import BF16
from tests.kernels.triton.variants.dense import _matrix as matrix_of


@dataclass(frozen=True)
class Sizes:
    hidden: int
    inner: int
    num: int
    choices: int
    kind: str = "silu"
    is_biased: bool = False


MIXTRAL = Sizes(4096, 14336, 8, 2)
QWEN3_A3B = Sizes(2048, 768, 128, 8)
GPT_OSS_20B = Sizes(2880, 2880, 32, 4, "swiglu_oai", is_biased=True)


def launches() -> None:
    """One of each kind."""
    _layer(QWEN3_A3B, "bf16", 4)
    _layer(QWEN3_A3B, "q4_k", 64)
    _layer(GPT_OSS_20B, "q8_0", 4)


def all_launches() -> None:
    for sizes in (MIXTRAL, QWEN3_A3B, GPT_OSS_20B):
        formats = ("bf16", "int4g128", "int8g128", "int4g32", "int8g32", "q4_k", "q6_k")
        for format in ("bf16", "q8_0") if sizes is GPT_OSS_20B else formats:
            _layer(sizes, format, 16)


def _layer(sizes: Sizes, format: str, num_tokens: int) -> None:
    num, count, hidden, inner = sizes.num, sizes.choices, sizes.hidden, sizes.inner
    chosen = torch.empty(num_tokens, count, dtype=torch.int32)
    weights, out = torch.empty(num_tokens, count), torch.empty(num_tokens, hidden)
    logits, shared = torch.empty(2, num_tokens, num + 1), torch.empty(2, num_tokens, hidden)
    order = Order(torch.empty(num, num_tokens, dtype=torch.int32), torch.empty(num, dtype=torch.int32))
    middle = torch.empty(num_tokens * count, inner, dtype=BF16)
    parts = torch.empty(num_tokens * count, hidden)

    def linear(num_rows: int, num_columns: int) -> ExpertLinear:
        # An expert's rows: the kernels take the others' as they are.
        bias = torch.empty(num * num_rows) if sizes.is_biased else None
        return ExpertLinear(matrix_of(format, num_rows, num_columns), bias)

    up, last, x = linear(inner, hidden), linear(hidden, inner), torch.empty(num_tokens, hidden, dtype=BF16)
    experts.route(chosen, weights, logits, RouteOptions(num, "softmax", True))
    experts.sort(order, chosen)
    experts.gate_up(middle, x, order, up, up, count, ExpertActivation(sizes.kind, True, 1.702, 7.0))
    experts.down(parts, middle, order, last, num_tokens)
    experts.combine(out, parts, weights, shared, logits)
