"""Device functions of the attention kernels: load a program's piece, compute its tiles, store the result.

Shapes: BLOCK_M rows and BLOCK_N keys of a tile, DIMS head_dim as a power of two.
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.activations import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_piece(cuts, CUT_FIELDS: tl.constexpr):
    """The program's piece: rank, head and block of its first unit; tile, first cut and number of cuts of the unit that
    it begins in; the same for the unit that it ends in; number of units."""
    begin = cuts + tl.program_id(0) * CUT_FIELDS
    end = begin + CUT_FIELDS
    end_inside = tl.load(end + 5)
    num_units = tl.load(end + 4) - tl.load(begin + 4) + (end_inside >= 0).to(tl.int32)
    first = tl.load(begin), tl.load(begin + 1), tl.load(begin + 2)
    begin_cut = tl.load(begin + 3), tl.load(begin + 5), tl.load(begin + 6)
    return first, begin_cut, (tl.load(end + 3), end_inside, tl.load(end + 6)), num_units


@triton.jit
def load_entry(entry):
    """Row, start, count and offset of an entry."""
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def next_unit(rank, head, block, num_blocks, NUM_KV_HEADS: tl.constexpr):
    """The next unit on the line: query blocks, then heads, then entries."""
    block += 1
    head += (block == num_blocks).to(tl.int32)
    block = tl.where(block == num_blocks, 0, block)
    rank += (head == NUM_KV_HEADS).to(tl.int32)
    head = tl.where(head == NUM_KV_HEADS, 0, head)
    return rank, head, block


@triton.jit
def tiles_of_unit(first_key, end_key, is_begun, is_cut, begin_cut, end_cut, BLOCK_N: tl.constexpr):
    """The program's tiles of a unit, and the unit's cuts, -1 if the unit is not shared. `is_begun`: the program begins
    inside the unit; `is_cut`: it ends inside the unit."""
    begin_tile, begin_inside, begin_num = begin_cut
    cut_tile, end_inside, end_num = end_cut
    first_tile = tl.where(is_begun, begin_tile, first_key // BLOCK_N)
    end_tile = tl.where(is_cut, cut_tile, (end_key + BLOCK_N - 1) // BLOCK_N)
    first_inside = tl.where(is_begun, begin_inside, tl.where(is_cut, end_inside, -1))
    num_inside = tl.where(is_begun, begin_num, end_num)
    return first_tile, end_tile, first_inside, num_inside


@triton.jit
def load_blocks(table, tile, first_key, end_key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of a tile's keys, [BLOCK_N]."""
    key_positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(
        table + key_positions // BLOCK_SIZE, mask=(key_positions >= first_key) & (key_positions < end_key), other=0
    )


@triton.jit
def _load_heads(pointers, readable, dims, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """A tile of keys or values, [BLOCK_N, DIMS]."""
    if MASKED and DIMS > HEAD_DIM:
        numbers = tl.load(pointers, mask=readable[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    elif MASKED:
        numbers = tl.load(pointers, mask=readable[:, None], other=0)
    elif DIMS > HEAD_DIM:
        numbers = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0)
    else:
        numbers = tl.load(pointers)
    return numbers


@triton.jit
def _load_scales(pointers, readable, MASKED: tl.constexpr):
    """The scales of a tile of keys or values, [BLOCK_N] float32."""
    if MASKED:
        scales = tl.load(pointers, mask=readable, other=0.0)
    else:
        scales = tl.load(pointers)
    return scales.to(tl.float32)


@triton.jit
def _finite(value):
    """Values [BLOCK_N, DIMS] with zeros in place of what is not finite, and NaN [BLOCK_N] where that was, else 0. As
    a weight, 0 x NaN would be NaN in the rows that do not see a key, too; as a score, it is masked in these."""
    is_wrong = value * 0.0 != 0.0
    wrong = tl.max(is_wrong.to(tl.int32), 1)
    return tl.where(is_wrong, 0.0, value).to(value.dtype), tl.where(wrong > 0, float("nan"), 0.0)


@triton.jit
def attend_tiles(
    sums,
    largest,
    weights,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    blocks,
    first_tile,
    end_tile,
    first_key,
    end_key,
    positions,
    row_ends,
    slopes,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASKED: tl.constexpr,
    UNSEEN: tl.constexpr,
    SUM_LATER: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute tiles first_tile .. end_tile of one head.

    `keys` and `values` point to that head in block 0, and their scales too (see kv_cache.py); `table` points to the
    row's block ids; `blocks` [BLOCK_N] are those of the first tile; `query` [BLOCK_M, DIMS], `positions` [BLOCK_M],
    `row_ends` [BLOCK_M]: the first key that each row does not see.
    Keys outside first_key .. end_key are not read. SCALE makes products of queries and keys exponents of 2. Before it,
    they are capped by CAP, unless it is 0, and with ALIBI `slopes` [BLOCK_M] are subtracted for each position that a
    key is away from the query.
    Without MASKED, all rows attend to all keys. `weights` are [BLOCK_M], or with SUM_LATER [BLOCK_M, BLOCK_N], so
    that warps that share a row need not exchange sums in each tile. With UNSEEN, a tile may have keys that some rows
    do not see: values that are not finite make NaN of those that do, and of no other.
    """
    dims = tl.arange(0, DIMS)
    for tile in range(first_tile, end_tile):
        key_positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        readable = (key_positions >= first_key) & (key_positions < end_key)
        block_size: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * (HEAD_DIM + SCALE_BYTES)
        at = blocks.to(tl.int64) * block_size + (key_positions % BLOCK_SIZE) * HEAD_DIM
        at = at[:, None] + dims[None, :]
        key = _load_heads(keys + at, readable, dims, MASKED, HEAD_DIM, DIMS)
        value = _load_heads(values + at, readable, dims, MASKED, HEAD_DIM, DIMS)
        if SCALE_BYTES > 0:
            scale_at = blocks.to(tl.int64) * (block_size // 2) + BLOCK_SIZE * HEAD_DIM // 2 + key_positions % BLOCK_SIZE
            key_scale = _load_scales(key_scales + scale_at, readable, MASKED)
            value_scale = _load_scales(value_scales + scale_at, readable, MASKED)
            # Codes are exact in every type of queries. The interpreter can't convert integers to bfloat16.
            if UPCAST:
                key, value = key.to(tl.float32), value.to(tl.float32)
            else:
                key, value = key.to(query.dtype), value.to(query.dtype)
        # The next tile's block ids are loaded here, so that its keys can be loaded ahead.
        blocks = load_blocks(table, tile + 1, first_key, end_key, BLOCK_SIZE, BLOCK_N)

        if UPCAST:
            scores = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SCALE_BYTES > 0:
            scores = scores * key_scale[None, :]
        if CAP > 0:
            scores = CAP * tanh(scores / CAP)
        if ALIBI:
            scores -= slopes[:, None] * tl.abs(positions[:, None] - key_positions[None, :]).to(tl.float32)
        if UNSEEN and SCALE_BYTES == 0:
            value, wrong = _finite(value)
            scores += wrong[None, :]
        if MASKED:
            seen = readable[None, :] & (key_positions[None, :] < row_ends[:, None])
            if WINDOW > 0:
                seen = seen & (key_positions[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1) * SCALE)
        base = now
        if MASKED:
            # Rows without any key yet: -inf - -inf would be NaN.
            base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(scores * SCALE - base[:, None])
        shrink = tl.exp2(largest - base)
        if SUM_LATER:
            weights = weights * shrink[:, None] + weight
        else:
            weights = weights * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None]
        if SCALE_BYTES > 0:
            scaled = weight * value_scale[None, :]
            weight = tl.where(weight == 0.0, 0.0, scaled) if UNSEEN else scaled
        if UPCAST:
            sums = tl.dot(weight, value.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(weight.to(value.dtype), value, sums, input_precision=PRECISION)
        largest = now
    return sums, largest, weights


@triton.jit
def load_of_heads(numbers, heads, present, LOADS: tl.constexpr):
    """A number of each head, float32; zeros without LOADS."""
    result = tl.zeros(heads.shape, tl.float32)
    if LOADS:
        result = tl.load(numbers + heads, mask=present, other=0.0)
    return result


@triton.jit
def add_sinks(sums, largest, weights, sinks):
    """Add a score of each row that has no value. `sinks` [BLOCK_M] are scores as in softmax; `weights` [BLOCK_M]."""
    scores = sinks * LOG2_E
    now = tl.maximum(largest, scores)
    shrink = tl.exp2(largest - now)
    return sums * shrink[:, None], now, weights * shrink + tl.exp2(scores - now)


@triton.jit
def leave(
    to,
    present,
    all_to,
    all_present,
    sums,
    largest,
    weights,
    is_begun,
    first_inside,
    num_inside,
    arrivals,
    part_sums,
    part_scales,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_DIMS: tl.constexpr,
):
    """Write a unit's result to the rows that `to` [BLOCK_M] points to and that are `present`. For a shared unit, store
    a partial result, and combine all of them if they are complete.

    `all_to` and `all_present` are the first ROWS of these; no other row is present. `is_begun`: another program has the
    unit's first keys. `first_inside` and `num_inside` are those of the cut.

    Program i stores the partial result of the unit that it begins inside at 2i, and that of the unit that it ends
    inside at 2i + 1. Programs f - 1 .. f - 1 + num_inside share a unit whose first inner cut is f.
    """
    dims = tl.arange(0, DIMS)
    rows = tl.arange(0, BLOCK_M)
    mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    if first_inside < 0:
        # Rows that are not present may have no key.
        result = sums / tl.where(weights == 0.0, 1.0, weights)[:, None]
        tl.store(to[:, None] + dims[None, :], result.to(to.dtype.element_ty), mask=mask)
    else:
        num_slots = 2 * tl.num_programs(0) * BLOCK_M
        offset = (2 * tl.program_id(0) + (~is_begun).to(tl.int32)) * BLOCK_M + rows
        tl.store(part_sums + offset[:, None] * DIMS + dims[None, :], sums, mask=mask, cache_modifier=".cg")
        tl.store(part_scales + offset, largest, cache_modifier=".cg")
        tl.store(part_scales + num_slots + offset, weights, cache_modifier=".cg")
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + first_inside, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if arrived % (num_inside + 1) == num_inside:
            # A few dimensions at a time: all of them don't fit into registers.
            all_rows = tl.arange(0, ROWS)
            for first_dim in range(0, HEAD_DIM, PART_DIMS):
                some_dims = first_dim + tl.arange(0, PART_DIMS)
                some_mask = all_present[:, None] & (some_dims < HEAD_DIM)[None, :]
                all_sums = tl.zeros([ROWS, PART_DIMS], tl.float32)
                all_largest = tl.full([ROWS], float("-inf"), tl.float32)
                all_weights = tl.zeros([ROWS], tl.float32)
                for begin in range(0, num_inside + 1, PARTS):
                    part = begin + tl.arange(0, PARTS)
                    there = part <= num_inside
                    slot = 2 * (first_inside - 1 + part) + (part == 0).to(tl.int32)
                    offsets = slot[:, None] * BLOCK_M + all_rows[None, :]
                    scale = tl.load(
                        part_scales + offsets, mask=there[:, None], other=float("-inf"), cache_modifier=".cg"
                    )
                    weight = tl.load(
                        part_scales + num_slots + offsets, mask=there[:, None], other=0.0, cache_modifier=".cg"
                    )
                    part_sum = tl.load(
                        part_sums + offsets[:, :, None] * DIMS + some_dims[None, None, :],
                        mask=there[:, None, None] & some_mask[None, :, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    now = tl.maximum(all_largest, tl.max(scale, 0))
                    base = tl.where(now == float("-inf"), 0.0, now)
                    shrink = tl.exp2(all_largest - base)
                    factor = tl.exp2(scale - base[None, :])
                    all_sums = all_sums * shrink[:, None] + tl.sum(part_sum * factor[:, :, None], 0)
                    all_weights = all_weights * shrink + tl.sum(weight * factor, 0)
                    all_largest = now
                result = all_sums / tl.where(all_weights == 0.0, 1.0, all_weights)[:, None]
                tl.store(all_to[:, None] + some_dims[None, :], result.to(to.dtype.element_ty), mask=some_mask)
