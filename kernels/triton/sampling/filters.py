"""Sampling of a row with top_k, top_p and min_p on the GPU: device functions.

The order is that of kernels/sampling/sample.py: min_p, top_k, top_p, each applied to the ids that the previous one
keeps. Each cuts everything below some logit, so the state is a single threshold.
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.sampling import fields as f
from pipeline.kernels.triton.sampling.noise import log_noise, noise_key
from pipeline.kernels.triton.sampling.threshold import (
    TILE,
    TILE_STRIPS,
    amount_of,
    code_of,
    list_strips,
    load_strips,
    search,
    value_of,
)

_COLD = f.COLD
_INF, _LOWEST = tl.constexpr(float("inf")), tl.constexpr(-3.4028234663852886e38)


@triton.jit
def is_filtered(row):
    """Whether a row has top_k, top_p or min_p."""
    cut = (tl.load(row + f.TOP_K) > 0) | (f.float_at(row + f.TOP_P) < 1) | (f.float_at(row + f.MIN_P) > 0)
    return cut & (f.float_at(row + f.TEMPERATURE) >= _COLD)


@triton.jit
def sample_filtered(
    logits,
    tops,
    strips,
    collected,
    row,
    num_known,
    top,
    total,
    temperature,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Sample the id after the row's first `num_known` from logits [VOCAB], whose softmax weights sum to `total`."""
    offsets = tl.arange(0, PADDED)
    strip_tops = tl.load(tops + offsets, mask=offsets < STRIPS, other=-_INF)
    low = code_of(tl.full([], _LOWEST, tl.float32)).to(tl.int64)
    min_p, top_k, top_p = f.float_at(row + f.MIN_P), tl.load(row + f.TOP_K), f.float_at(row + f.TOP_P)
    num_wanted = tl.where((top_k > 0) & (top_k < VOCAB), top_k, 0).to(tl.float32)
    is_cut = (min_p > 0) | (num_wanted > 0)
    if min_p > 0:
        low = tl.maximum(low, code_of(top + temperature * tl.log(min_p)).to(tl.int64))
    # top_k, then top_p, in the same code.
    for turn in range(2):
        weighted = turn == 1
        wanted = tl.where(weighted, top_p, num_wanted)
        if tl.where(weighted, top_p < 1, num_wanted > 0):
            if weighted:
                if is_cut:
                    total = _weigh(logits, strip_tops, strips, low, top, temperature, VOCAB, STRIPS)
                # Logits with weights below a V-th of the mass that may be cut have less than that mass together, so
                # they are not in the nucleus. The hundredth allows for rounding.
                rare = top + temperature * tl.log(0.99 * (1 - top_p) * total / VOCAB)
                low = tl.maximum(low, code_of(rare).to(tl.int64))
                wanted = top_p * total
            low = search(
                *(logits, strip_tops, strips, collected, low, top, temperature, weighted, wanted),
                *(VOCAB, STRIPS),
            )
    return _race(logits, strip_tops, strips, low, row, num_known, top, temperature, VOCAB, STRIPS)


@triton.jit
def _weigh(logits, tops, strips, low, top, temperature, VOCAB: tl.constexpr, STRIPS: tl.constexpr):
    """Sum of the weights of a row's values from `low` up."""
    num_strips = list_strips(strips, tops, low, STRIPS)
    total = 0.0
    for begin in range(0, num_strips, TILE_STRIPS):
        values, _, there = load_strips(logits, strips, begin, num_strips, VOCAB)
        kept = there & (values >= value_of(low))
        total += tl.sum(tl.where(kept, amount_of(values, top, temperature, True), 0.0), 0)
    return total


@triton.jit
def _race(logits, tops, strips, low, row, num_known, top, temperature, VOCAB: tl.constexpr, STRIPS: tl.constexpr):
    """The winner among a row's values from `low` up."""
    key_low, key_high = noise_key(tl.load(row + f.KEY_LOW), tl.load(row + f.KEY_HIGH), num_known)
    num_strips = list_strips(strips, tops, low, STRIPS)
    best = tl.full((TILE,), -_INF, tl.float32)
    winner = tl.full((TILE,), VOCAB, tl.int32)
    for begin in range(0, num_strips, TILE_STRIPS):
        values, ids, there = load_strips(logits, strips, begin, num_strips, VOCAB)
        score = (values - top) / temperature - log_noise(key_low, key_high, ids)
        better = there & (values >= value_of(low)) & (score > best)
        best = tl.where(better, score, best)
        winner = tl.where(better, ids, winner)
    return tl.min(tl.where(best == tl.max(best, 0), winner, VOCAB), 0)
