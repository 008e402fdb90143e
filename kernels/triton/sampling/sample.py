"""Sampling on the GPU: the largest logit, or the Gumbel-max trick with keyed noise of kernels/sampling/sample.py.

Each block of a row's logits has a winner, and the best of those is the row's. Greedy and random rows are in the same
launches:

    logits [S, V] ──_blocks──► largest, scores, winners [S, NB] ──_pick──► ids [S]

If rows have filters, `_filter` runs between the two: it finds the ids that min_p, top_k and top_p keep, and samples
from those. `_blocks` then only computes such a row's statistics.

A score is (logit - the block's largest) / temperature - log(noise), so it is finite for any temperature, although no
block knows the row's largest logit. `winner_of` corrects for the difference.

The block size is constant, so the sampled id does not depend on the batch. Ended rows and padding cost almost nothing.

Shapes: S samples, V vocabulary, NB blocks of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.sampling import fields as f
from pipeline.kernels.triton.sampling.filters import is_filtered, sample_filtered
from pipeline.kernels.triton.sampling.noise import log_noise, noise_key
from pipeline.kernels.triton.sampling.threshold import MAX_COLLECTED, STRIP

BLOCK = 2048
"""Logits per program. For a vocabulary of 128k, the 63 programs of one sample keep the GPU's memory half busy, with
four loads of 16 bytes in flight for each of four warps. Reasoned, not measured."""

_COLD, _NO_ID = f.COLD, f.NO_CANDIDATE
_INF = tl.constexpr(float("inf"))
_STRIP, _MAX_COLLECTED = tl.constexpr(STRIP), tl.constexpr(MAX_COLLECTED)


class SamplingScratch:
    """Scratch memory between programs; one call at a time uses it."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = triton.cdiv(vocab_size, BLOCK)
        shape = max_samples, self.num_blocks
        self.largest = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; the largest logit"""
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; the winner's score"""
        self.winners = torch.zeros(shape, dtype=torch.int32, device=device)
        """[S, NB]; NO_ID if no id is possible"""
        self.weights = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; for rows with filters: the sum of the softmax weights, relative to the block's largest"""
        self.num_strips = self.num_blocks * (BLOCK // STRIP)
        self.tops = torch.zeros(max_samples, self.num_strips, dtype=torch.float32, device=device)
        """For rows with filters: the largest logit of each strip."""
        self.strips = torch.zeros(max_samples, self.num_strips, dtype=torch.int32, device=device)
        self.collected = torch.zeros(max_samples, MAX_COLLECTED, dtype=torch.float32, device=device)


def sample(
    ids: Tensor,
    logits: Tensor,
    params: Tensor,
    sample_rows: Tensor,
    num_known: Tensor,
    scratch: SamplingScratch,
    *,
    filtered: bool,
) -> None:
    """Write the next id of each row to ids [S] int32: NO_ID if no id is possible, nothing if the row has ended.

    logits [S, V] float32 are not modified; params are those of `RowState`; sample_rows and num_known [S] int32 those of
    `StepArrays`. Without `filtered`, no row may have top_k, top_p or min_p.
    """
    num = len(sample_rows)
    assert logits.shape[1] == scratch.vocab_size and num <= len(scratch.scores) and logits.stride(1) == 1
    _blocks[(scratch.num_blocks, num)](
        *(scratch.largest, scratch.scores, scratch.winners, scratch.weights, scratch.tops),
        *(logits, params, sample_rows, num_known),
        logits.stride(0),
        scratch.vocab_size,
        params.shape[1],
        scratch.num_blocks,
        filtered,
        BLOCK,
        num_warps=4,
    )
    if filtered:
        _filter[(num,)](
            *(scratch.largest, scratch.scores, scratch.winners, scratch.weights, scratch.tops, scratch.strips),
            *(scratch.collected, logits, params, sample_rows, num_known),
            logits.stride(0),
            scratch.vocab_size,
            params.shape[1],
            scratch.num_blocks,
            next_power_of_2(scratch.num_blocks),
            scratch.num_strips,
            next_power_of_2(scratch.num_strips),
            num_warps=16,
        )
    _best_block[(num,)](
        *(ids, scratch.largest, scratch.scores, scratch.winners, params, sample_rows),
        params.shape[1],
        scratch.num_blocks,
        next_power_of_2(scratch.num_blocks),
        num_warps=1,
    )


@triton.jit
def winner_of(largest, scores, winners, sample, temperature, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The id of one sample, from the results of `_blocks`. PADDED is a power of two, at least BLOCKS."""
    offsets = tl.arange(0, PADDED)
    there = offsets < BLOCKS
    at = sample * BLOCKS + offsets
    top = tl.load(largest + at, mask=there, other=-_INF)
    score = tl.load(scores + at, mask=there, other=-_INF)
    most = tl.max(top, 0)
    below = tl.where(temperature >= _COLD, (top - most) / tl.maximum(temperature, _COLD), -_INF)
    best = tl.argmax(score + tl.where(top == most, 0.0, below), 0, tie_break_left=True)
    return tl.load(winners + sample * BLOCKS + best)


@triton.jit
def _blocks(
    largest,
    scores,
    winners,
    weights,
    tops,
    logits,
    row_params,
    sample_rows,
    num_known,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = row_params + tl.load(sample_rows + sample).to(tl.int64) * PARAMS
    if tl.load(row + f.ENDED) == 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + sample * STRIDE + ids, mask=ids < VOCAB, other=-_INF)
        # NaN has no probability.
        logit = tl.where(logit > -_INF, logit, -_INF)
        top = tl.max(logit, 0)
        temperature = f.float_at(row + f.TEMPERATURE)
        is_random = (temperature >= _COLD) & (top > -_INF) & (top < _INF)
        score = tl.where(logit == top, 0.0, -_INF)
        at = sample * BLOCKS + block
        has_filters = False
        if FILTERED:
            has_filters = is_filtered(row)
        if has_filters:
            strip = at * (BLOCK // _STRIP) + tl.arange(0, BLOCK // _STRIP)
            tl.store(tops + strip, tl.max(tl.reshape(logit, (BLOCK // _STRIP, _STRIP)), 1))
            # Undefined if the largest is infinite; it is not read then.
            tl.store(weights + at, tl.sum(tl.exp((logit - top) / temperature), 0))
            # `_filter` chooses the id.
            score = tl.where(is_random, -_INF, score)
        elif is_random:
            low, high = noise_key(tl.load(row + f.KEY_LOW), tl.load(row + f.KEY_HIGH), tl.load(num_known + sample))
            score = (logit - top) / temperature - log_noise(low, high, ids)
        best, winner = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(largest + at, top)
        tl.store(scores + at, best)
        tl.store(winners + at, tl.where(top > -_INF, block * BLOCK + winner, _NO_ID))


@triton.jit
def _filter(
    largest,
    scores,
    winners,
    weights,
    tops,
    strips,
    collected,
    logits,
    row_params,
    sample_rows,
    num_known,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    PARAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    PADDED_STRIPS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = row_params + tl.load(sample_rows + sample).to(tl.int64) * PARAMS
    if (tl.load(row + f.ENDED) == 0) & is_filtered(row):
        blocks = tl.arange(0, PADDED_BLOCKS)
        block_tops = tl.load(largest + sample * BLOCKS + blocks, mask=blocks < BLOCKS, other=-_INF)
        top = tl.max(block_tops, 0)
        if (top > -_INF) & (top < _INF):
            block_weights = tl.load(weights + sample * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0)
            temperature = f.float_at(row + f.TEMPERATURE)
            total = tl.where(block_tops > -_INF, block_weights * tl.exp((block_tops - top) / temperature), 0.0)
            winner = sample_filtered(
                *(logits + sample * STRIDE, tops + sample * STRIPS, strips + sample * STRIPS),
                *(collected + sample * _MAX_COLLECTED, row, tl.load(num_known + sample), top, tl.sum(total, 0)),
                *(temperature, VOCAB, STRIPS, PADDED_STRIPS),
            )
            # The row's only winner: its other blocks have no score.
            tl.store(largest + sample * BLOCKS, top)
            tl.store(scores + sample * BLOCKS, 0.0)
            tl.store(winners + sample * BLOCKS, winner)


@triton.jit
def _best_block(
    ids,
    largest,
    scores,
    winners,
    row_params,
    sample_rows,
    PARAMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    row = row_params + tl.load(sample_rows + sample).to(tl.int64) * PARAMS
    if tl.load(row + f.ENDED) == 0:
        temperature = f.float_at(row + f.TEMPERATURE)
        tl.store(ids + sample, winner_of(largest, scores, winners, sample, temperature, BLOCKS, PADDED))
