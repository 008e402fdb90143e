"""The kernel that cuts the line of a step's attention into pieces; tasks.py explains the line and the cuts.

Each program sums over all entries itself and writes one cut, so no program reads what another one writes. Positions on
the line are int64, because many long chunks have more keys x query blocks than an int32 can hold.

With `key_ends`, a query block's keys end at any of its tokens' ends. Its cost is that of as many keys as it can have,
by the last end of its entry and by the furthest that an end is behind its token: exact for texts whose tokens see all
of it, nearly exact for spans. A cut behind the keys that a block has leaves a piece without tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _limits(ends, entries, mask, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, NUM: tl.constexpr, ENDS: tl.constexpr):
    """With ENDS, the most keys that a query block of these entries has, and how far ends are behind their tokens; else
    nothing of use. int64. Block b has no more than start + (b + 1) * BLOCK_Q + reach keys."""
    reach = entries.to(tl.int64) * 0
    most = reach
    if ENDS:
        reach = tl.load(ends + NUM + entries, mask=mask, other=0).to(tl.int64)
        most = tl.load(ends + entries, mask=mask, other=0).to(tl.int64)
        if WINDOW > 0:
            most = tl.minimum(most, BLOCK_Q + WINDOW - 1 + reach)
    return most, reach


@triton.jit
def _cost_before(
    block, start, most, reach, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, OVERHEAD: tl.constexpr, ENDS: tl.constexpr
):
    """Cost of an entry's query blocks before `block`, if all are full, int64. The keys of a block grow by BLOCK_Q from
    one block to the next, until the window is full, or up to `most`."""
    growing = block
    if ENDS:
        growing = tl.minimum(tl.maximum(most - start - reach, 0) // BLOCK_Q, block)
    elif WINDOW > 0:
        room = WINDOW - 1 - start
        growing = tl.minimum(block, tl.where(room >= 0, tl.maximum(room, 0) // BLOCK_Q + 1, 0))
    cost = growing * start + BLOCK_Q * (growing * (growing + 1) // 2) + block * OVERHEAD
    if ENDS:
        cost += growing * reach + (block - growing) * most
    elif WINDOW > 0:
        cost += (block - growing) * (BLOCK_Q + WINDOW - 1)
    return cost


@triton.jit
def _cost(
    count,
    start,
    most,
    reach,
    WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    OVERHEAD: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Cost of all query blocks of an entry's `count` tokens, int64."""
    blocks = (count + BLOCK_Q - 1) // BLOCK_Q
    cost = _cost_before(blocks, start, most, reach, WINDOW, BLOCK_Q, OVERHEAD, ENDS)
    if not ENDS:
        cost -= blocks * BLOCK_Q - count
    return cost


@triton.jit
def _end_key(first_key, block, start, count, most, reach, BLOCK_Q: tl.constexpr, ENDS: tl.constexpr):
    """The first key that no token of a query block sees, or with ENDS one behind it."""
    if ENDS:
        end_key = first_key + tl.minimum(start + (block + 1) * BLOCK_Q + reach, most)
    else:
        end_key = start + tl.minimum((block + 1) * BLOCK_Q, count)
    return end_key


@triton.jit
def ends_kernel(
    ends,
    key_ends,
    starts,
    counts,
    offsets,
    NUM: tl.constexpr,
    WINDOW_AFTER: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program i writes the last end of entry i, and how far its ends are behind their tokens' positions + 1 at most, to
    `ends` [2, NUM]."""
    entry = tl.program_id(0)
    start, count, offset = tl.load(starts + entry), tl.load(counts + entry), tl.load(offsets + entry)
    last, reach = start * 0 + 1, start * 0
    for begin in range(0, count, BLOCK_T):
        tokens = begin + tl.arange(0, BLOCK_T)
        own = start + tokens + 1
        some = tl.load(key_ends + offset + tokens, mask=tokens < count, other=0)
        if WINDOW_AFTER >= 0:
            some = tl.minimum(some, own + WINDOW_AFTER)
        last = tl.maximum(last, tl.max(some))
        reach = tl.maximum(reach, tl.max(some - own))
    tl.store(ends + entry, last)
    tl.store(ends + NUM + entry, reach)


@triton.jit(do_not_specialize=["num_entries"])
def plan_kernel(
    cuts,
    list_entries,
    arrivals,
    ends,
    rows,
    starts,
    counts,
    offsets,
    num_entries,
    ENDS: tl.constexpr,
    NUM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    OVERHEAD: tl.constexpr,
    LEAST_PART: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ENTRIES: tl.constexpr,
    CUT_FIELDS: tl.constexpr,
    ENTRY_FIELDS: tl.constexpr,
):
    """Program i writes cut i, and adds entry i of the step to the list if it belongs there. With ENDS, `ends` [2, NUM]
    are those of `ends_kernel`."""
    program = tl.program_id(0)
    entries = tl.arange(0, ENTRIES)
    present = entries < num_entries
    all_starts = tl.load(starts + entries, mask=present, other=0).to(tl.int64)
    all_counts = tl.load(counts + entries, mask=present, other=0).to(tl.int64)
    listed = (all_counts >= LEAST) & (all_counts <= MOST)

    if program < num_entries:
        count = tl.load(counts + program)
        if (count >= LEAST) & (count <= MOST):
            to = list_entries + tl.sum((listed & (entries < program)).to(tl.int32)) * ENTRY_FIELDS
            tl.store(to, tl.load(rows + program))
            tl.store(to + 1, tl.load(starts + program))
            tl.store(to + 2, count)
            tl.store(to + 3, tl.load(offsets + program))

    if program <= NUM_PROGRAMS:
        tl.store(arrivals + program, 0)
        num_blocks = tl.where(listed, (all_counts + BLOCK_Q - 1) // BLOCK_Q, 0)
        all_most, all_reaches = _limits(ends, entries, present, WINDOW, BLOCK_Q, NUM, ENDS)
        work = _cost(all_counts, all_starts, all_most, all_reaches, WINDOW, BLOCK_Q, OVERHEAD, ENDS)
        work_ends = tl.cumsum(tl.where(listed, work * NUM_KV_HEADS, 0))
        total = tl.max(work_ends)
        # A unit costs more than a tile's keys, so two cuts are never on the same tile.
        num_units = tl.sum(num_blocks) * NUM_KV_HEADS
        used = tl.minimum(tl.maximum(tl.maximum(total // MIN_KEYS, num_units), 1), NUM_PROGRAMS)
        share, extra = total // used, total % used
        cut = tl.minimum(program, used)
        at = cut * share + tl.minimum(cut, extra)

        # No unit is left.
        rank = tl.sum(listed.to(tl.int32))
        unit = num_units.to(tl.int32)
        head, block, tile, first_inside, num_inside = 0, 0, 0, -1, 0
        entry = num_entries
        if at < total:
            passed = work_ends <= at
            entry = tl.sum(passed.to(tl.int32))
            before = entries < entry
            entry_at = tl.max(tl.where(passed, work_ends, 0))
            rank = tl.sum((listed & before).to(tl.int32))
            start, count = tl.load(starts + entry).to(tl.int64), tl.load(counts + entry).to(tl.int64)
            blocks = (count + BLOCK_Q - 1) // BLOCK_Q
            most, reach = _limits(ends, entry, entry < num_entries, WINDOW, BLOCK_Q, NUM, ENDS)
            cost = _cost(count, start, most, reach, WINDOW, BLOCK_Q, OVERHEAD, ENDS)
            head_index = (at - entry_at) // cost
            head_at = entry_at + head_index * cost

            # The last block that begins at or before the cut.
            low, high = blocks * 0, blocks - 1
            while low < high:
                middle = (low + high + 1) // 2
                begins = head_at + _cost_before(middle, start, most, reach, WINDOW, BLOCK_Q, OVERHEAD, ENDS) <= at
                low = tl.where(begins, middle, low)
                high = tl.where(begins, high, middle - 1)
            unit_at = head_at + _cost_before(low, start, most, reach, WINDOW, BLOCK_Q, OVERHEAD, ENDS)
            first_key = low * 0
            if WINDOW > 0:
                first_key = tl.maximum(start + low * BLOCK_Q - WINDOW + 1, 0)
            end_key = _end_key(first_key, low, start, count, most, reach, BLOCK_Q, ENDS)
            unit_end = unit_at + OVERHEAD + end_key - first_key
            first_tile, end_tile = first_key // BLOCK_N, (end_key + BLOCK_N - 1) // BLOCK_N
            keys_at = unit_at + OVERHEAD - first_key - BLOCK_N // 2
            least = tl.maximum(share // (32 * BLOCK_N), LEAST_PART)

            # All cuts of this unit, each by the same sum. The programs between them share the unit.
            programs = tl.arange(0, PROGRAMS)
            used_programs = tl.minimum(programs, used)
            all_at = used_programs * share + tl.minimum(used_programs, extra)
            all_tiles = tl.maximum(all_at - keys_at, 0) // BLOCK_N
            inside = (all_at >= unit_at) & (all_at < unit_end)
            inside = inside & (all_tiles - first_tile >= least) & (end_tile - all_tiles >= least)

            cut_tile = tl.maximum(at - keys_at, 0) // BLOCK_N
            unit = tl.sum(tl.where(before, num_blocks, 0)).to(tl.int32) * NUM_KV_HEADS
            unit += (head_index * blocks + low).to(tl.int32)
            head, block = head_index.to(tl.int32), low.to(tl.int32)
            if (cut_tile - first_tile >= least) & (end_tile - cut_tile >= least):
                tile = cut_tile.to(tl.int32)
                first_inside = tl.min(tl.where(inside, programs, PROGRAMS))
                num_inside = tl.sum(inside.to(tl.int32))
            elif cut_tile - first_tile >= end_tile - cut_tile:
                unit += 1
                block += 1
                if block == blocks:
                    block = 0
                    head += 1
                    if head == NUM_KV_HEADS:
                        head = 0
                        rank += 1
                        entry = tl.min(tl.where(listed & (entries > entry), entries, num_entries))
        to = cuts + program * CUT_FIELDS
        tl.store(to, rank)
        tl.store(to + 1, head)
        tl.store(to + 2, block)
        tl.store(to + 3, tile)
        tl.store(to + 4, unit)
        tl.store(to + 5, first_inside)
        tl.store(to + 6, num_inside)
        if entry < num_entries:
            tl.store(to + 8, tl.load(rows + entry))
            tl.store(to + 9, tl.load(starts + entry))
            tl.store(to + 10, tl.load(counts + entry))
            tl.store(to + 11, tl.load(offsets + entry))
