"""Begin and end of a step on the GPU: the host's words become row changes and a batch, sampled ids go to the rows.

    words ──apply──► RowState ──prepare──► StepArrays ──model, sample──► ids ──finish──► RowState, result

The host sends one array of int32 words per step. Its first parts are at fixed offsets, the others where the header
says:

    header      HEADER words, see `Head`
    entries     rows [N] · starts [N] · counts [N] · offsets [N]        N is the maximum
    samples     tokens to sample an id after [S]                         S is the maximum
    then        runs [num_runs, 3] · numbers that runs copy · entries of tokens [num_tokens]

A run is (offset in `RowState.state`, length, offset in the words). Every row change is a few runs.

Shapes: as in kernels/triton/rows.py.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.kernels.triton.rows import Field, RowState, StepArrays

HEADER = 16
"""Words before the entries."""


class Head(IntEnum):
    """Words of the header."""

    NUM_TOKENS = 0
    NUM_ENTRIES = 1
    NUM_SAMPLES = 2
    NUM_RUNS = 3
    RUNS_AT = 4
    TOKENS_AT = 5
    """Offset of the tokens' entries; unused if each entry has one token."""
    RESULT_AT = 6
    """Offset of the step's result among the results; 0 while a step is captured."""


RUN_WORDS = 3
RUN_PROGRAMS = 32
RUN_BLOCK = 1024
BLOCK = 128
"""Tokens, entries or samples per program."""

DEAD = -2
"""Result of a sample whose row had ended before the step."""

STAMP_WORDS = 4
"""Before the results: begin and end of the step, each as u64 nanoseconds of the GPU's clock."""

_HEADER = tl.constexpr(HEADER)
_NUM_TOKENS, _NUM_ENTRIES = tl.constexpr(Head.NUM_TOKENS.value), tl.constexpr(Head.NUM_ENTRIES.value)
_NUM_SAMPLES, _NUM_RUNS = tl.constexpr(Head.NUM_SAMPLES.value), tl.constexpr(Head.NUM_RUNS.value)
_RUNS_AT, _TOKENS_AT = tl.constexpr(Head.RUNS_AT.value), tl.constexpr(Head.TOKENS_AT.value)
_RESULT_AT = tl.constexpr(Head.RESULT_AT.value)
_NUM_IDS, _ENDED = tl.constexpr(Field.NUM_IDS.value), tl.constexpr(Field.ENDED.value)
_NUM_STOPS, _ADAPTER = tl.constexpr(Field.NUM_STOPS.value), tl.constexpr(Field.ADAPTER.value)
_DEAD, _BLOCK_SIZE = tl.constexpr(DEAD), tl.constexpr(BLOCK_SIZE)


def result_words(max_num_samples: int) -> int:
    """Number of words of a result."""
    return STAMP_WORDS + 2 * max_num_samples


def words_of(max_num_rows: int, max_num_samples: int) -> int:
    """Number of words at fixed offsets."""
    return HEADER + 4 * max_num_rows + max_num_samples


def apply(rows: RowState, words: Tensor) -> None:
    """Apply the row changes in the host's words, of any length."""
    _apply[(RUN_PROGRAMS,)](rows.state, words, RUN_PROGRAMS, RUN_BLOCK, num_warps=4)


def prepare(
    step: StepArrays,
    rows: RowState,
    words: Tensor,
    stamps: Tensor,
    max_num_rows: int,
    one_each: bool,
    id_shift: int = 0,
) -> None:
    """Fill `step`, including padding, from the host's words. `stamps` [4] int32 gets the begin time. With `one_each`
    every entry has one token, as in a decode step. The id of a token is that of its position plus `id_shift`, and what
    is sampled after it is as much later."""
    num_tokens, num_entries, num_samples = step.num_tokens, step.num_entries, step.num_samples
    num_groups = 1 + len(step.others)
    apart = step.others[0].slots.storage_offset() - step.slots.storage_offset() if step.others else 0
    _prepare[(triton.cdiv(max(num_tokens, num_entries, num_samples), BLOCK),)](
        *(words, rows.params, rows.ids, rows.blocks, stamps),
        *(step.rows, step.starts, step.counts, step.offsets, step.ids, step.positions, step.slots),
        *(step.sampled, step.sample_rows, step.num_known, step.ids if step.adapters is None else step.adapters),
        *(num_tokens, num_entries, num_samples),
        max_num_rows,
        len(rows.params) - 1,
        rows.params.shape[1],
        rows.ids.shape[1],
        rows.blocks.shape[1],
        num_groups,
        apart,
        one_each,
        id_shift,
        step.adapters is not None,
        not INTERPRETED,
        BLOCK,
        num_warps=4,
    )


def finish(
    results: Tensor,
    drawn: Tensor,
    step: StepArrays,
    rows: RowState,
    words: Tensor,
    stamps: Tensor,
    *,
    appends: bool = True,
) -> None:
    """Append the sampled ids, `drawn` [S] int32, to their rows, and end the rows that stop or have no id. Without
    `appends` the rows stay as they are: the host verifies the ids, and sends what it keeps with the next step.

    The result is [STAMP_WORDS + 2S] int32 in `results`, where the words say: the stamps, the ids (`DEAD` if the row had
    ended before, NO_ID if there is none) and whether each id stops its row; 0 without `appends`. `results` may be the
    host's pinned memory: then no copy has to follow the step."""
    num_samples = step.num_samples
    _finish[(triton.cdiv(num_samples, BLOCK),)](
        *(results, drawn, words, rows.params, rows.ids, rows.stops, stamps, step.sample_rows, num_samples),
        rows.params.shape[1],
        rows.ids.shape[1],
        rows.stops.shape[1],
        appends,
        not INTERPRETED,
        BLOCK,
        num_warps=4,
    )


def times_of(result: Tensor) -> tuple[int, int]:
    """Begin and end of a result's step, in nanoseconds; 0 if kernels are interpreted."""
    began, ended = result[:STAMP_WORDS].view(torch.int64).tolist()
    return began, ended


@triton.jit
def _apply(state, words, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    num_runs = tl.load(words + _NUM_RUNS)
    runs = words + tl.load(words + _RUNS_AT)
    run = tl.program_id(0)
    while run < num_runs:  # the interpreter only supports range with constants
        target = tl.load(runs + 3 * run)
        length = tl.load(runs + 3 * run + 1)
        source = tl.load(runs + 3 * run + 2)
        begin = 0
        while begin < length:
            lanes = begin + tl.arange(0, BLOCK)
            numbers = tl.load(words + source + lanes, mask=lanes < length)
            tl.store(state + target + lanes, numbers, mask=lanes < length)
            begin += BLOCK
        run += NUM_PROGRAMS


@triton.jit(do_not_specialize=["num_tokens", "num_entries", "num_samples"])
def _prepare(
    words,
    row_params,
    row_ids,
    row_blocks,
    stamps,
    rows_out,
    starts_out,
    counts_out,
    offsets_out,
    ids_out,
    positions_out,
    slots_out,
    sampled_out,
    sample_rows_out,
    num_known_out,
    adapters_out,
    num_tokens,
    num_entries,
    num_samples,
    MAX_ROWS: tl.constexpr,
    PADDING_ROW: tl.constexpr,
    PARAMS: tl.constexpr,
    IDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    APART: tl.constexpr,
    ONE_EACH: tl.constexpr,
    ID_SHIFT: tl.constexpr,
    ADAPTERS: tl.constexpr,
    STAMPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if STAMPS and tl.program_id(0) == 0:
        tl.store(stamps.to(tl.pointer_type(tl.int64)), globaltimer())
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, starts = words + _HEADER, words + _HEADER + MAX_ROWS
    counts, offsets = words + _HEADER + 2 * MAX_ROWS, words + _HEADER + 3 * MAX_ROWS
    sampled_tokens = words + _HEADER + 4 * MAX_ROWS

    # Entries. Ended rows and padding have a count of 0.
    there = lanes < tl.load(words + _NUM_ENTRIES)
    row = tl.load(rows + lanes, mask=there, other=PADDING_ROW)
    lives = there & (tl.load(row_params + row.to(tl.int64) * PARAMS + _ENDED, mask=there, other=1) == 0)
    inside = lanes < num_entries
    tl.store(rows_out + lanes, row, mask=inside)
    tl.store(starts_out + lanes, tl.load(starts + lanes, mask=there, other=0), mask=inside)
    tl.store(counts_out + lanes, tl.where(lives, tl.load(counts + lanes, mask=there, other=0), 0), mask=inside)
    tl.store(offsets_out + lanes, tl.load(offsets + lanes, mask=there, other=0), mask=inside)

    # Tokens.
    there = lanes < tl.load(words + _NUM_TOKENS)
    if ONE_EACH:
        entry = lanes
    else:
        entry = tl.load(words + tl.load(words + _TOKENS_AT) + lanes, mask=there, other=0)
    row = tl.load(rows + entry, mask=there, other=PADDING_ROW).to(tl.int64)
    lives = there & (tl.load(row_params + row * PARAMS + _ENDED, mask=there, other=1) == 0)
    position = tl.load(starts + entry, mask=lives, other=0)
    position += lanes - tl.load(offsets + entry, mask=lives, other=0)
    position = tl.where(lives, position, 0)
    inside = lanes < num_tokens
    for group in tl.static_range(GROUPS):
        index = row * BLOCKS + group * (BLOCKS // GROUPS) + position // _BLOCK_SIZE
        block = tl.load(row_blocks + index, mask=lives, other=0).to(tl.int64)
        slot = tl.where(lives, block * _BLOCK_SIZE + position % _BLOCK_SIZE, -1)
        tl.store(slots_out + group * APART + lanes, slot, mask=inside)
    is_known = lives & (position + ID_SHIFT < IDS)
    tl.store(ids_out + lanes, tl.load(row_ids + row * IDS + position + ID_SHIFT, mask=is_known, other=0), mask=inside)
    tl.store(positions_out + lanes, position, mask=inside)
    if ADAPTERS:
        slot = tl.load(row_params + row * PARAMS + _ADAPTER, mask=lives, other=0) - 1
        tl.store(adapters_out + lanes, slot, mask=inside)

    # Samples.
    there = lanes < tl.load(words + _NUM_SAMPLES)
    token = tl.load(sampled_tokens + lanes, mask=there, other=0)
    if ONE_EACH:
        entry = token
    else:
        entry = tl.load(words + tl.load(words + _TOKENS_AT) + token, mask=there, other=0)
    known = tl.load(starts + entry, mask=there, other=0) + token - tl.load(offsets + entry, mask=there, other=0) + 1
    inside = lanes < num_samples
    tl.store(sampled_out + lanes, token, mask=inside)
    tl.store(sample_rows_out + lanes, tl.load(rows + entry, mask=there, other=PADDING_ROW), mask=inside)
    tl.store(num_known_out + lanes, tl.where(there, known + ID_SHIFT, 0), mask=inside)


@triton.jit(do_not_specialize=["num_samples"])
def _finish(
    results,
    drawn,
    words,
    row_params,
    row_ids,
    stops,
    stamps,
    sample_rows,
    num_samples,
    PARAMS: tl.constexpr,
    IDS: tl.constexpr,
    STOPS: tl.constexpr,
    APPENDS: tl.constexpr,
    STAMPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = lanes < tl.load(words + _NUM_SAMPLES)
    row = tl.load(sample_rows + lanes, mask=there, other=0).to(tl.int64)
    lives = there & (tl.load(row_params + row * PARAMS + _ENDED, mask=there, other=1) == 0)
    token = tl.load(drawn + lanes, mask=lives, other=_DEAD)
    stopped = tl.zeros((BLOCK,), tl.int32)
    if APPENDS:
        grows = lives & (token >= 0)
        num_ids = tl.load(row_params + row * PARAMS + _NUM_IDS, mask=grows, other=0)
        tl.store(row_ids + row * IDS + num_ids, token, mask=grows)
        tl.store(row_params + row * PARAMS + _NUM_IDS, num_ids + 1, mask=grows)
        num_stops = tl.load(row_params + row * PARAMS + _NUM_STOPS, mask=grows, other=0)
        most, i = tl.max(num_stops, 0), 0
        while i < most:
            stop = tl.load(stops + row * STOPS + i, mask=grows & (i < num_stops), other=-1)
            stopped |= (stop == token).to(tl.int32)
            i += 1
        stopped = tl.where(grows, stopped, 0)
        tl.store(row_params + row * PARAMS + _ENDED, 1, mask=lives & ((stopped == 1) | (token < 0)))
    result = results + tl.load(words + _RESULT_AT)
    inside = lanes < num_samples
    tl.store(result + 4 + lanes, token, mask=inside)
    tl.store(result + 4 + num_samples + lanes, stopped, mask=inside)
    if STAMPS and tl.program_id(0) == 0:
        began = tl.load(stamps.to(tl.pointer_type(tl.int64)))
        tl.store(result.to(tl.pointer_type(tl.int64)), began)
        tl.store(result.to(tl.pointer_type(tl.int64)) + 1, globaltimer())
