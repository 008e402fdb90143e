"""Logits processors on the GPU, in place; kernels/sampling/logits_processors.py defines their meaning and order.

    _mask    one program per sample and block of the vocabulary: grammar mask · allowed ids
    _lists   one program per sample: bad words · no end before min_tokens · bias · penalties

Both skip samples without logits processors and ended rows, and read only the logits that they change. Repeated ids are
counted in memory that is zero before and after. The first program lane that finds a count changes the logit.

Shapes: S samples, V vocabulary, W = ceil(V / 32) words of a mask, R rows, L max_model_len.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.sampling.logits_processor_inputs import num_words
from pipeline.kernels.triton.sampling import fields as f

MASK_WORDS = 64
"""Words of a mask per program: 2048 logits."""
TILE = 1024
"""Ids of a list that are processed together."""
RUNS, RUN = 128, 16
"""Bad words that are compared together, and ids of each."""

_MASK_WORDS, _TILE, _RUNS, _RUN = map(tl.constexpr, (MASK_WORDS, TILE, RUNS, RUN))
_KNOWN = tl.constexpr(1 << 30)
"""Bit beside the count of an id that is in the prompt."""
_INF = tl.constexpr(float("inf"))


class LogitsProcessorScratch:
    """Scratch memory; one call at a time uses it."""

    def __init__(self, max_samples: int, vocab_size: int, device: torch.device | str) -> None:
        self.counts = torch.zeros(max_samples, vocab_size, dtype=torch.int32, device=device)
        """[S, V]; how often each id is in the output. Zero between calls."""


def apply_logits_processors(
    logits: Tensor,
    params: Tensor,
    list_memory: Tensor,
    ids: Tensor,
    sample_rows: Tensor,
    num_known: Tensor,
    masks: Tensor | None,
    masked: Tensor | None,
    scratch: LogitsProcessorScratch,
) -> None:
    """Apply the rows' logits processors to logits [S, V] float32, in place.

    params and ids [R, L] are those of `RowState`, with lists in `list_memory` (int32); sample_rows and num_known [S]
    int32 those of `StepArrays`. masks [S, W] int32 are the grammar masks, and masked [S] int32 is 1 for samples with a
    mask; None without grammars.
    """
    num, vocab_size = len(sample_rows), scratch.counts.shape[1]
    assert logits.shape[1] == vocab_size and num <= len(scratch.counts) and logits.stride(1) == 1
    words = num_words(vocab_size)
    has_masks = masks is not None and masked is not None
    # Any tensor replaces a missing one; it is not read.
    mask_arguments = (masks, masked) if has_masks else (list_memory, list_memory)
    mask_stride = masks.stride(0) if masks is not None else 0
    _mask[(triton.cdiv(words, MASK_WORDS), num)](
        *(logits, params, list_memory, sample_rows, *mask_arguments),
        logits.stride(0),
        vocab_size,
        params.shape[1],
        words,
        mask_stride,
        has_masks,
        num_warps=4,
    )
    _lists[(num,)](
        *(logits, params, list_memory, ids, sample_rows, num_known, *mask_arguments, scratch.counts),
        logits.stride(0),
        vocab_size,
        params.shape[1],
        ids.shape[1],
        words,
        mask_stride,
        has_masks,
        num_warps=8,
    )


@triton.jit
def _mask(
    logits,
    row_params,
    list_memory,
    sample_rows,
    masks,
    masked,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    PARAMS: tl.constexpr,
    WORDS: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = row_params + tl.load(sample_rows + sample).to(tl.int64) * PARAMS
    lives = tl.load(row + f.ENDED) == 0
    allowed_at = tl.where(tl.load(row + f.HAS_LOGITS_PROCESSORS) == 1, tl.load(row + f.ALLOWED_AT), -1)
    has_grammar = False
    if HAS_MASKS:
        has_grammar = tl.load(masked + sample) == 1
    if lives & (has_grammar | (allowed_at >= 0)):
        offsets = block * _MASK_WORDS + tl.arange(0, _MASK_WORDS)
        words = tl.full((_MASK_WORDS,), -1, tl.int32)
        if has_grammar:
            words &= tl.load(masks + sample * MASK_STRIDE + offsets, mask=offsets < WORDS, other=0)
        if allowed_at >= 0:
            words &= tl.load(list_memory + allowed_at + offsets, mask=offsets < WORDS, other=0)
        bits = tl.arange(0, 32)
        ids = offsets[:, None] * 32 + bits[None, :]
        forbidden = ((words[:, None] >> bits[None, :]) & 1) == 0
        tl.store(logits + sample * STRIDE + ids, tl.full(ids.shape, -_INF, tl.float32), mask=forbidden & (ids < VOCAB))


@triton.jit
def _lists(
    logits,
    row_params,
    list_memory,
    row_ids,
    sample_rows,
    num_known,
    masks,
    masked,
    counts,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    PARAMS: tl.constexpr,
    MAX_IDS: tl.constexpr,
    WORDS: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    HAS_MASKS: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    at = tl.load(sample_rows + sample).to(tl.int64)
    row = row_params + at * PARAMS
    if (tl.load(row + f.ENDED) == 0) & (tl.load(row + f.HAS_LOGITS_PROCESSORS) == 1):
        logits += sample * STRIDE
        ids = row_ids + at * MAX_IDS
        num_ids, num_prompt = tl.load(num_known + sample), tl.load(row + f.NUM_PROMPT)
        num_output = num_ids - num_prompt
        _forbid_runs(
            logits, list_memory + tl.load(row + f.RUNS_AT), tl.load(row + f.NUM_RUNS), ids, num_ids, num_output
        )
        if num_output < tl.load(row + f.MIN_TOKENS):
            enders, num_enders = list_memory + tl.load(row + f.ENDERS_AT), tl.load(row + f.NUM_ENDERS)
            has_grammar, must_end = False, False
            if HAS_MASKS:
                has_grammar = tl.load(masked + sample) == 1
            if has_grammar:
                must_end = _allows_only(masks + sample * MASK_STRIDE, enders, num_enders, WORDS)
            if must_end == 0:
                _forbid(logits, enders, num_enders)
        # From here on, threads read logits that other threads wrote.
        tl.debug_barrier()
        _bias(logits, list_memory + tl.load(row + f.BIAS_AT), tl.load(row + f.NUM_BIAS))
        tl.debug_barrier()
        _penalize(logits, counts + sample * VOCAB, ids, num_prompt, num_ids, row, VOCAB)


@triton.jit
def _forbid_runs(logits, runs, num_runs, ids, num_ids, num_output):
    """Set the logit of each bad word's last id to -inf if the output ends with its other ids. Words are compared in
    groups, from the last of these ids back, until none of a group can match."""
    lanes, steps = tl.arange(0, _RUNS), tl.arange(0, _RUN)
    for first in range(0, num_runs, _RUNS):
        begin = tl.load(runs + first + lanes, mask=first + lanes < num_runs, other=0)
        end = tl.load(runs + first + lanes + 1, mask=first + lanes < num_runs, other=0)
        num_before = end - begin - 1
        same = ((num_before >= 0) & (num_before <= num_output + 1)).to(tl.int32)
        compared = 0
        left = tl.max(num_before * same, 0)
        while compared < left:
            back = compared + steps
            inside = (back[None, :] < num_before[:, None]) & (same[:, None] == 1)
            word = tl.load(runs + (end - 2)[:, None] - back[None, :], mask=inside, other=0)
            # What stands before the output is BEGIN.
            said = tl.load(ids + num_ids - 1 - back, mask=back < num_output, other=-1)
            same *= (tl.sum((inside & (word != said[None, :])).to(tl.int32), 1) == 0).to(tl.int32)
            left = tl.max(num_before * same, 0)
            compared += _RUN
        last = tl.load(runs + end - 1, mask=same == 1, other=0)
        tl.store(logits + last, tl.full((_RUNS,), -_INF, tl.float32), mask=same == 1)


@triton.jit
def _forbid(logits, ids, num):
    for begin in range(0, num, _TILE):
        offsets = begin + tl.arange(0, _TILE)
        token = tl.load(ids + offsets, mask=offsets < num, other=0)
        tl.store(logits + token, tl.full((_TILE,), -_INF, tl.float32), mask=offsets < num)


@triton.jit
def _allows_only(mask, ids, num, WORDS: tl.constexpr):
    """Whether a mask allows only ids of this list, which has no duplicates."""
    num_others = 0
    for begin in range(0, WORDS, _TILE):
        offsets = begin + tl.arange(0, _TILE)
        num_others += tl.sum(_num_bits(tl.load(mask + offsets, mask=offsets < WORDS, other=0)), 0)
    for begin in range(0, num, _TILE):
        offsets = begin + tl.arange(0, _TILE)
        token = tl.load(ids + offsets, mask=offsets < num, other=0)
        word = tl.load(mask + token // 32, mask=offsets < num, other=0)
        num_others -= tl.sum((word >> (token % 32)) & 1, 0)
    return num_others == 0


@triton.jit
def _num_bits(words):
    """Number of set bits in each int32 (Warren, "Hacker's Delight", 5-1)."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return ((words + (words >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _bias(logits, bias, num):
    """Add the values that follow the `num` ids, which have no duplicates."""
    for begin in range(0, num, _TILE):
        offsets = begin + tl.arange(0, _TILE)
        token = tl.load(bias + offsets, mask=offsets < num, other=0)
        value = tl.load(bias + num + offsets, mask=offsets < num, other=0).to(tl.float32, bitcast=True)
        logit = tl.load(logits + token, mask=offsets < num, other=0.0)
        tl.store(logits + token, logit + value, mask=offsets < num)


@triton.jit
def _penalize(logits, counts, ids, num_prompt, num_ids, row, VOCAB: tl.constexpr):
    """Apply the penalties of kernels/sampling/penalties.py."""
    repetition, presence = f.float_at(row + f.REPETITION), f.float_at(row + f.PRESENCE)
    frequency = f.float_at(row + f.FREQUENCY)
    if (repetition != 1) | (presence != 0) | (frequency != 0):
        first = tl.where(repetition == 1, num_prompt, 0)
        for begin in range(first, num_ids, _TILE):
            offsets = begin + tl.arange(0, _TILE)
            token = tl.load(ids + offsets, mask=offsets < num_ids, other=-1)
            inside = (token >= 0) & (token < VOCAB)
            said = offsets >= num_prompt
            tl.atomic_add(counts + token, tl.full((_TILE,), 1, tl.int32), mask=inside & said, sem="relaxed")
            prompt = inside & (offsets < num_prompt)
            tl.atomic_or(counts + token, tl.full((_TILE,), _KNOWN, tl.int32), mask=prompt, sem="relaxed")
        tl.debug_barrier()
        for begin in range(first, num_ids, _TILE):
            offsets = begin + tl.arange(0, _TILE)
            token = tl.load(ids + offsets, mask=offsets < num_ids, other=-1)
            inside = (token >= 0) & (token < VOCAB)
            # Of several lanes with the same id, one finds the count; it leaves zero for the next call.
            found = tl.atomic_xchg(counts + token, tl.zeros((_TILE,), tl.int32), mask=inside, sem="relaxed")
            is_first = inside & (found != 0)
            num_said = found & (_KNOWN - 1)
            logit = tl.load(logits + token, mask=is_first, other=0.0)
            logit = tl.where(logit > 0, logit / repetition, logit * repetition)
            said = (logit - frequency * num_said.to(tl.float32)) - presence
            tl.store(logits + token, tl.where(num_said > 0, said, logit), mask=is_first)
