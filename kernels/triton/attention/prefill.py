"""Paged attention: causal or up to `StepArrays.key_ends`, with grouped heads, optionally with a sliding window. A
decode step is one launch. Other steps have one launch for entries of few tokens, one for those of some, and one for
chunks.

A tile's rows are the tokens of a query block x the heads of a group, so a group reads its keys once. A program goes
through its piece of the step (see tasks.py), one tile of keys after the other, with a running softmax (Milakov and
Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135): scores are base-2 exponents, sums float32.

A program writes a unit that it computes alone to `out`. For a shared unit each program stores a partial result: sums,
largest scores and weights. The last program to arrive combines them in the order of their keys, so the result does not
depend on which one it is, and no program waits. Partial results bypass the L1 caches. A barrier orders a program's
stores before its arrival, which releases them, and the last arrival acquires them.

The cost has no steps: grid and division have no threshold in the number of rows, and an entry's tiles depend only on
its own tokens. As many tokens as a narrow tile holds (5 with 3 heads per group, 4 with 4) cost as much as one, because
the tile has 16 rows in any case. More go to a tile of 64 rows, which is bound by the same bytes.

Keys outside every row's range are not loaded. They may hold NaN of an earlier sequence, and 0 x NaN is NaN. Those of
later tokens of the step are loaded with the tile, and their values that are not finite replaced. Each row has its own
sums, so a NaN stays in its sequence, and behind the token that it comes from: the blocks before it may be shared.

Seen in the machine code for sm_90 (nothing has been timed): keys and values are copied 16 bytes per thread, bypassing
registers, two tiles ahead; a tile's block ids are loaded one tile before its keys; wide tiles multiply by groups of
four warps (HGMMA), narrow ones by single warps (HMMA).

Shapes: T tokens, Q query heads, K key-value heads, D head_dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.tasks import CUT_FIELDS, ENTRY_FIELDS, AttentionTasks, TaskList, check_cache
from pipeline.kernels.triton.attention.tiles import (
    add_sinks,
    attend_tiles,
    leave,
    load_blocks,
    load_entry,
    load_of_heads,
    load_piece,
    next_unit,
    tiles_of_unit,
)
from pipeline.kernels.triton.kv_cache import as_scales, is_quantized, scale_bytes_of
from pipeline.kernels.triton.launch import UPCAST_DOT, next_power_of_2
from pipeline.kernels.triton.rows import StepArrays


def attend(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    step: StepArrays,
    tasks: AttentionTasks,
    sinks: Tensor | None = None,
) -> None:
    """Attend from the step's queries to their rows' keys and values, which must all be in the cache.

    out and queries [T, Q * D]; keys and values [num_blocks, K, BLOCK_SIZE, D]; all of one dtype, or keys and values in
    8 bits (kv_cache.py). `tasks` must be planned for this step. `sinks` [Q] float32 are scores of each head that take
    part in the softmax, without a value; `tasks.form` says whether there are any. `out` is not written for padding and
    ended rows.
    """
    check_cache(keys, values, tasks)
    assert out.shape == queries.shape == (step.num_tokens, tasks.num_heads * tasks.head_dim)
    assert out.is_contiguous() and queries.is_contiguous()
    assert out.dtype == queries.dtype and (out.dtype == keys.dtype or is_quantized(keys))
    for task_list in tasks.lists:
        _attend_kernel[(task_list.num_programs,)](
            out,
            queries,
            keys,
            values,
            as_scales(keys),
            as_scales(values),
            step.blocks,
            step.blocks.stride(0),
            task_list.cuts,
            task_list.entries,
            task_list.arrivals,
            tasks.scratch.sums,
            tasks.scratch.scales,
            *vectors_of(tasks, sinks),
            step.positions if step.key_ends is None else step.key_ends,
            ENDS=step.key_ends is not None,
            WINDOW_AFTER=-1 if tasks.window_after is None else tasks.window_after,
            SINGLE_LOOP=task_list in (tasks.few, tasks.narrow),
            num_warps=task_list.tile.num_warps,
            num_stages=task_list.tile.num_stages,
            **constants(task_list, tasks, keys, task_list.tile.rows, task_list.tile.combined),
        )


def vectors_of(tasks: AttentionTasks, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The slopes of ALiBi and the sinks; any tensor if there are none."""
    assert (sinks is not None) == tasks.form.has_sinks
    unused = tasks.scratch.scales
    return unused if tasks.slopes is None else tasks.slopes, unused if sinks is None else sinks


def constants(
    task_list: TaskList, tasks: AttentionTasks, keys: Tensor, num_rows: int, combined: int
) -> dict[str, int | float | str]:
    """The constants of both attention kernels. To combine partial results, `num_rows` rows of each are read, `combined`
    numbers at a time."""
    tile = task_list.tile
    dims = max(16, next_power_of_2(tasks.head_dim))
    part_dims = min(dims, max(16, combined // num_rows))
    return {
        "SCALE": tasks.scale,
        "CAP": tasks.cap,
        "ALIBI": tasks.slopes is not None,
        "SINKS": tasks.form.has_sinks,
        "NUM_HEADS": tasks.num_heads,
        "NUM_KV_HEADS": tasks.num_kv_heads,
        "GROUP": tasks.group,
        "HEAD_DIM": tasks.head_dim,
        "DIMS": dims,
        "BLOCK_SIZE": BLOCK_SIZE,
        "SCALE_BYTES": scale_bytes_of(keys),
        "WINDOW": tasks.window or 0,
        "BLOCK_M": tile.rows,
        "BLOCK_Q": tasks.tokens_of(tile),
        "BLOCK_N": tile.keys,
        "PARTS": max(1, combined // (num_rows * part_dims)),
        "PART_DIMS": part_dims,
        "CUT_FIELDS": CUT_FIELDS,
        "ENTRY_FIELDS": ENTRY_FIELDS,
        "PRECISION": "tf32x3",  # nearly exact for float32
        "UPCAST": UPCAST_DOT,
    }


@triton.jit
def _attend_kernel(
    out,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    block_tables,
    blocks_stride,
    cuts,
    list_entries,
    arrivals,
    part_sums,
    part_scales,
    slopes,
    sinks,
    key_ends,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    ENDS: tl.constexpr,
    WINDOW_AFTER: tl.constexpr,
    SINGLE_LOOP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    PART_DIMS: tl.constexpr,
    CUT_FIELDS: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    first, begin_cut, end_cut, num_units = load_piece(cuts, CUT_FIELDS)
    rank, head, block = first
    row, start, count, offset = load_entry(cuts + tl.program_id(0) * CUT_FIELDS + 8)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    for index in tl.range(0, num_units, disable_licm=True):
        next_rank, next_head, next_block = next_unit(rank, head, block, (count + BLOCK_Q - 1) // BLOCK_Q, NUM_KV_HEADS)
        next_row, next_start, next_count, next_offset = load_entry(list_entries + next_rank * ENTRY_FIELDS)
        table = block_tables + row.to(tl.int64) * blocks_stride
        first_token = block * BLOCK_Q
        end_token = tl.minimum(first_token + BLOCK_Q, count)
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(start + first_token - WINDOW + 1, 0)
        tokens = first_token + rows // GROUP
        present = (rows < BLOCK_Q * GROUP) & (tokens < end_token)
        positions = start + tokens
        end_key = start + end_token
        row_ends = positions + 1
        if ENDS:
            row_ends = tl.load(key_ends + offset + tokens, mask=present, other=0)
            if WINDOW_AFTER >= 0:
                row_ends = tl.minimum(row_ends, positions + 1 + WINDOW_AFTER)
            end_key = tl.max(tl.where(present, row_ends, 0))

        is_begun = (index == 0) & (begin_cut[1] >= 0)
        is_cut = (index == num_units - 1) & (end_cut[1] >= 0)
        first_tile, end_tile, first_inside, num_inside = tiles_of_unit(
            first_key, end_key, is_begun, is_cut, begin_cut, end_cut, BLOCK_N
        )
        if ENDS:  # the plan knows the most keys that the unit can have
            end_tile = tl.maximum(tl.minimum(end_tile, (end_key + BLOCK_N - 1) // BLOCK_N), first_tile)

        # Before the queries, so that both latencies overlap.
        blocks = load_blocks(table, first_tile, first_key, end_key, BLOCK_SIZE, BLOCK_N)
        at = (offset + tokens).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + (head * GROUP + rows % GROUP) * HEAD_DIM
        mask = present[:, None] & (dims < HEAD_DIM)[None, :]
        query = tl.load(queries + at[:, None] + dims[None, :], mask=mask, other=0.0)

        sums = tl.zeros([BLOCK_M, DIMS], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if SINGLE_LOOP:
            weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            weights = tl.zeros([BLOCK_M], tl.float32)
        row_heads = head * GROUP + rows % GROUP
        row_slopes = load_of_heads(slopes, row_heads, present, ALIBI)
        head_at = head * (BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES))
        head_keys, head_values = keys + head_at, values + head_at
        head_key_scales, head_value_scales = key_scales + head_at // 2, value_scales + head_at // 2
        masked_tile = first_tile
        if not (SINGLE_LOOP or (ENDS and WINDOW > 0)):
            # Tiles that all rows attend to completely need no mask: those up to the first token's position, or the
            # first end, and, with a window, after the last token's first key. With a window and ends, there would be
            # too few registers.
            full_tile = first_tile
            common_end = start + first_token + 1
            if ENDS:
                common_end = tl.min(tl.where(present, row_ends, 2**30))
            full_end = tl.maximum(tl.minimum(common_end // BLOCK_N, end_tile), first_tile)
            if WINDOW > 0:
                full_tile = tl.maximum(start + end_token - WINDOW + BLOCK_N - 1, 0) // BLOCK_N
                full_tile = tl.minimum(tl.maximum(full_tile, first_tile), end_tile)
                full_end = tl.maximum(full_end, full_tile)
                sums, largest, weights = attend_tiles(
                    sums, largest, weights, query, head_keys, head_values, head_key_scales, head_value_scales, table,
                    blocks, first_tile, full_tile, first_key, end_key, positions, row_ends, row_slopes, SCALE, CAP,
                    ALIBI, True, True, SINGLE_LOOP, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, SCALE_BYTES, WINDOW,
                    BLOCK_N, PRECISION, UPCAST,
                )  # fmt: skip
                blocks = load_blocks(table, full_tile, first_key, end_key, BLOCK_SIZE, BLOCK_N)
            sums, largest, weights = attend_tiles(
                sums, largest, weights, query, head_keys, head_values, head_key_scales, head_value_scales, table,
                blocks, full_tile, full_end, first_key, end_key, positions, row_ends, row_slopes, SCALE, CAP, ALIBI,
                False, False, SINGLE_LOOP, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, SCALE_BYTES, WINDOW, BLOCK_N,
                PRECISION, UPCAST,
            )  # fmt: skip
            masked_tile = full_end
            blocks = load_blocks(table, masked_tile, first_key, end_key, BLOCK_SIZE, BLOCK_N)
        sums, largest, weights = attend_tiles(
            sums, largest, weights, query, head_keys, head_values, head_key_scales, head_value_scales, table, blocks,
            masked_tile, end_tile, first_key, end_key, positions, row_ends, row_slopes, SCALE, CAP, ALIBI, True, True,
            SINGLE_LOOP, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, SCALE_BYTES, WINDOW, BLOCK_N, PRECISION, UPCAST,
        )  # fmt: skip
        if SINGLE_LOOP:
            weights = tl.sum(weights, 1)
        if SINKS:  # noqa: SIM102
            if not is_cut:  # the outer condition is a constant of the kernel
                row_sinks = load_of_heads(sinks, row_heads, present, SINKS)
                sums, largest, weights = add_sinks(sums, largest, weights, row_sinks)
        leave(
            out + at, present, out + at, present, sums, largest, weights, is_begun, first_inside, num_inside, arrivals,
            part_sums, part_scales, HEAD_DIM, DIMS, BLOCK_M, BLOCK_M, PARTS, PART_DIMS,
        )  # fmt: skip
        rank, head, block = next_rank, next_head, next_block
        row, start, count, offset = next_row, next_start, next_count, next_offset
