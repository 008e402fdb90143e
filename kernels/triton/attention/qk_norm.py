"""Norms of queries and keys other than an RMS norm of each head with weights for all heads, which are part of
kernels/triton/rotary.py and decode.py.

Shapes: P split-K partials, T tokens, Q query heads, K key-value heads, D head_dim.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.inputs import sum_partials
from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.norm import normalized


@dataclass(frozen=True, slots=True)
class QkNormWeights:
    """Norms of queries and keys: of each head, or of all heads together; layer norms with `centers`."""

    query: Tensor
    """[Q * D] float32"""
    key: Tensor
    """[K * D] float32"""
    eps: float
    together: bool
    centers: bool


def qk_norm(out: Tensor, split_k_partials: Tensor, weights: QkNormWeights, head_dim: int) -> None:
    """Sum `split_k_partials` [P, T, (Q + 2K) * D], and norm queries and keys. out [1, T, (Q + 2K) * D] float32."""
    num_partials, num_tokens, width = split_k_partials.shape
    num_queries, num_keys = len(weights.query), len(weights.key)
    assert out.shape == (1, num_tokens, width) and width == num_queries + 2 * num_keys
    query_span, key_span = (num_queries, num_keys) if weights.together else (head_dim, head_dim)
    _qk_norm[(num_tokens, num_queries // query_span + 2 * (num_keys // key_span))](
        out,
        split_k_partials,
        weights.query,
        weights.key,
        num_tokens,
        weights.eps,
        NUM_QUERIES=num_queries,
        NUM_KEYS=num_keys,
        QUERY_SPAN=query_span,
        KEY_SPAN=key_span,
        NUM_PARTIALS=num_partials,
        KIND="layer" if weights.centers else "rms",
        BLOCK=next_power_of_2(max(query_span, key_span)),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm(
    out,
    split_k_partials,
    query_weight,
    key_weight,
    num_tokens,
    eps,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    QUERY_SPAN: tl.constexpr,
    KEY_SPAN: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program has a span of the numbers that are normalized together, or of values."""
    width: tl.constexpr = NUM_QUERIES + 2 * NUM_KEYS
    query_spans: tl.constexpr = NUM_QUERIES // QUERY_SPAN
    key_spans: tl.constexpr = NUM_KEYS // KEY_SPAN
    at = tl.program_id(0).to(tl.int64) * width
    span = tl.program_id(1)
    distance = num_tokens.to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    if span < query_spans:
        inside = columns < QUERY_SPAN
        columns += span * QUERY_SPAN
        numbers = sum_partials(split_k_partials + at, columns, inside, distance, NUM_PARTIALS)
        numbers = normalized(numbers, query_weight, query_weight, columns, inside, eps, QUERY_SPAN, KIND, False)
        tl.store(out + at + columns, numbers, mask=inside)
    else:
        inside = columns < KEY_SPAN
        columns += (span - query_spans) * KEY_SPAN
        at += NUM_QUERIES
        numbers = sum_partials(split_k_partials + at, columns, inside, distance, NUM_PARTIALS)
        if span < query_spans + key_spans:
            numbers = normalized(numbers, key_weight, key_weight, columns, inside, eps, KEY_SPAN, KIND, False)
        tl.store(out + at + columns, numbers, mask=inside)
