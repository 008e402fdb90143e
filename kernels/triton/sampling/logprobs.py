"""Logprobs on the GPU, as in kernels/sampling/logprobs.py: log probabilities by the model's own logits, and the top
ids.

Logits processors modify the logits in place before sampling, so logprobs need two launches: `top_logprobs` before
that, and `token_logprobs` when the ids are known. The latter needs one logit per row. If logits processors run,
`top_logprobs` keeps a copy of the rows with logprobs.

    logits ──_block_stats──► blocks' and strips' largest, weights ──_top_logprobs──► normalizer, top ids
                                                                     given ids ──_given_logprobs──► instead of top ids
                                                        ids, logits or copy ──_token_logprobs──► the ids' own

A record is a row of words: its id's log probability (float32), `most` ids (int32), and `most` log probabilities. A
sample that requests fewer fills the first of each; one that requests more gets `most`. Missing ids are -1, with -inf.

Shapes: S samples, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.sampling.sample import BLOCK
from pipeline.kernels.triton.sampling.threshold import (
    MAX_COLLECTED,
    STRIP,
    TILE_STRIPS,
    code_of,
    list_strips,
    load_strips,
    search,
    value_of,
)

FEW = 32
"""Top ids in the variant for few."""
RANKED = 8
"""Ids that are compared with all others at a time."""
SAMPLES = 32
"""Samples per program of `_token_logprobs`."""

_STRIP, _MAX_COLLECTED, _RANKED = tl.constexpr(STRIP), tl.constexpr(MAX_COLLECTED), tl.constexpr(RANKED)
_INF = tl.constexpr(float("inf"))


class LogprobScratch:
    """Memory between the two launches, for up to `max_samples` samples with up to `max_top` top ids. With `keeps` it
    has room for a copy of the logits."""

    def __init__(
        self, max_samples: int, vocab_size: int, max_top: int, device: torch.device | str, *, keeps: bool = True
    ) -> None:
        def floats(*shape: int) -> Tensor:
            return torch.zeros(max_samples, *shape, dtype=torch.float32, device=device)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(max_samples, *shape, dtype=torch.int32, device=device)

        self.vocab_size = vocab_size
        self.num_blocks = triton.cdiv(vocab_size, BLOCK)
        self.num_strips = self.num_blocks * (BLOCK // STRIP)
        self.largest = floats(self.num_blocks)
        self.weights = floats(self.num_blocks)
        """Sums of the softmax weights, relative to each block's largest."""
        self.tops = floats(self.num_strips)
        """The largest logit of each strip."""
        self.strips = ints(self.num_strips)
        self.collected = floats(MAX_COLLECTED)
        self.max_top = max_top
        self.found_ids = ints(next_power_of_2(max(max_top, FEW)))
        self.found = floats(next_power_of_2(max(max_top, FEW)))
        self.normalizers = floats(2)
        """The largest logit, and the logarithm of the sum of all weights relative to it."""
        self.kept = floats(vocab_size if keeps else 0)
        """[S, V]; the logits of samples with logprobs, before logits processors"""


def top_logprobs(
    out: Tensor, logits: Tensor, num_top: Tensor, max_top: int, scratch: LogprobScratch, *, keep: bool
) -> None:
    """Write all of each record in out [S, 1 + 2 most] int32 except its first word. logits [S, V] float32. num_top [S]
    int32 is the number of top ids of each sample, at most `max_top`; -1 for no logprobs, whose words are not written.
    With `keep`, the logits are copied to `scratch.kept`."""
    num, most = len(num_top), (out.shape[1] - 1) // 2
    assert logits.shape[1] == scratch.vocab_size and num <= len(scratch.found) and logits.stride(1) == 1
    assert max_top <= min(most, scratch.max_top) and (not keep or scratch.kept.shape[1] == scratch.vocab_size)
    _block_stats[(scratch.num_blocks, num)](
        *(scratch.largest, scratch.weights, scratch.tops, scratch.kept, logits, num_top),
        logits.stride(0),
        scratch.vocab_size,
        scratch.num_blocks,
        keep,
        BLOCK,
        num_warps=4,
    )
    _top_logprobs[(num,)](
        *(out, scratch.normalizers, scratch.found, scratch.found_ids, scratch.largest, scratch.weights),
        *(scratch.tops, scratch.strips, scratch.collected, logits, num_top),
        out.stride(0),
        most,
        logits.stride(0),
        scratch.vocab_size,
        scratch.num_blocks,
        next_power_of_2(scratch.num_blocks),
        scratch.num_strips,
        next_power_of_2(scratch.num_strips),
        # Only two variants, for any request.
        FEW if max_top <= FEW else scratch.found.shape[1],
        scratch.found.shape[1],
        num_warps=16,
    )


def given_logprobs(out: Tensor, logits: Tensor, given: Tensor, scratch: LogprobScratch) -> None:
    """Write given ids and their log probabilities to out [S, 1 + 2 most] int32. Call it after `top_logprobs`, with the
    same logits [S, V]. given [S, G] int32, with G at most `most`; -1 ends a sample's ids."""
    num, num_given = given.shape
    _given_logprobs[(num, triton.cdiv(num_given, SAMPLES))](
        *(out, scratch.normalizers, logits, given, num_given, out.stride(0), (out.shape[1] - 1) // 2),
        logits.stride(0),
        SAMPLES,
        num_warps=1,
    )


def token_logprobs(out: Tensor, logits: Tensor, ids: Tensor, num_top: Tensor, scratch: LogprobScratch) -> None:
    """Write the first word of each record: the log probability of ids [S] int32. Call it after `top_logprobs`, with the
    same logits [S, V] or with `scratch.kept`. Ids below 0 are skipped."""
    num = len(num_top)
    _token_logprobs[(triton.cdiv(num, SAMPLES),)](
        *(out, scratch.normalizers, logits, ids, num_top, num, out.stride(0)),
        logits.stride(0),
        SAMPLES,
        num_warps=1,
    )


@triton.jit
def _logprob(logit, top, log_total):
    """Log probability of an id with this logit, which is not NaN. If `top` is infinite, 0 for its ids, else -inf."""
    is_finite = (top > -_INF) & (top < _INF)
    return tl.where(is_finite, (logit - top) - log_total, tl.where(logit == top, 0.0, -_INF))


@triton.jit
def _block_stats(
    largest,
    weights,
    tops,
    kept,
    logits,
    num_top,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(num_top + sample) >= 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + sample * STRIDE + ids, mask=ids < VOCAB, other=-_INF)
        if KEEP:
            tl.store(kept + sample * VOCAB + ids, logit, mask=ids < VOCAB)
        logit = tl.where(logit > -_INF, logit, -_INF)
        top = tl.max(logit, 0)
        at = sample * BLOCKS + block
        tl.store(largest + at, top)
        # Undefined if the largest is infinite; it is not read then.
        tl.store(weights + at, tl.sum(tl.exp(logit - top), 0))
        strip = at * (BLOCK // _STRIP) + tl.arange(0, BLOCK // _STRIP)
        tl.store(tops + strip, tl.max(tl.reshape(logit, (BLOCK // _STRIP, _STRIP)), 1))


@triton.jit(do_not_specialize=["out_stride", "most"])
def _top_logprobs(
    out,
    normalizers,
    found,
    found_ids,
    largest,
    weights,
    tops,
    strips,
    collected,
    logits,
    num_top,
    out_stride,
    most,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    PADDED_STRIPS: tl.constexpr,
    PADDED_MOST: tl.constexpr,
    FOUND_STRIDE: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    wanted = tl.minimum(tl.load(num_top + sample), most)
    if wanted >= 0:
        blocks = tl.arange(0, PADDED_BLOCKS)
        block_tops = tl.load(largest + sample * BLOCKS + blocks, mask=blocks < BLOCKS, other=-_INF)
        block_weights = tl.load(weights + sample * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0)
        top = tl.max(block_tops, 0)
        total = tl.sum(tl.where(block_tops > -_INF, block_weights * tl.exp(block_tops - top), 0.0), 0)
        log_total = tl.log(tl.where((top > -_INF) & (top < _INF), total, 1.0))
        tl.store(normalizers + 2 * sample, top)
        tl.store(normalizers + 2 * sample + 1, log_total)
        if wanted > 0:
            _find(
                *(found + sample * FOUND_STRIDE, found_ids + sample * FOUND_STRIDE, logits + sample * STRIDE),
                *(tops + sample * STRIPS, strips + sample * STRIPS, collected + sample * _MAX_COLLECTED),
                *(top, tl.minimum(wanted, VOCAB), VOCAB, STRIPS, PADDED_STRIPS),
            )
            _write_ranked(
                *(out + sample * out_stride + 1, found + sample * FOUND_STRIDE, found_ids + sample * FOUND_STRIDE),
                *(wanted, tl.minimum(wanted, VOCAB), top, log_total, most, PADDED_MOST),
            )


@triton.jit
def _find(
    found,
    found_ids,
    logits,
    tops,
    strips,
    collected,
    top,
    num,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write the `num` top ids, unordered, and their logits. Ties at the threshold go to the lowest ids."""
    offsets = tl.arange(0, PADDED)
    strip_tops = tl.load(tops + offsets, mask=offsets < STRIPS, other=-_INF)
    low = code_of(tl.full([], -_INF, tl.float32)).to(tl.int64)
    low = search(logits, strip_tops, strips, collected, low, top, 1.0, False, num.to(tl.float32), VOCAB, STRIPS)
    least = value_of(low)
    num_strips = list_strips(strips, strip_tops, low, STRIPS)
    num_found = 0
    # Fewer than `num` are above the threshold; the lowest ids at it fill up.
    for turn in range(2):
        for begin in range(0, num_strips, TILE_STRIPS):
            values, ids, there = load_strips(logits, strips, begin, num_strips, VOCAB)
            wanted = (there & tl.where(turn == 0, values > least, values == least)).to(tl.int32)
            at = num_found + tl.cumsum(wanted, 0) - 1
            is_kept = (wanted == 1) & (at < num)
            tl.store(found + at, values, mask=is_kept)
            tl.store(found_ids + at, ids, mask=is_kept)
            num_found += tl.sum(wanted, 0)
    tl.debug_barrier()


@triton.jit
def _write_ranked(out, found, found_ids, wanted, num, top, log_total, most, PADDED: tl.constexpr):
    """Write `num` ids and their log probabilities, likeliest first, and fill the rest with -1 and -inf."""
    offsets = tl.arange(0, PADDED)
    values = tl.load(found + offsets, mask=offsets < num, other=-_INF)
    ids = tl.load(found_ids + offsets, mask=offsets < num, other=-1)
    # An id's rank is the number of ids before it.
    rank = tl.zeros((PADDED,), tl.int32)
    for begin in range(0, num, _RANKED):
        others = begin + tl.arange(0, _RANKED)
        value = tl.load(found + others, mask=others < num, other=-_INF)
        other = tl.load(found_ids + others, mask=others < num, other=-1)
        is_before = value[None, :] > values[:, None]
        is_before |= (value[None, :] == values[:, None]) & (other[None, :] < ids[:, None])
        rank += tl.sum((is_before & (others < num)[None, :]).to(tl.int32), 1)
    rank = tl.where(offsets < num, rank, offsets)
    logprobs = tl.where(offsets < num, _logprob(values, top, log_total), -_INF)
    tl.store(out + rank, ids, mask=offsets < wanted)
    tl.store(out + most + rank, logprobs.to(tl.int32, bitcast=True), mask=offsets < wanted)


@triton.jit(do_not_specialize=["num_given", "out_stride", "most"])
def _given_logprobs(
    out,
    normalizers,
    logits,
    given,
    num_given,
    out_stride,
    most,
    STRIDE: tl.constexpr,
    IDS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * IDS + tl.arange(0, IDS)
    ids = tl.load(given + sample * num_given + offsets, mask=offsets < num_given, other=-1)
    is_given = ids >= 0
    logit = tl.load(logits + sample * STRIDE + ids, mask=is_given, other=-_INF)
    logit = tl.where(logit > -_INF, logit, -_INF)
    top = tl.load(normalizers + 2 * sample)
    log_total = tl.load(normalizers + 2 * sample + 1)
    record = out + sample * out_stride + 1
    tl.store(record + offsets, ids, mask=is_given)
    tl.store(record + most + offsets, _logprob(logit, top, log_total).to(tl.int32, bitcast=True), mask=is_given)


@triton.jit(do_not_specialize=["num", "out_stride"])
def _token_logprobs(
    out,
    normalizers,
    logits,
    ids,
    num_top,
    num,
    out_stride,
    STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    samples = tl.program_id(0) * SAMPLES + tl.arange(0, SAMPLES)
    has_logprobs = tl.load(num_top + samples, mask=samples < num, other=-1) >= 0
    token = tl.load(ids + samples, mask=has_logprobs, other=-1)
    has_logprobs &= token >= 0
    at = samples.to(tl.int64)
    logit = tl.load(logits + at * STRIDE + token, mask=has_logprobs, other=-_INF)
    logit = tl.where(logit > -_INF, logit, -_INF)
    top = tl.load(normalizers + 2 * at, mask=has_logprobs, other=0.0)
    log_total = tl.load(normalizers + 2 * at + 1, mask=has_logprobs, other=0.0)
    tl.store(out + at * out_stride, _logprob(logit, top, log_total).to(tl.int32, bitcast=True), mask=has_logprobs)
