"""From logits to ids on the GPU: the largest logit, or the keyed race of kernels/sample.py.

Each block of a row's logits has a winner, and the best of those is the row's; greedy rows and drawn ones run beside
each other in the same launches:

    logits [S, V] ──_blocks──► largest, scores, winners [S, NB] ──_pick──► ids [S]

Where rows have filters there is one between the two: `_filter` finds what min_p, top_k and top_p leave of a row, each
of what the one before left, and draws among that alone. `_blocks` then only looks such a row through.

A score is (logit - the block's largest) / temperature - log(noise): so no temperature leads to an infinite one, though
no block knows the row's largest. `winner_of` makes up for the difference.

A row's size of blocks is always the same, so what is drawn does not depend on the batch. Rows that have ended, and
padding, cost a look.

Shapes: S samples, V vocabulary, NB blocks of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton import fields as f
from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.sampling.filters import is_filtered, sample_filtered
from pipeline.kernels.triton.sampling.noise import log_noise, noise_key
from pipeline.kernels.triton.sampling.threshold import MAX_COLLECTED, STRIP

BLOCK = 2048
"""Logits of a program: 63 programs for a vocabulary of 128k keep a GPU's memory half busy with one sample, and each of
four warps has four loads of 16 bytes under way. Reasoned, not measured."""

_COLD, _NO_ID = f.COLD, f.NO_CANDIDATE
_INF = tl.constexpr(float("inf"))
_STRIP, _MAX_COLLECTED = tl.constexpr(STRIP), tl.constexpr(MAX_COLLECTED)


class SamplingScratch:
    """Scratch memory between programs. Used by one call at a time."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.num_blocks = triton.cdiv(vocab_size, BLOCK)
        shape = max_samples, self.num_blocks
        self.largest = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; the largest logit"""
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; the winner's"""
        self.winners = torch.zeros(shape, dtype=torch.int32, device=device)
        """[S, NB]; NO_ID where no id is possible"""
        self.weights = torch.zeros(shape, dtype=torch.float32, device=device)
        """[S, NB]; of a row with filters: the sum of the softmax's weights, that of the block's largest being 1"""
        self.num_strips = self.num_blocks * (BLOCK // STRIP)
        self.tops = torch.zeros(max_samples, self.num_strips, dtype=torch.float32, device=device)
        """Of a row with filters: the largest logit of each strip."""
        self.strips = torch.zeros(max_samples, self.num_strips, dtype=torch.int32, device=device)
        self.collected = torch.zeros(max_samples, MAX_COLLECTED, dtype=torch.float32, device=device)


def sample(
    ids: Tensor, logits: Tensor, params: Tensor, sample_rows: Tensor, scratch: SamplingScratch, *, filtered: bool
) -> None:
    """Leave the next id of each row in ids [S] int32; NO_ID where nothing is possible, and what was there where the row
    has ended. logits [S, V] float32, which stay as they are; params as in `RowState`, sample_rows [S] int32. Without
    `filtered`, no row has top_k, top_p or min_p."""
    num = len(sample_rows)
    assert logits.shape[1] == scratch.vocab_size and num <= len(scratch.scores) and logits.stride(1) == 1
    _blocks[(scratch.num_blocks, num)](
        *(scratch.largest, scratch.scores, scratch.winners, scratch.weights, scratch.tops),
        *(logits, params, sample_rows),
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
            *(scratch.collected, logits, params, sample_rows),
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
    """The id of one sample, from what `_blocks` has left of it. PADDED is a power of two, BLOCKS or more."""
    places = tl.arange(0, PADDED)
    there = places < BLOCKS
    at = sample * BLOCKS + places
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
        # NaN, which is above nothing, has no probability.
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
            # Without meaning where the largest is infinite; it is not read then.
            tl.store(weights + at, tl.sum(tl.exp((logit - top) / temperature), 0))
            # `_filter` chooses the id.
            score = tl.where(is_random, -_INF, score)
        elif is_random:
            low, high = noise_key(tl.load(row + f.KEY_LOW), tl.load(row + f.KEY_HIGH), tl.load(row + f.NUM_IDS))
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
                *(collected + sample * _MAX_COLLECTED, row, top, tl.sum(total, 0), temperature),
                *(VOCAB, STRIPS, PADDED_STRIPS),
            )
            # The row's only winner: those of its other blocks have no score.
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
