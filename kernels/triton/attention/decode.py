"""Rotary embedding, the write of keys and values, and attention in one launch, for decode steps.

In a step of a single token, a small model spends most of its time on launches. Here each program computes the queries
of its unit itself, from the linear layer's split-K partials. With one token per entry, only programs that share a unit
compute them more than once.

The program with the unit's last keys adds the token's own key and value from registers, as one more column after the
tiles, and writes them to the cache. All others only read keys before the token's position. So no program reads what
another one writes in the same launch, and no synchronization is needed. Key and value are rounded as in the cache, so
that the next step sees the same numbers.

Shapes: P split-K partials, T tokens, Q query heads, K key-value heads, D head_dim, L max_model_len.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.activations import tanh
from pipeline.kernels.triton.attention.hadamard import transform_heads
from pipeline.kernels.triton.attention.prefill import constants, vectors_of
from pipeline.kernels.triton.attention.tasks import AttentionTasks, check_cache
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
from pipeline.kernels.triton.inputs import sum_partials, wait_and_launch_next
from pipeline.kernels.triton.kv_cache import as_scales, is_quantized, quantize
from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.rotary import NO_GROWTH, HeadNorms, QueryGrowth, query_factor
from pipeline.kernels.triton.rows import StepArrays


def attend_decode(
    out: Tensor,
    split_k_partials: Tensor,
    cos: Tensor,
    sin: Tensor,
    step: StepArrays,
    keys: Tensor,
    values: Tensor,
    tasks: AttentionTasks,
    head_norms: HeadNorms | None,
    center: Tensor | None = None,
    sinks: Tensor | None = None,
    growth: QueryGrowth = NO_GROWTH,
    *,
    pdl: bool = False,
) -> None:
    """`rotary_write` and `attend` in one launch. `tasks` must be planned for this step with `one_each`.

    out [T, Q * D]; split_k_partials [P, T, (Q + 2K) * D]; cos and sin [L, D/2] float32; keys and values [num_blocks, K,
    BLOCK_SIZE, D] of the dtype of `out`, or in 8 bits (kv_cache.py). It works for any number of tokens, and saves most
    with few. With `pdl` the launch begins while the previous one runs, and waits for it before it reads the partials;
    see `wait_and_launch_next`.
    """
    check_cache(keys, values, tasks)
    head_dim = tasks.head_dim
    (task_list,) = tasks.lists
    assert step.key_ends is None, "a token that decodes sees what is before it"
    assert task_list.tile in (tasks.tiles.few, tasks.tiles.narrow), "the tasks must be planned for one token per entry"
    assert out.shape == (step.num_tokens, tasks.num_heads * head_dim)
    assert out.dtype == keys.dtype or is_quantized(keys)
    assert split_k_partials.shape[1:] == (step.num_tokens, (tasks.num_heads + 2 * tasks.num_kv_heads) * head_dim)
    assert cos.shape[1] == sin.shape[1] == head_dim // 2 and head_dim % 2 == 0
    assert all(tensor.is_contiguous() for tensor in (out, split_k_partials, cos, sin))
    query_norm, key_norm, eps = head_norms or (cos, cos, 0.0)
    # A unit's rows are one token's heads, fewer than the tile's, so more partial results are read at once.
    heads = next_power_of_2(tasks.group)
    early = {"launch_pdl": True} if pdl else {}
    _decode_kernel[(task_list.num_programs,)](
        out,
        split_k_partials,
        split_k_partials.stride(0),
        cos,
        sin,
        step.slots,
        query_norm,
        key_norm,
        cos if center is None else center,
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
        NUM_PARTIALS=len(split_k_partials),
        PDL=pdl,
        NORMED=head_norms is not None,
        CENTERED=center is not None,
        EPS=eps,
        HEADS=heads,
        GROWTH=growth[0],
        PERIOD=growth[1],
        num_warps=task_list.tile.num_warps,
        num_stages=task_list.tile.num_stages,
        **constants(task_list, tasks, keys, heads, 4 * task_list.tile.combined),
        **early,
    )


@triton.jit
def rounded(numbers, dtype: tl.constexpr, SCALE_BYTES: tl.constexpr):
    """A head of keys or values [D] float32 as the cache holds it: numbers of `dtype` or codes, their scale, and their
    values in float32."""
    if SCALE_BYTES > 0:
        row = numbers[None, :]
        row_codes, row_scale = quantize(row, tl.max(tl.abs(row), 1), tl.sum(row * 0.0, 1))
        codes, scale = tl.sum(row_codes, 0), tl.sum(row_scale, 0)
        kept, kept_scale, values = codes.to(tl.int8), scale.to(tl.bfloat16), codes * scale
    else:
        kept, kept_scale = numbers.to(dtype), 0.0
        values = kept.to(tl.float32)
    return kept, kept_scale, values


@triton.jit(do_not_specialize=["part_stride"])
def _decode_kernel(
    out,
    split_k_partials,
    part_stride,
    cos,
    sin,
    slots,
    query_norm,
    key_norm,
    center,
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
    NUM_PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    GROWTH: tl.constexpr,
    PERIOD: tl.constexpr,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
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
    row, position, _, token = load_entry(cuts + tl.program_id(0) * CUT_FIELDS + 8)

    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIMS)
    inside = dims < HEAD_DIM
    others = tl.where(dims < half, dims + half, dims - half)
    # A multiple of 16 bytes, which the compiler can't know of a kernel argument.
    step = tl.multiple_of(part_stride.to(tl.int64), 8)
    group = tl.arange(0, HEADS)
    mask = (group < GROUP)[:, None] & inside[None, :]
    for index in tl.range(0, num_units, disable_licm=True):
        next_rank, next_head, next_block = next_unit(rank, head, block, 1, NUM_KV_HEADS)
        next_row, next_position, _, next_token = load_entry(list_entries + next_rank * ENTRY_FIELDS)
        token_at = token.to(tl.int64)
        table = block_tables + row.to(tl.int64) * blocks_stride
        first_key = 0
        if WINDOW > 0:
            first_key = tl.maximum(position - WINDOW + 1, 0)
        is_begun = (index == 0) & (begin_cut[1] >= 0)
        is_cut = (index == num_units - 1) & (end_cut[1] >= 0)
        first_tile, end_tile, first_inside, num_inside = tiles_of_unit(
            first_key, position + 1, is_begun, is_cut, begin_cut, end_cut, BLOCK_N
        )

        # All loads first, so that their latencies overlap. Each dimension is loaded with the one that it rotates with.
        blocks = load_blocks(table, first_tile, first_key, position, BLOCK_SIZE, BLOCK_N)
        angle = position.to(tl.int64) * half + tl.where(dims < half, dims, dims - half)
        cosine = tl.load(cos + angle, mask=inside, other=0.0)
        sine = tl.load(sin + angle, mask=inside, other=0.0)
        slot = tl.load(slots + token_at)
        if PDL:
            # The previous launch, the linear layer, writes the partials.
            wait_and_launch_next()
        token_partials = split_k_partials + token_at * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        heads = (head * GROUP + group) * HEAD_DIM
        query = sum_partials(token_partials, heads[:, None] + dims[None, :], mask, step, NUM_PARTIALS)
        other = sum_partials(token_partials, heads[:, None] + others[None, :], mask, step, NUM_PARTIALS)
        key_part = token_partials + (NUM_HEADS + head) * HEAD_DIM
        key = sum_partials(key_part, dims, inside, step, NUM_PARTIALS)
        other_key = sum_partials(key_part, others, inside, step, NUM_PARTIALS)
        value = sum_partials(key_part + NUM_KV_HEADS * HEAD_DIM, dims, inside, step, NUM_PARTIALS)

        sine = tl.where(dims < half, -sine, sine)
        if NORMED:
            scale = tl.rsqrt(tl.sum(query * query, 1) / HEAD_DIM + EPS)[:, None]
            query *= scale * tl.load(query_norm + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
            other *= scale * tl.load(query_norm + others, mask=inside, other=0.0).to(tl.float32)[None, :]
            key_scale = tl.rsqrt(tl.sum(key * key, 0) / HEAD_DIM + EPS)
            key *= key_scale * tl.load(key_norm + dims, mask=inside, other=0.0).to(tl.float32)
            other_key *= key_scale * tl.load(key_norm + others, mask=inside, other=0.0).to(tl.float32)
        turned = query * cosine[None, :] + other * sine[None, :]
        turned_key = key * cosine + other_key * sine
        if SCALE_BYTES > 0:
            other = other * cosine[None, :] - query * sine[None, :]
            other_key = other_key * cosine - key * sine
            if CENTERED:
                head_center = center + head * HEAD_DIM
                turned_key -= tl.load(head_center + dims, mask=inside, other=0.0)
                other_key -= tl.load(head_center + others, mask=inside, other=0.0)
            size: tl.constexpr = HEAD_DIM & -HEAD_DIM
            is_second = (dims >= half)[None, :]
            turned = transform_heads(turned, other, is_second, HEADS, DIMS, size)
            spread = transform_heads(turned_key[None, :], other_key[None, :], is_second, 1, DIMS, size)
            turned_key = tl.reshape(spread, [DIMS])
        if GROWTH != 0:
            turned *= query_factor(position, GROWTH, PERIOD)
        query = turned.to(dtype)
        # The tile has spare rows; they repeat the group.
        query = tl.broadcast_to(query[None, :, :], [BLOCK_M // HEADS, HEADS, DIMS]).reshape([BLOCK_M, DIMS])
        key_codes, key_scale, key = rounded(turned_key, dtype, SCALE_BYTES)
        value_codes, value_scale, value = rounded(value, dtype, SCALE_BYTES)

        sums = tl.zeros([BLOCK_M, DIMS], tl.float32)
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        all_weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        head_at = head * (BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES))
        head_keys, head_values = keys + head_at, values + head_at
        head_key_scales, head_value_scales = key_scales + head_at // 2, value_scales + head_at // 2
        positions = tl.zeros([BLOCK_M], tl.int32) + position
        row_heads = head * GROUP + rows % HEADS
        present = rows % HEADS < GROUP
        row_slopes = load_of_heads(slopes, row_heads, present, ALIBI)
        sums, largest, all_weights = attend_tiles(
            sums, largest, all_weights, query, head_keys, head_values, head_key_scales, head_value_scales, table,
            blocks, first_tile, end_tile, first_key, position, positions, positions + 1, row_slopes, SCALE, CAP, ALIBI,
            True, False, True, NUM_KV_HEADS, HEAD_DIM, DIMS, BLOCK_SIZE, SCALE_BYTES, WINDOW, BLOCK_N, PRECISION,
            UPCAST,
        )  # fmt: skip

        weights = tl.sum(all_weights, 1)
        if not is_cut:
            to_block = (slot // BLOCK_SIZE) * (NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES))
            to_cache = to_block + slot % BLOCK_SIZE * HEAD_DIM + dims
            tl.store(head_keys + to_cache, key_codes, mask=inside & (slot >= 0))
            tl.store(head_values + to_cache, value_codes, mask=inside & (slot >= 0))
            if SCALE_BYTES > 0:
                to_scale = to_block // 2 + BLOCK_SIZE * HEAD_DIM // 2 + slot % BLOCK_SIZE
                tl.store(head_key_scales + to_scale, key_scale, mask=slot >= 0)
                tl.store(head_value_scales + to_scale, value_scale, mask=slot >= 0)

            score = tl.sum(query.to(tl.float32) * key[None, :], 1)
            if CAP > 0:
                score = CAP * tanh(score / CAP)
            score *= SCALE
            now = tl.maximum(largest, score)
            shrink = tl.exp2(largest - now)
            weight = tl.exp2(score - now)
            sums = sums * shrink[:, None] + weight[:, None] * value[None, :]
            weights = weights * shrink + weight
            largest = now
            if SINKS:
                row_sinks = load_of_heads(sinks, row_heads, present, SINKS)
                sums, largest, weights = add_sinks(sums, largest, weights, row_sinks)
        to = out + token_at * (NUM_HEADS * HEAD_DIM) + head * (GROUP * HEAD_DIM)
        leave(
            to + rows * HEAD_DIM, rows < GROUP, to + group * HEAD_DIM, group < GROUP, sums, largest, weights, is_begun,
            first_inside, num_inside, arrivals, part_sums, part_scales, HEAD_DIM, DIMS, BLOCK_M, HEADS, PARTS,
            PART_DIMS,
        )  # fmt: skip
        rank, head, block = next_rank, next_head, next_block
        row, position, token = next_row, next_position, next_token
    if PDL:  # a program without a unit has not waited: the next launch relies on it
        tl.extra.cuda.gdc_wait()
