"""Matrix-vector products, for one token.

A program computes BLOCK_N rows, and with SPLIT > 1 only a part of their columns. It goes through them tile by tile.
While it multiplies one tile, it loads the next, 16 bytes per thread, so that a program always has a tile or two in
flight and a multiprocessor has several programs. An H100 needs about 40 KiB in flight per multiprocessor to keep its
memory busy (3.3 TB/s at less than 1 µs, 132 multiprocessors). Programs that run at the same time share the bandwidth
and end together, so their number need not be a multiple of anything.

Weights are evicted first from the caches, because the next program reads the activations again.

Floats take 2 instructions per weight, int4 about 3 (unpack.py), q4_k 4.5 and q6_k 5.5. Memory delivers 7, 29, 25 and 18
weights per cycle to a multiprocessor, which issues 128 instructions. (Counted in machine code, not measured.)
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.activations import silu
from pipeline.kernels.triton.gemm.planes import group_scales
from pipeline.kernels.triton.gemm.unpack import (
    EXCESS,
    bytes_to_floats,
    codes_to_floats,
    fp8_bytes_to_floats,
    half_codes,
)
from pipeline.kernels.triton.inputs import input_at, wait_and_launch_next, weight_rows_of

LANES = tl.constexpr(8)
"""Adjacent floats of a row that one thread holds and sums itself."""


@triton.jit
def gemv(
    out,
    x,
    residual_out,
    partials,
    norm_weight,
    eps,
    weight,
    bias,
    N: tl.constexpr,
    K: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    """out [SPLIT, N] = weight [N, K] · x [K]. Grid (cdiv(N, BLOCK_N), SPLIT).

    `weight` are `Planes` with words. OUT is the distance of the partials in `out`. With NORM (see `input_at`), x is
    normalized first. With SWIGLU, the weight is [2N, K] and out is silu(first half) *
    second half; SPLIT is 1.
    """
    split = tl.program_id(1)
    ROWS: tl.constexpr = 2 * BLOCK_N if SWIGLU else BLOCK_N
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = weight_rows_of(tl.program_id(0), tl.arange(0, ROWS), N, BLOCK_N, SWIGLU)
    PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    begin = split * SHARE * BLOCK_K
    if weight.FORM == "float":
        sums, squares = _floats(
            x, residual_out, partials, norm_weight, weight.data, weight_rows, begin, SHARE, PROGRAMS, K, NORM,
            NUM_PARTIALS, BLOCK_K, PDL,
        )  # fmt: skip
    else:
        sums, squares = _codes(
            x, residual_out, partials, norm_weight, weight, begin, SHARE, PROGRAMS, N, K, NORM, NUM_PARTIALS, SWIGLU,
            BLOCK_N, BLOCK_K, PDL, ASM,
        )  # fmt: skip
    if NORM:
        if SPLIT > 1:  # this program has only a part of the squares
            squares = tl.zeros([BLOCK_K], tl.float32)
            for k in range(0, K, BLOCK_K):
                columns = k + tl.arange(0, BLOCK_K)
                _, hidden = input_at(
                    x,
                    residual_out,
                    partials,
                    norm_weight,
                    0,
                    columns,
                    columns < K,
                    1,
                    False,
                    K,
                    NORM,
                    NUM_PARTIALS,
                )
                squares += hidden * hidden
        sums *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    if HAS_BIAS:  # only in the first partial
        sums += tl.load(bias + weight_rows) * (split == 0).to(tl.float32)
    if SWIGLU:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
        sums = silu(gate) * up
    tl.store(out + split * OUT + rows, sums.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _floats(
    x,
    residual_out,
    partials,
    norm_weight,
    values,
    rows,
    begin,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [n] over SHARE tiles of `rows` [n] from column `begin` on, and squares [BLOCK_K]."""
    ROWS: tl.constexpr = rows.shape[0]
    offsets = tl.arange(0, BLOCK_K)
    pointers = values + rows.to(tl.int64)[:, None] * K + offsets[None, :]
    sums = tl.zeros([ROWS, BLOCK_K // LANES], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    tile = tl.load(pointers + begin, mask=(begin + offsets < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:  # everything but the weights may come from the previous launch
        wait_and_launch_next()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        there = ((k + BLOCK_K + offsets < K) & (step + 1 < SHARE))[None, :]
        next_tile = tl.load(pointers + (k + BLOCK_K), mask=there, other=0.0, eviction_policy="evict_first")
        columns = k + offsets
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, partials, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTIALS
        )
        squares += hidden * hidden
        products = tile.to(tl.float32) * factors[None, :]
        sums += tl.sum(tl.reshape(products, [ROWS, BLOCK_K // LANES, LANES]), axis=2)
        tile = next_tile
    return tl.sum(sums, axis=1), squares


@triton.jit
def _codes(
    x,
    residual_out,
    partials,
    norm_weight,
    weight,
    begin,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    """The same for codes, as words of four bytes. A tile is [rows, groups, words of a group], and sums are scaled by
    group.

    Rows are distributed over four tiles, so that a thread loads and converts activations from shared memory once for
    four of its rows. With one tile the compiler would repeat that for each row.
    """
    PACKED: tl.constexpr = weight.FORM == "int4"
    GROUP: tl.constexpr = weight.GROUP
    HIGH_BITS: tl.constexpr = weight.HIGH_BITS
    NUM_GROUPS: tl.constexpr = weight.NUM_GROUPS
    QUARTER: tl.constexpr = (2 * BLOCK_N if SWIGLU else BLOCK_N) // 4
    BYTES: tl.constexpr = GROUP // 2 if PACKED else GROUP
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    groups = tl.arange(0, GROUPS)
    offsets = tl.arange(0, BYTES)
    lines = tl.arange(0, QUARTER) * 4
    row0 = weight_rows_of(tl.program_id(0), lines, N, BLOCK_N, SWIGLU).to(tl.int64)
    row1 = weight_rows_of(tl.program_id(0), lines + 1, N, BLOCK_N, SWIGLU).to(tl.int64)
    row2 = weight_rows_of(tl.program_id(0), lines + 2, N, BLOCK_N, SWIGLU).to(tl.int64)
    row3 = weight_rows_of(tl.program_id(0), lines + 3, N, BLOCK_N, SWIGLU).to(tl.int64)
    sums0 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums1 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums2 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums3 = tl.zeros([QUARTER, GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    at = begin // GROUP + groups
    there = at < NUM_GROUPS
    tile0 = _words_at(weight, row0, at, there, BYTES)
    tile1 = _words_at(weight, row1, at, there, BYTES)
    tile2 = _words_at(weight, row2, at, there, BYTES)
    tile3 = _words_at(weight, row3, at, there, BYTES)
    if HIGH_BITS > 0:
        high0 = _high_words_at(weight, row0, at, there)
        high1 = _high_words_at(weight, row1, at, there)
        high2 = _high_words_at(weight, row2, at, there)
        high3 = _high_words_at(weight, row3, at, there)
    if PDL:
        wait_and_launch_next()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        at = k // GROUP + groups
        there = (at + GROUPS < NUM_GROUPS) & (step + 1 < SHARE)
        next0 = _words_at(weight, row0, at + GROUPS, there, BYTES)
        next1 = _words_at(weight, row1, at + GROUPS, there, BYTES)
        next2 = _words_at(weight, row2, at + GROUPS, there, BYTES)
        next3 = _words_at(weight, row3, at + GROUPS, there, BYTES)
        if HIGH_BITS > 0:
            next_high0 = _high_words_at(weight, row0, at + GROUPS, there)
            next_high1 = _high_words_at(weight, row1, at + GROUPS, there)
            next_high2 = _high_words_at(weight, row2, at + GROUPS, there)
            next_high3 = _high_words_at(weight, row3, at + GROUPS, there)
        else:
            high0, high1, high2, high3 = tile0, tile1, tile2, tile3
        columns = k + (groups * GROUP)[:, None] + offsets[None, :]
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, partials, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTIALS
        )
        squares += tl.sum(hidden * hidden, axis=1)
        total = tl.sum(factors, axis=1)
        of0 = _group_sums(tile0, high0, factors, weight, 0, ASM)
        of1 = _group_sums(tile1, high1, factors, weight, 0, ASM)
        of2 = _group_sums(tile2, high2, factors, weight, 0, ASM)
        of3 = _group_sums(tile3, high3, factors, weight, 0, ASM)
        if PACKED:
            columns += BYTES
            factors, hidden = input_at(
                x, residual_out, partials, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTIALS
            )
            squares += tl.sum(hidden * hidden, axis=1)
            second_total = tl.sum(factors, axis=1)
            second0 = _group_sums(tile0, high0, factors, weight, 1, ASM)
            second1 = _group_sums(tile1, high1, factors, weight, 1, ASM)
            second2 = _group_sums(tile2, high2, factors, weight, 1, ASM)
            second3 = _group_sums(tile3, high3, factors, weight, 1, ASM)
        else:
            second_total, second0, second1, second2, second3 = total, of0, of1, of2, of3
        sums0 += _scaled(of0, second0, total, second_total, weight, row0, at)
        sums1 += _scaled(of1, second1, total, second_total, weight, row1, at)
        sums2 += _scaled(of2, second2, total, second_total, weight, row2, at)
        sums3 += _scaled(of3, second3, total, second_total, weight, row3, at)
        tile0, tile1, tile2, tile3 = next0, next1, next2, next3
        if HIGH_BITS > 0:
            high0, high1, high2, high3 = next_high0, next_high1, next_high2, next_high3
    even = tl.join(tl.sum(sums0, axis=1), tl.sum(sums2, axis=1))
    odd = tl.join(tl.sum(sums1, axis=1), tl.sum(sums3, axis=1))
    return tl.reshape(tl.join(even, odd), [4 * QUARTER]), squares


@triton.jit
def _words_at(weight, rows, groups, there, BYTES: tl.constexpr):
    """[n, GROUPS, BYTES / 4] int32"""
    STRIDE: tl.constexpr = weight.STRIDE
    words = (groups * (BYTES // 4))[None, :, None] + tl.arange(0, BYTES // 4)[None, None, :]
    pointers = weight.data + rows[:, None, None] * (STRIDE // 4) + words
    return tl.load(pointers, mask=there[None, :, None], other=0, eviction_policy="evict_first")


@triton.jit
def _high_words_at(weight, rows, groups, there):
    """[n, GROUPS] int32 for one high bit, [n, GROUPS, 2] for two"""
    NUM_GROUPS: tl.constexpr = weight.NUM_GROUPS
    if weight.HIGH_BITS == 1:
        pointers = weight.high + rows[:, None] * NUM_GROUPS + groups[None, :]
        high = tl.load(pointers, mask=there[None, :], other=0, eviction_policy="evict_first")
    else:
        words = groups[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]
        pointers = weight.high + rows[:, None, None] * (NUM_GROUPS * 2) + words
        high = tl.load(pointers, mask=there[None, :, None], other=0, eviction_policy="evict_first")
    return high


@triton.jit
def _group_sums(tile, high, factors, weight, HALF: tl.constexpr, ASM: tl.constexpr):
    """tile [n, GROUPS, WORDS], factors [GROUPS, BYTES] → [n, GROUPS]. Half bytes are too large by EXCESS."""
    if weight.FORM == "int4":
        codes = codes_to_floats(half_codes(tile, high, HALF, weight.HIGH_BITS), ASM)
    elif weight.FORM == "fp8":
        codes = fp8_bytes_to_floats(tile)
    else:
        codes = bytes_to_floats(tile, ASM)
    return tl.sum(codes * factors[None, :, :], axis=2)


@triton.jit
def _scaled(first, second, first_total, second_total, weight, rows, groups):
    """Convert sums of codes in halves of groups [n, GROUPS] to sums of weights; totals [GROUPS] are the sums of the
    factors. Whole bytes have no second half."""
    there = (groups < weight.NUM_GROUPS)[None, :]
    scale, second_scale, least = group_scales(weight, rows[:, None], groups[None, :], there)
    if weight.FORM != "int4":
        sums = first * scale
    else:
        ZERO: tl.constexpr = EXCESS + weight.ZERO
        total = (first_total + second_total)[None, :]
        if weight.SCALES == "two":
            sums = (first - ZERO * first_total[None, :]) * scale
            sums += (second - ZERO * second_total[None, :]) * second_scale
        else:
            sums = (first + second - ZERO * total) * scale
        if weight.HAS_MINIMUMS:
            sums += least * total
    return sums
