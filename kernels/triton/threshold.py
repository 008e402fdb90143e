"""Where a row of logits is to be cut, without sorting it: the largest value such that those from there up are so many,
or weigh so much.

One program searches for a row, and reads little of it. Before it, each *strip* of the row (STRIP logits) has told its
largest value:

    strips' largest ──halve──► a floor: these alone are enough
    strips above it ──narrow──► a higher floor and a lower ceiling, until few values are between them
    few values ──collect, halve──► the value

Floats are searched in the order of their bits ("codes": integers in the same order as the values), so that any row of
numbers comes to an end: of 2^32 codes `halve` leaves half at each look, `narrow` an eighth. Values that are
equal stay together, however many they are. Sums are made in one order whatever the batch.

Flat rows, in which all strips have what is looked for, are read a few times as a whole.
"""

import triton
import triton.language as tl

STRIP = 64
"""Logits that tell one largest value."""
MAX_COLLECTED = 4096
"""Values that are searched in registers; room for each sample in scratch memory."""

_STRIP, _MAX_COLLECTED = tl.constexpr(STRIP), tl.constexpr(MAX_COLLECTED)
TILE = tl.constexpr(2048)
"""Logits that a program looks at together."""
TILE_STRIPS = tl.constexpr(TILE.value // STRIP)
_WAYS = tl.constexpr(8)
_INF = tl.constexpr(float("inf"))


@triton.jit
def code_of(value):
    """int32 in the order of float32: value is not NaN. -0.0 comes before 0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(code):
    """The float32 of a code; of one above infinity's, NaN, which nothing reaches."""
    code = code.to(tl.int32)
    return (code ^ ((code >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def amount_of(values, top, temperature, weighted):
    """What each value counts: 1, or its weight in the softmax, where that of `top` is 1."""
    return tl.where(weighted, tl.exp((values - top) / temperature), 1.0)


@triton.jit
def halve(values, amounts, low, high, above, wanted):
    """The largest code in low .. high from which on the amounts of `values`, and `above` besides, are `wanted`; `low`
    where none is. Codes are int64."""
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = above + tl.sum(tl.where(values >= value_of(middle), amounts, 0.0), 0) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def list_strips(strips, tops, low, STRIPS: tl.constexpr):
    """Write the numbers of the strips whose largest value is `low` or above, in order. Returns how many these are."""
    places = tl.arange(0, tops.shape[0])
    kept = (tops >= value_of(low)) & (places < STRIPS)
    # Whoever still reads the last list has to be done, and this one has to be there for all.
    tl.debug_barrier()
    tl.store(strips + tl.cumsum(kept.to(tl.int32), 0) - 1, places, mask=kept)
    tl.debug_barrier()
    return tl.sum(kept.to(tl.int32), 0)


@triton.jit
def load_strips(logits, strips, begin, num_strips, VOCAB: tl.constexpr):
    """A tile of logits from the listed strips, from the `begin`-th on. Returns values, ids, and which are there; NaN
    comes as -inf."""
    places = tl.arange(0, TILE)
    at = begin + places // _STRIP
    ids = tl.load(strips + at, mask=at < num_strips, other=0) * _STRIP + places % _STRIP
    ids = tl.max_contiguous(tl.multiple_of(ids, 4), 4)
    there = (at < num_strips) & (ids < VOCAB)
    values = tl.load(logits + ids, mask=there, other=-_INF)
    return tl.where(values > -_INF, values, -_INF), ids, there


@triton.jit
def _collect(collected, logits, strips, num_strips, low, high, VOCAB: tl.constexpr):
    """Write the values in low .. high, for which there has to be room, in order. Returns how many they are."""
    num = 0
    tl.debug_barrier()
    for begin in range(0, num_strips, TILE_STRIPS):
        values, _, there = load_strips(logits, strips, begin, num_strips, VOCAB)
        inside = (there & (values >= value_of(low)) & ((values >= value_of(high)) == 0)).to(tl.int32)
        at = num + tl.cumsum(inside, 0) - 1
        tl.store(collected + at, values, mask=(inside == 1) & (at < _MAX_COLLECTED))
        num += tl.sum(inside, 0)
    tl.debug_barrier()
    return num


@triton.jit
def _narrow(
    logits,
    strips,
    num_strips,
    low,
    high,
    above,
    num_above,
    wanted,
    top,
    temperature,
    weighted,
    evenly,
    VOCAB: tl.constexpr,
):
    """One of eight parts of low .. high. Returns its ends, what is above it, and how many values are above it and from
    its floor up. `evenly` divides by value rather than by code."""
    ways = tl.arange(0, _WAYS)
    codes = low + (high - low) * ways // _WAYS
    least, most = value_of(low), value_of(high)
    if evenly & (least > -_INF) & (most < _INF):
        step = most * (1 / _WAYS) - least * (1 / _WAYS)
        even = code_of(tl.minimum(least + step * ways, most)).to(tl.int64)
        codes = tl.where(ways == 0, low, tl.maximum(low, even))
    floors = value_of(codes)
    held = tl.zeros((_WAYS,), tl.float32)
    num = tl.zeros((_WAYS,), tl.int32)
    for begin in range(0, num_strips, TILE_STRIPS):
        values, _, there = load_strips(logits, strips, begin, num_strips, VOCAB)
        amounts = amount_of(values, top, temperature, weighted)
        reached = there[None, :] & (values[None, :] >= floors[:, None])
        held += tl.sum(tl.where(reached, amounts[None, :], 0.0), 1)
        num += tl.sum(reached.to(tl.int32), 1)
    # A sum of fewer amounts in the same order is never larger, so what is enough comes before what is not.
    is_enough = (held >= wanted) | (ways == 0)
    above = tl.max(tl.where(is_enough, above, held), 0)
    num_above = tl.max(tl.where(is_enough, num_above, num), 0)
    num_from = tl.min(tl.where(is_enough, num, 0x7FFFFFFF), 0)
    low = tl.max(tl.where(is_enough, codes, low), 0)
    high = tl.min(tl.where(is_enough, high, codes), 0)
    return low, high, above, num_above, num_from


@triton.jit
def search(
    logits,
    tops,
    strips,
    collected,
    low,
    top,
    temperature,
    weighted,
    wanted,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """The largest code, from `low` up, such that a row's values from there on are `wanted` in number, or in weight if
    `weighted`; `low` where all are not enough.

    logits [VOCAB] of the row, tops [P >= STRIPS] the strips' largest in registers, of which `top` is the largest.
    `strips` [STRIPS] and `collected` [MAX_COLLECTED] are memory of the row's.
    """
    high = code_of(top).to(tl.int64) + 1
    counted = tl.where(tl.arange(0, tops.shape[0]) < STRIPS, amount_of(tops, top, temperature, weighted), 0.0)
    low = halve(tops, counted, low, high, 0.0, wanted)
    num_strips = list_strips(strips, tops, low, STRIPS)
    above, num_above, evenly = 0.0, 0, 1
    num = num_strips * _STRIP
    while (num > _MAX_COLLECTED) & (high - low > 1):
        low, high, above, num_above, num_from = _narrow(
            *(logits, strips, num_strips, low, high, above, num_above, wanted, top, temperature, weighted),
            evenly == 1,
            VOCAB,
        )
        evenly = 0
        num = num_from - num_above
    # Where there are still too many they are all equal, and nothing is left to be found.
    num = tl.where(num > _MAX_COLLECTED, 0, num)
    if num > 0:
        num = _collect(collected, logits, strips, num_strips, low, high, VOCAB)
    places = tl.arange(0, _MAX_COLLECTED)
    values = tl.load(collected + places, mask=places < num, other=-_INF)
    counted = tl.where(places < num, amount_of(values, top, temperature, weighted), 0.0)
    return halve(values, counted, low, high, above, wanted)
