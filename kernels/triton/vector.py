"""Products of one token: a matrix times a vector, summed as it streams by.

A program makes BLOCK_N rows, and of their columns a share where SPLIT is more than 1. It walks along them a tile at a
time: the next tile's loads are on their way, 16 bytes a thread, while the one that came is multiplied, so that a
program has a tile or two in flight all along and a multiprocessor several programs. On an H100 about 40 KiB in flight
for each multiprocessor are needed to keep its memory busy (3.3 TB/s at less than 1 µs, on 132 of them). Programs that
are all there at once share the bandwidth and end together; so their number need not be a multiple of anything.
Weights are the first to leave the caches: what they are multiplied with is read again by the next program.

What is asked of the processors: with floats 2 instructions a weight, with 4 bits about 3 (unpack.py), where memory
brings in 7 and 29 weights a cycle and multiprocessor, which issues 128. (Counted in machine code, not measured.)
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.gate import silu
from pipeline.kernels.triton.inputs import input_at, rows_of
from pipeline.kernels.triton.unpack import EXCESS, bytes_to_floats, halves_to_floats

LANES = tl.constexpr(8)
"""Neighbours that one thread holds of a row of floats: it sums them itself, before anything is kept."""


@triton.jit
def vector_product(
    out,
    x,
    residual_out,
    parts,
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
    NUM_PARTS: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    """out [SPLIT, N] = values [N, K] · x [K]. Grid (cdiv(N, BLOCK_N), SPLIT).

    NORM and the like: see `input_at`; then `out` is that of the normalised x. GATED: values are [2N, K], and out is
    silu(first half) * second half; SPLIT is 1.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    rows, weight_rows = rows_of(tl.program_id(0), N, BLOCK_N, GATED)
    PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    begin = split * SHARE * BLOCK_K
    if GROUP == 0:
        sums, squares = _floats(
            x, residual_out, parts, norm_weight, values, weight_rows, begin, SHARE, PROGRAMS, K, NORM, NUM_PARTS,
            BLOCK_K, PDL,
        )  # fmt: skip
    else:
        sums, squares = _codes(
            x, residual_out, parts, norm_weight, values, scales, minimums, weight_rows, begin, SHARE, PROGRAMS, K,
            STRIDE, GROUP, ZERO, PACKED, HAS_MINIMUMS, NORM, NUM_PARTS, BLOCK_K, PDL, ASM,
        )  # fmt: skip
    if NORM:
        if SPLIT > 1:  # this program has seen a share of the squares only
            squares = tl.zeros([BLOCK_K], tl.float32)
            for k in range(0, K, BLOCK_K):
                columns = k + tl.arange(0, BLOCK_K)
                _, hidden = input_at(
                    x, residual_out, parts, norm_weight, 0, columns, columns < K, 1, False, K, NORM, NUM_PARTS
                )
                squares += hidden * hidden
        sums *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    if HAS_BIAS:  # once: with the first part
        sums += tl.load(bias + weight_rows) * (split == 0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(sums, [BLOCK_N, 2]))
        sums = silu(gate) * up
    tl.store(out + split * N + rows, sums.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _floats(
    x,
    residual_out,
    parts,
    norm_weight,
    values,
    rows,
    begin,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
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
    if PDL:  # weights were there before the launch before this one; everything else may come from it
        tl.extra.cuda.gdc_wait()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        there = ((k + BLOCK_K + places < K) & (step + 1 < SHARE))[None, :]
        next_tile = tl.load(pointers + (k + BLOCK_K), mask=there, other=0.0, eviction_policy="evict_first")
        columns = k + places
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, parts, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTS
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
    parts,
    norm_weight,
    values,
    scales,
    minimums,
    rows,
    begin,
    SHARE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    ASM: tl.constexpr,
):
    """The same of codes, of which `values` are words of four bytes: a tile is [rows, groups, words of a group], and
    sums are scaled by group."""
    ROWS: tl.constexpr = rows.shape[0]
    BYTES: tl.constexpr = GROUP // 2 if PACKED else GROUP
    WORDS: tl.constexpr = BYTES // 4
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    NUM_GROUPS: tl.constexpr = STRIDE // BYTES
    groups = tl.arange(0, GROUPS)
    places = tl.arange(0, BYTES)
    long_rows = rows.to(tl.int64)
    words = (groups * WORDS)[None, :, None] + tl.arange(0, WORDS)[None, None, :]
    pointers = values + long_rows[:, None, None] * (STRIDE // 4) + words
    scale_at = long_rows[:, None] * NUM_GROUPS + groups[None, :]
    sums = tl.zeros([ROWS, GROUPS], tl.float32)
    squares = tl.zeros([GROUPS], tl.float32)
    first = begin // GROUP
    there = (first + groups < NUM_GROUPS)[None, :, None]
    tile = tl.load(pointers + first * WORDS, mask=there, other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(SHARE):
        k = begin + step * BLOCK_K
        group = k // GROUP
        there = ((group + GROUPS + groups < NUM_GROUPS) & (step + 1 < SHARE))[None, :, None]
        next_tile = tl.load(pointers + (group + GROUPS) * WORDS, mask=there, other=0, eviction_policy="evict_first")
        here = (group + groups < NUM_GROUPS)[None, :]
        scale = tl.load(scales + scale_at + group, mask=here, other=0.0).to(tl.float32)
        columns = k + (groups * GROUP)[:, None] + places[None, :]
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, parts, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTS
        )
        squares += tl.sum(hidden * hidden, axis=1)
        total = tl.sum(factors, axis=1)
        if PACKED:
            of_groups = tl.sum(halves_to_floats(tile, ASM) * factors[None, :, :], axis=2)
            columns += BYTES
            factors, hidden = input_at(
                x, residual_out, parts, norm_weight, 0, columns, columns < K, 1, writes, K, NORM, NUM_PARTS
            )
            squares += tl.sum(hidden * hidden, axis=1)
            total += tl.sum(factors, axis=1)
            of_groups += tl.sum(halves_to_floats(tile >> 4, ASM) * factors[None, :, :], axis=2)
            of_groups -= (EXCESS + ZERO) * total[None, :]
        else:
            of_groups = tl.sum(bytes_to_floats(tile, ASM) * factors[None, :, :], axis=2)
        sums += of_groups * scale
        if HAS_MINIMUMS:
            least = tl.load(minimums + scale_at + group, mask=here, other=0.0).to(tl.float32)
            sums += least * total[None, :]
        tile = next_tile
    return tl.sum(sums, axis=1), squares
