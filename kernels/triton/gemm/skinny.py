"""Matmuls of few tokens on tensor cores: weights are read once and multiplied with up to T tokens.

The tile of weights is the left operand: its rows fill a tensor core's 64 (or 16) rows for any number of tokens. Tokens
are on the right and may be as few as 8. Floats are copied asynchronously into shared memory, several tiles ahead, and
multiplied from there. So are codes; each thread dequantizes its operands in registers.

A program computes BLOCK_N rows over a part of their columns, because few rows would give too few programs to keep the
memory busy. Each part is a split-K partial, and the next kernel sums them (norm.py). With SWIGLU a program has rows of
both halves and completes them itself, so the columns can't be split.

Shapes: M tokens, N rows, K columns, T = BLOCK_M tokens of a program.
"""

import triton
import triton.language as tl

from pipeline.kernels.triton.activations import silu
from pipeline.kernels.triton.gemm.planes import group_scales
from pipeline.kernels.triton.gemm.unpack import EXCESS, code_to_float, fp8_to_float
from pipeline.kernels.triton.inputs import input_at, wait_and_launch_next, weight_rows_of


@triton.jit(do_not_specialize=["num_tokens"])
def skinny_gemm(
    out,
    x,
    residual_out,
    partials,
    norm_weight,
    eps,
    weight,
    bias,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    SWIGLU: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out [SPLIT, M, N] = x [M, K] · weight [N, K]ᵀ, or silu(first half) * second half of it.

    Grid (cdiv(N, BLOCK_N), SPLIT, cdiv(M, BLOCK_M)). `weight` are `Planes`. OUT is the length of a row of `out`. For
    NORM see `input_at`; BLOCK_M is then at least M. DTYPE is that of the operands.
    """
    if PDL:
        wait_and_launch_next()
    PACKED: tl.constexpr = weight.FORM == "int4"
    GROUP: tl.constexpr = weight.GROUP
    split = tl.program_id(1)
    ROWS: tl.constexpr = 2 * BLOCK_N if SWIGLU else BLOCK_N
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_rows = weight_rows_of(tl.program_id(0), tl.arange(0, ROWS), N, BLOCK_N, SWIGLU)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Padding repeats the last token, because a mask would prevent wide loads.
    some_tokens = tl.minimum(tokens, num_tokens - 1)
    PROGRAMS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    begin = split * SHARE * BLOCK_K

    HALF: tl.constexpr = GROUP // 2 if PACKED else BLOCK_K
    WIDTH: tl.constexpr = BLOCK_K // 2 if PACKED else BLOCK_K
    """Bytes (or floats) of a tile's row."""
    offsets = tl.arange(0, WIDTH)
    # The column of a byte's low half; that of its high half is half a group later.
    low_columns = offsets // HALF * GROUP + offsets % HALF if PACKED else offsets
    long_rows = weight_rows.to(tl.int64)[:, None]
    ROW: tl.constexpr = weight.STRIDE
    pointers = weight.data + long_rows * ROW + offsets[None, :]

    sums = tl.zeros([ROWS, BLOCK_M], tl.float32)
    squares = tl.zeros([WIDTH, BLOCK_M], tl.float32)
    EVEN: tl.constexpr = (K % (BLOCK_K * SPLIT) == 0) and (ROW * (2 if PACKED else 1) == K)
    for step in tl.range(0, SHARE, num_stages=NUM_STAGES):
        k = begin + step * BLOCK_K
        at = k // 2 if PACKED else k
        there = (at + offsets < ROW)[None, :]
        tile = tl.load(pointers + at) if EVEN else tl.load(pointers + at, mask=there, other=0)
        columns = (k + low_columns)[:, None]
        writes = tl.program_id(0) == (k // BLOCK_K) % PROGRAMS
        factors, hidden = input_at(
            x, residual_out, partials, norm_weight, some_tokens[None, :], columns, columns < K, num_tokens, writes,
            K, NORM, NUM_PARTIALS,
        )  # fmt: skip
        if NORM:
            squares += hidden * hidden
        if PACKED:
            columns += HALF
            high_factors, hidden = input_at(
                x, residual_out, partials, norm_weight, some_tokens[None, :], columns, columns < K, num_tokens, writes,
                K, NORM, NUM_PARTIALS,
            )  # fmt: skip
            if NORM:
                squares += hidden * hidden
        else:
            high_factors = factors
        sums = _multiply(sums, tile, factors, high_factors, weight, long_rows, k, DTYPE, UPCAST)
    if NORM:
        if SPLIT > 1:  # this program has only a part of the squares
            all_offsets = tl.arange(0, BLOCK_K)
            total = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
            for k in range(0, K, BLOCK_K):
                columns = (k + all_offsets)[:, None]
                _, hidden = input_at(
                    x, residual_out, partials, norm_weight, some_tokens[None, :], columns, columns < K, num_tokens,
                    False, K, NORM, NUM_PARTIALS,
                )  # fmt: skip
                total += hidden * hidden
            mean = tl.sum(total, axis=0) / K
        else:
            mean = tl.sum(squares, axis=0) / K
        sums *= (1.0 / tl.sqrt(mean + eps))[None, :]
    if HAS_BIAS:  # only in the first partial
        sums += tl.load(bias + weight_rows)[:, None] * (split == 0).to(tl.float32)
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [BLOCK_N, 2, BLOCK_M]), (0, 2, 1)))
        sums = silu(gate) * up
    target = (split * num_tokens + tokens).to(tl.int64)[None, :] * OUT + rows[:, None]
    mask = (tokens < num_tokens)[None, :] & (rows < N)[:, None]
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(sums, tile, factors, high_factors, weight, rows, k, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """sums [n, T] + tile [n, W] · factors [W, T]; for half bytes also · high_factors.

    Weights are dequantized exactly in float32, and rounded once to DTYPE.
    """
    DOT: tl.constexpr = tl.float32 if UPCAST else DTYPE
    low = factors.to(DTYPE).to(DOT)
    if weight.FORM == "float":
        sums = tl.dot(tile.to(DOT), low, sums, input_precision="ieee")
    else:
        PACKED: tl.constexpr = weight.FORM == "int4"
        BYTES: tl.constexpr = weight.GROUP // 2 if PACKED else weight.GROUP
        GROUPS: tl.constexpr = tile.shape[1] // BYTES
        groups = (k // weight.GROUP + tl.arange(0, GROUPS))[None, :]
        there = groups < weight.NUM_GROUPS
        scale, second_scale, least = group_scales(weight, rows, groups, there)
        wide = tile.to(tl.int32)
        if PACKED:
            first, second = _half_codes(wide, weight, rows, groups, there)
            ZERO: tl.constexpr = EXCESS + weight.ZERO
            numbers = _scaled(code_to_float(first) - ZERO, scale, least, GROUPS, weight.HAS_MINIMUMS)
            sums = tl.dot(numbers.to(DTYPE).to(DOT), low, sums, input_precision="ieee")
            numbers = _scaled(code_to_float(second) - ZERO, second_scale, least, GROUPS, weight.HAS_MINIMUMS)
            sums = tl.dot(numbers.to(DTYPE).to(DOT), high_factors.to(DTYPE).to(DOT), sums, input_precision="ieee")
        else:
            if weight.FORM == "fp8":
                codes = fp8_to_float(wide)
            else:
                codes = (((wide + 128) << 8) | 0x47000000).to(tl.float32, bitcast=True) - 32896.0
            numbers = _scaled(codes, scale, least, GROUPS, weight.HAS_MINIMUMS).to(DTYPE).to(DOT)
            sums = tl.dot(numbers, low, sums, input_precision="ieee")
    return sums


@triton.jit
def _half_codes(wide, weight, rows, groups, there):
    """wide [n, W] int32, a byte each → codes in the first and the second halves of groups, [n, W] int32 each."""
    HIGH_BITS: tl.constexpr = weight.HIGH_BITS
    first = wide & 15
    second = wide >> 4
    if HIGH_BITS > 0:
        n: tl.constexpr = wide.shape[0]
        W: tl.constexpr = wide.shape[1]
        GROUPS: tl.constexpr = groups.shape[1]
        MASK: tl.constexpr = 2**HIGH_BITS - 1
        at = (rows * weight.NUM_GROUPS + groups) * HIGH_BITS
        words = tl.load(weight.high + at, mask=there, other=0)
        second_words = tl.load(weight.high + at + 1, mask=there, other=0) if HIGH_BITS == 2 else words >> 4
        offsets = tl.arange(0, W // GROUPS)
        bits = (8 * (offsets % 4) + HIGH_BITS * (offsets // 4))[None, None, :]
        first |= tl.reshape(((words[:, :, None] >> bits) & MASK) << 4, [n, W])
        second |= tl.reshape(((second_words[:, :, None] >> bits) & MASK) << 4, [n, W])
    return first, second


@triton.jit
def _scaled(numbers, scale, least, GROUPS: tl.constexpr, HAS_MINIMUMS: tl.constexpr):
    """numbers [n, W], scale and least [n, GROUPS] → [n, W] float32"""
    n: tl.constexpr = numbers.shape[0]
    W: tl.constexpr = numbers.shape[1]
    if GROUPS == 1:
        numbers = numbers * scale
        if HAS_MINIMUMS:
            numbers += least
    else:  # several groups in a tile: expand the scales to columns
        numbers = tl.reshape(numbers, [n, GROUPS, W // GROUPS]) * scale[:, :, None]
        if HAS_MINIMUMS:
            numbers += least[:, :, None]
        numbers = tl.reshape(numbers, [n, W])
    return numbers
