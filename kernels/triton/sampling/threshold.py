"""Finds the threshold of top_k or top_p in a row of logits without sorting: the largest value such that the values from
there up reach a given number or weight.

One program searches a row and reads little of it. The largest value of each *strip* (STRIP logits) is known before:

    strips' largest ──_lift──► a floor above which the strips' largest values alone are enough
    strips above it ──_narrow──► a higher floor and a lower ceiling, until few values are between them
    few values ──_collect, _settle──► the threshold: all are compared with all

The search is over the bits of floats ("codes": integers in the same order as the values). It ends for any row, because
each pass leaves an eighth of the 2^32 codes. Equal values stay together. The order of sums does not depend on the
batch.

Flat rows, in which every strip has candidates, are read completely a few times.
"""

import triton
import triton.language as tl

STRIP = 64
"""Logits per strip."""
MAX_COLLECTED = 512
"""Most values to compare with each other; the size of each sample's scratch memory."""

TILE = tl.constexpr(2048)
"""Logits that a program processes together."""
TILE_STRIPS = tl.constexpr(TILE.value // STRIP)
_STRIP, _MAX_COLLECTED = tl.constexpr(STRIP), tl.constexpr(MAX_COLLECTED)
_WAYS = tl.constexpr(8)
_LIFTS = tl.constexpr(3)
_COMPARED = tl.constexpr(16)
_FEW_STRIPS = tl.constexpr(128)
"""So many strips are unlikely to have more than MAX_COLLECTED values above the floor."""
_INF = tl.constexpr(float("inf"))


@triton.jit
def code_of(value):
    """int32 codes in the order of float32 values, which are not NaN. -0.0 is below 0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(code):
    """The float32 of a code. Codes above infinity's give NaN, which no value reaches."""
    code = code.to(tl.int32)
    return (code ^ ((code >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def amount_of(values, top, temperature, weighted):
    """The amount of each value: 1, or its softmax weight relative to that of `top`."""
    return tl.where(weighted, tl.exp((values - top) / temperature), 1.0)


@triton.jit
def _divide(low, high, evenly):
    """The first codes of eight parts of low .. high. `evenly` divides by value instead of code."""
    ways = tl.arange(0, _WAYS)
    codes = low + (high - low) * ways // _WAYS
    least, most = value_of(low), value_of(high)
    if evenly & (least > -_INF) & (most < _INF):
        step = most * (1 / _WAYS) - least * (1 / _WAYS)
        even = code_of(tl.minimum(least + step * ways, most)).to(tl.int64)
        codes = tl.where(ways == 0, low, tl.maximum(low, even))
    return codes


@triton.jit
def _are_enough(held, wanted):
    # A sum over fewer amounts in the same order is never larger, so codes that are enough precede those that are not.
    return (held >= wanted) | (tl.arange(0, _WAYS) == 0)


@triton.jit
def _lift(tops, amounts, low, high, wanted):
    """A code from `low` up such that the amounts of the strips' largest values from there up reach `wanted`; `low` if
    there is none. It need not be the largest such code."""
    least = tl.min(tl.where(tops > -_INF, tops, value_of(high - 1)), 0)
    is_enough = tl.sum(tl.where(tops >= least, amounts, 0.0), 0) >= wanted
    low = tl.where(is_enough, tl.maximum(low, code_of(least).to(tl.int64)), low)
    for _ in range(_LIFTS):
        codes = _divide(low, high, True)
        reached = tops[None, :] >= value_of(codes)[:, None]
        enough = _are_enough(tl.sum(tl.where(reached, amounts[None, :], 0.0), 1), wanted)
        low = tl.max(tl.where(enough, codes, low), 0)
        high = tl.min(tl.where(enough, high, codes), 0)
    return low


@triton.jit
def list_strips(strips, tops, low, STRIPS: tl.constexpr):
    """Write the numbers of the strips whose largest value is at least `low`, in order. Returns their count."""
    offsets = tl.arange(0, tops.shape[0])
    kept = (tops >= value_of(low)) & (offsets < STRIPS)
    # All threads must have read the last list before, and see this one after.
    tl.debug_barrier()
    tl.store(strips + tl.cumsum(kept.to(tl.int32), 0) - 1, offsets, mask=kept)
    tl.debug_barrier()
    return tl.sum(kept.to(tl.int32), 0)


@triton.jit
def load_strips(logits, strips, begin, num_strips, VOCAB: tl.constexpr):
    """A tile of logits from the listed strips, from the `begin`-th on. Returns values, ids, and which are valid. NaN
    becomes -inf."""
    offsets = tl.arange(0, TILE)
    at = begin + offsets // _STRIP
    ids = tl.load(strips + at, mask=at < num_strips, other=0) * _STRIP + offsets % _STRIP
    ids = tl.max_contiguous(tl.multiple_of(ids, 4), 4)
    there = (at < num_strips) & (ids < VOCAB)
    values = tl.load(logits + ids, mask=there, other=-_INF)
    return tl.where(values > -_INF, values, -_INF), ids, there


@triton.jit
def _collect(collected, logits, strips, num_strips, low, high, VOCAB: tl.constexpr):
    """Write the values in low .. high, up to MAX_COLLECTED. Returns their count."""
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
    """Choose one of eight parts of low .. high. Returns its ends, the amount above it, and the number of values above
    it and from its floor up."""
    codes = _divide(low, high, evenly)
    floors = value_of(codes)
    held = tl.zeros((_WAYS,), tl.float32)
    num = tl.zeros((_WAYS,), tl.int32)
    for begin in range(0, num_strips, TILE_STRIPS):
        values, _, there = load_strips(logits, strips, begin, num_strips, VOCAB)
        amounts = amount_of(values, top, temperature, weighted)
        reached = there[None, :] & (values[None, :] >= floors[:, None])
        held += tl.sum(tl.where(reached, amounts[None, :], 0.0), 1)
        num += tl.sum(reached.to(tl.int32), 1)
    enough = _are_enough(held, wanted)
    above = tl.max(tl.where(enough, above, held), 0)
    num_above = tl.max(tl.where(enough, num_above, num), 0)
    num_from = tl.min(tl.where(enough, num, 0x7FFFFFFF), 0)
    low = tl.max(tl.where(enough, codes, low), 0)
    high = tl.min(tl.where(enough, high, codes), 0)
    return low, high, above, num_above, num_from


@triton.jit
def _settle(collected, num, low, above, wanted, top, temperature, weighted):
    """The largest value, as a code, such that the amounts from there up, plus `above`, reach `wanted`; `low` if there
    is none."""
    offsets = tl.arange(0, _MAX_COLLECTED)
    values = tl.load(collected + offsets, mask=offsets < num, other=-_INF)
    held = tl.zeros((_MAX_COLLECTED,), tl.float32) + above
    for begin in range(0, num, _COMPARED):
        others = begin + tl.arange(0, _COMPARED)
        other = tl.load(collected + others, mask=others < num, other=-_INF)
        amounts = tl.where(others < num, amount_of(other, top, temperature, weighted), 0.0)
        held += tl.sum(tl.where(other[None, :] >= values[:, None], amounts[None, :], 0.0), 1)
    codes = tl.where((offsets < num) & (held >= wanted), code_of(values).to(tl.int64), low)
    return tl.max(codes, 0)


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
    """The largest value, as a code, such that a row's values from there up reach `wanted` in number, or in weight if
    `weighted`. If all values from `low` up are not enough, a code that keeps all of them.

    logits [VOCAB] of the row; tops [P >= STRIPS] are the strips' largest values in registers, `top` their maximum.
    `strips` [STRIPS] and `collected` [MAX_COLLECTED] are the row's scratch memory.
    """
    high = code_of(top).to(tl.int64) + 1
    amounts = tl.where(tl.arange(0, tops.shape[0]) < STRIPS, amount_of(tops, top, temperature, weighted), 0.0)
    low = _lift(tops, amounts, low, high, wanted)
    num_strips = list_strips(strips, tops, low, STRIPS)
    above, num_above, evenly = 0.0, 0, 1
    # Few strips are collected at once, because their values probably fit.
    num = tl.where(num_strips > _FEW_STRIPS, 2 * _MAX_COLLECTED, 0)
    is_collected = False
    while (is_collected == 0) & (high - low > 1):
        if num > _MAX_COLLECTED:
            low, high, above, num_above, num_from = _narrow(
                *(logits, strips, num_strips, low, high, above, num_above, wanted, top, temperature, weighted),
                evenly == 1,
                VOCAB,
            )
            evenly = 0
            num = num_from - num_above
        if num <= _MAX_COLLECTED:
            num = _collect(collected, logits, strips, num_strips, low, high, VOCAB)
            is_collected = num <= _MAX_COLLECTED
    if is_collected:
        low = _settle(collected, num, low, above, wanted, top, temperature, weighted)
    return low
