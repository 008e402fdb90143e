"""What programs of attention do: find their piece, work it off tile by tile, and leave what came out.

They are parts of kernels. Shapes: BLOCK_M rows and BLOCK_N keys of a tile, DIMS head_dim as a power of two.
"""

import triton
import triton.language as tl


@triton.jit
def load_piece(cuts, CUT_FIELDS: tl.constexpr):
    """What the program has to do: rank, head and block of its first unit; tile, first cut and number of cuts of the
    unit that it begins in; the same of the one it ends in; number of units."""
    begin = cuts + tl.program_id(0) * CUT_FIELDS
    end = begin + CUT_FIELDS
    end_inside = tl.load(end + 5)
    num_units = tl.load(end + 4) - tl.load(begin + 4) + (end_inside >= 0).to(tl.int32)
    first = tl.load(begin), tl.load(begin + 1), tl.load(begin + 2)
    begin_cut = tl.load(begin + 3), tl.load(begin + 5), tl.load(begin + 6)
    return first, begin_cut, (tl.load(end + 3), end_inside, tl.load(end + 6)), num_units


@triton.jit
def load_entry(entry):
    """Its row, start, count and offset."""
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def next_unit(rank, head, block, num_blocks, NUM_KV_HEADS: tl.constexpr):
    """Along the line: query blocks, then heads, then entries."""
    block += 1
    head += (block == num_blocks).to(tl.int32)
    block = tl.where(block == num_blocks, 0, block)
    rank += (head == NUM_KV_HEADS).to(tl.int32)
    head = tl.where(head == NUM_KV_HEADS, 0, head)
    return rank, head, block


@triton.jit
def tiles_of_unit(first_key, end_key, is_begun, is_cut, begin_cut, end_cut, BLOCK_N: tl.constexpr):
    """Those of the program, and the cuts of the unit, -1 where it is the program's alone. `is_begun`: the program
    begins inside of it; `is_cut`: it ends there."""
    begin_tile, begin_inside, begin_num = begin_cut
    cut_tile, end_inside, end_num = end_cut
    first_tile = tl.where(is_begun, begin_tile, first_key // BLOCK_N)
    end_tile = tl.where(is_cut, cut_tile, (end_key + BLOCK_N - 1) // BLOCK_N)
    first_inside = tl.where(is_begun, begin_inside, tl.where(is_cut, end_inside, -1))
    num_inside = tl.where(is_begun, begin_num, end_num)
    return first_tile, end_tile, first_inside, num_inside


@triton.jit
def load_blocks(table, tile, first_key, end_key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ids of the blocks of a tile's keys, [BLOCK_N]."""
    places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.load(table + places // BLOCK_SIZE, mask=(places >= first_key) & (places < end_key), other=0)


@triton.jit
def attend_tiles(
    sums,
    largest,
    weights,
    query,
    keys,
    values,
    table,
    blocks,
    first_tile,
    end_tile,
    first_key,
    end_key,
    positions,
    SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    SUM_LATER: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Tiles first_tile .. end_tile of one head. `keys` and `values` point at that head in block 0, `table` at the row's
    block ids, of which `blocks` [BLOCK_N] are those of the first tile; `query` [BLOCK_M, DIMS], `positions` [BLOCK_M].
    Of keys outside first_key .. end_key nothing is read; without MASKED, all keys are seen by all positions. `weights`
    are [BLOCK_M], or with SUM_LATER [BLOCK_M, BLOCK_N], which warps that share a row need not exchange at each tile."""
    dims = tl.arange(0, DIMS)
    for tile in range(first_tile, end_tile):
        places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        readable = (places >= first_key) & (places < end_key)
        at = blocks.to(tl.int64) * (NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM) + (places % BLOCK_SIZE) * HEAD_DIM
        at = at[:, None] + dims[None, :]
        if MASKED and DIMS > HEAD_DIM:
            mask = readable[:, None] & (dims < HEAD_DIM)[None, :]
            key = tl.load(keys + at, mask=mask, other=0.0)
            value = tl.load(values + at, mask=mask, other=0.0)
        elif MASKED:
            key = tl.load(keys + at, mask=readable[:, None], other=0.0)
            value = tl.load(values + at, mask=readable[:, None], other=0.0)
        elif DIMS > HEAD_DIM:
            key = tl.load(keys + at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(values + at, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(keys + at)
            value = tl.load(values + at)
        # Of the next tile: were they loaded in its own turn, its keys could not be on their way before.
        blocks = load_blocks(table, tile + 1, first_key, end_key, BLOCK_SIZE, BLOCK_N)

        if UPCAST:
            scores = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if MASKED:
            seen = readable[None, :] & (places[None, :] <= positions[:, None])
            if WINDOW > 0:
                seen = seen & (places[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1) * SCALE)
        base = now
        if MASKED:
            # Where a row has seen nothing yet: -inf - -inf would be NaN.
            base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(scores * SCALE - base[:, None])
        shrink = tl.exp2(largest - base)
        if SUM_LATER:
            weights = weights * shrink[:, None] + weight
        else:
            weights = weights * shrink + tl.sum(weight, 1)
        sums = sums * shrink[:, None]
        if UPCAST:
            sums = tl.dot(weight, value.to(tl.float32), sums, input_precision="ieee")
        else:
            sums = tl.dot(weight.to(value.dtype), value, sums, input_precision=PRECISION)
        largest = now
    return sums, largest, weights


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
    """Write a unit's result to the rows that `to` [BLOCK_M] points at, those that are `present`, or leave a part of it
    and combine all parts where they are complete. `all_to` and `all_present` are the first ROWS of these, and no other
    row is present. `is_begun`: the unit's first keys are another program's;
    `first_inside` and `num_inside` as of the cut.

    Program i leaves the part of the unit that it begins in the middle of at 2i, and that of the unit it leaves
    unfinished at 2i + 1. A unit whose first inner cut is f is shared by programs f - 1 .. f - 1 + num_inside.
    """
    dims = tl.arange(0, DIMS)
    rows = tl.arange(0, BLOCK_M)
    mask = present[:, None] & (dims < HEAD_DIM)[None, :]
    if first_inside < 0:
        # Rows that are nobody's may have seen nothing.
        result = sums / tl.where(weights == 0.0, 1.0, weights)[:, None]
        tl.store(to[:, None] + dims[None, :], result.to(to.dtype.element_ty), mask=mask)
    else:
        num_places = 2 * tl.num_programs(0) * BLOCK_M
        place = (2 * tl.program_id(0) + (~is_begun).to(tl.int32)) * BLOCK_M + rows
        tl.store(part_sums + place[:, None] * DIMS + dims[None, :], sums, mask=mask, cache_modifier=".cg")
        tl.store(part_scales + place, largest, cache_modifier=".cg")
        tl.store(part_scales + num_places + place, weights, cache_modifier=".cg")
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + first_inside, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if arrived % (num_inside + 1) == num_inside:
            # Some dimensions after the others: all at once are more than the registers hold.
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
                    places = slot[:, None] * BLOCK_M + all_rows[None, :]
                    scale = tl.load(
                        part_scales + places, mask=there[:, None], other=float("-inf"), cache_modifier=".cg"
                    )
                    weight = tl.load(
                        part_scales + num_places + places, mask=there[:, None], other=0.0, cache_modifier=".cg"
                    )
                    part_sum = tl.load(
                        part_sums + places[:, :, None] * DIMS + some_dims[None, None, :],
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
