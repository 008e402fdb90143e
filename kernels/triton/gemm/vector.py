"""Matrix-vector products, for one token.

A program computes BLOCK_N rows, and with SPLIT > 1 only a part of their columns. It goes through them tile by tile.
While it multiplies one tile, it loads the next, 16 bytes per thread, so that a program always has a tile or two in
flight and a multiprocessor has several programs. An H100 needs about 40 KiB in flight per multiprocessor to keep its
memory busy (3.3 TB/s at less than 1 µs, 132 multiprocessors). Programs that run at the same time share the bandwidth
and end together, so their number need not be a multiple of anything.

Weights are evicted first from the caches, because the next program reads the activations again.

Floats take 2 instructions per weight, 4 bits about 3 (unpack.py). Memory delivers 7 and 29 weights per cycle to a
multiprocessor, which issues 128 instructions. (Counted in machine code, not measured.)
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.gemm.unpack import EXCESS, bytes_to_floats, halves_to_floats
from pipeline.kernels.triton.inputs import input_at, weight_rows_of
from pipeline.kernels.triton.swiglu import silu

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
    values,
    scales,
    minimums,
    bias,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
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
    """out [SPLIT, N] = values [N, K] · x [K]. Grid (cdiv(N, BLOCK_N), SPLIT).

    With NORM (see `input_at`), x is normalized first. With SWIGLU, values are [2N, K] and out is silu(first half) *
    second half; SPLIT is 1.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    ROWS: tl.constexpr = 2 * BLOCK_N if SWIGLU else BLOCK_N
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = weight_rows_of(tl.program_id(0), tl.arange(0, ROWS), N, BLOCK_N, SWIGLU)
    PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    begin = split * SHARE * BLOCK_K
    if GROUP == 0:
        sums, squares = _floats(
            x, residual_out, partials, norm_weight, values, weight_rows, begin, SHARE, PROGRAMS, K, NORM, NUM_PARTIALS,
            BLOCK_K, PDL,
        )  # fmt: skip
    else:
        sums, squares = _codes(
            x, residual_out, partials, norm_weight, values, scales, minimums, begin, SHARE, PROGRAMS, N, K, STRIDE,
            GROUP, ZERO, PACKED, HAS_MINIMUMS, NORM, NUM_PARTIALS, SWIGLU, BLOCK_N, BLOCK_K, PDL, ASM,
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
    tl.store(out + split * N + rows, sums.to(out.dtype.element_ty), mask=rows < N)


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
    places = tl.arange(0, BLOCK_K)
    pointers = values + rows.to(tl.int64)[:, None] * K + places[None, :]
    sums = tl.zeros([ROWS, BLOCK_K // LANES], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    tile = tl.load(pointers + begin, mask=(begin + places < K)[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:  # everything but the weights may come from the previous launch
        tl.extra.cuda.gdc_wait()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        there = ((k + BLOCK_K + places < K) & (step + 1 < SHARE))[None, :]
        next_tile = tl.load(pointers + (k + BLOCK_K), mask=there, other=0.0, eviction_policy="evict_first")
        columns = k + places
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
    values,
    scales,
    minimums,
    begin,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SWIGLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    """The same for codes. `values` are words of four bytes; a tile is [rows, groups, words of a group], and sums are
    scaled by group.

    Rows are distributed over four tiles, so that a thread loads and converts activations from shared memory once for
    four of its rows. With one tile the compiler would repeat that for each row.
    """
    QUARTER: tl.constexpr = (2 * BLOCK_N if SWIGLU else BLOCK_N) // 4
    BYTES: tl.constexpr = GROUP // 2 if PACKED else GROUP
    WORDS: tl.constexpr = BYTES // 4
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    NUM_GROUPS: tl.constexpr = STRIDE // BYTES
    groups = tl.arange(0, GROUPS)
    places = tl.arange(0, BYTES)
    lines = tl.arange(0, QUARTER) * 4
    row0 = weight_rows_of(tl.program_id(0), lines, N, BLOCK_N, SWIGLU).to(tl.int64)
    row1 = weight_rows_of(tl.program_id(0), lines + 1, N, BLOCK_N, SWIGLU).to(tl.int64)
    row2 = weight_rows_of(tl.program_id(0), lines + 2, N, BLOCK_N, SWIGLU).to(tl.int64)
    row3 = weight_rows_of(tl.program_id(0), lines + 3, N, BLOCK_N, SWIGLU).to(tl.int64)
    words = (groups * WORDS)[None, :, None] + tl.arange(0, WORDS)[None, None, :]
    sums0 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums1 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums2 = tl.zeros([QUARTER, GROUPS], tl.float32)
    sums3 = tl.zeros([QUARTER, GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    group = begin // GROUP
    there = (group + groups < NUM_GROUPS)[None, :, None]
    tile0 = _words_at(values, row0, words + group * WORDS, there, STRIDE)
    tile1 = _words_at(values, row1, words + group * WORDS, there, STRIDE)
    tile2 = _words_at(values, row2, words + group * WORDS, there, STRIDE)
    tile3 = _words_at(values, row3, words + group * WORDS, there, STRIDE)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        group = k // GROUP
        there = ((group + GROUPS + groups < NUM_GROUPS) & (step + 1 < SHARE))[None, :, None]
        next_words = words + (group + GROUPS) * WORDS
        next0 = _words_at(values, row0, next_words, there, STRIDE)
        next1 = _words_at(values, row1, next_words, there, STRIDE)
        next2 = _words_at(values, row2, next_words, there, STRIDE)
        next3 = _words_at(values, row3, next_words, there, STRIDE)
        columns = k + (groups * GROUP)[:, None] + places[None, :]
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, partials, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTIALS
        )
        squares += tl.sum(hidden * hidden, axis=1)
        total = tl.sum(factors, axis=1)
        of0 = _group_sums(tile0, factors, PACKED, ASM)
        of1 = _group_sums(tile1, factors, PACKED, ASM)
        of2 = _group_sums(tile2, factors, PACKED, ASM)
        of3 = _group_sums(tile3, factors, PACKED, ASM)
        if PACKED:
            columns += BYTES
            factors, hidden = input_at(
                x,
                residual_out,
                partials,
                norm_weight,
                0,
                columns,
                columns < K,
                1,
                writes,
                K,
                NORM,
                NUM_PARTIALS,
            )
            squares += tl.sum(hidden * hidden, axis=1)
            total += tl.sum(factors, axis=1)
            of0 += _group_sums(tile0 >> 4, factors, PACKED, ASM)
            of1 += _group_sums(tile1 >> 4, factors, PACKED, ASM)
            of2 += _group_sums(tile2 >> 4, factors, PACKED, ASM)
            of3 += _group_sums(tile3 >> 4, factors, PACKED, ASM)
        at = group + groups
        sums0 += _scaled(of0, total, scales, minimums, row0, at, NUM_GROUPS, ZERO, PACKED, HAS_MINIMUMS)
        sums1 += _scaled(of1, total, scales, minimums, row1, at, NUM_GROUPS, ZERO, PACKED, HAS_MINIMUMS)
        sums2 += _scaled(of2, total, scales, minimums, row2, at, NUM_GROUPS, ZERO, PACKED, HAS_MINIMUMS)
        sums3 += _scaled(of3, total, scales, minimums, row3, at, NUM_GROUPS, ZERO, PACKED, HAS_MINIMUMS)
        tile0, tile1, tile2, tile3 = next0, next1, next2, next3
    even = tl.join(tl.sum(sums0, axis=1), tl.sum(sums2, axis=1))
    odd = tl.join(tl.sum(sums1, axis=1), tl.sum(sums3, axis=1))
    return tl.reshape(tl.join(even, odd), [4 * QUARTER]), squares


@triton.jit
def _words_at(values, rows, words, there, STRIDE: tl.constexpr):
    pointers = values + rows[:, None, None] * (STRIDE // 4) + words
    return tl.load(pointers, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _group_sums(tile, factors, PACKED: tl.constexpr, ASM: tl.constexpr):
    """tile [n, GROUPS, WORDS], factors [GROUPS, BYTES] → [n, GROUPS]; half bytes are too large by EXCESS."""
    codes = halves_to_floats(tile, ASM) if PACKED else bytes_to_floats(tile, ASM)
    return tl.sum(codes * factors[None, :, :], axis=2)


@triton.jit
def _scaled(
    sums,
    total,
    scales,
    minimums,
    rows,
    groups,
    NUM_GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
):
    """Convert sums of codes by group [n, GROUPS] to sums of weights; `total` [GROUPS] are the sums of the factors."""
    at = rows[:, None] * NUM_GROUPS + groups[None, :]
    there = (groups < NUM_GROUPS)[None, :]
    if PACKED:
        sums -= (EXCESS + ZERO) * total[None, :]
    sums *= tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
    if HAS_MINIMUMS:
        sums += tl.load(minimums + at, mask=there, other=0.0).to(tl.float32) * total[None, :]
    return sums
