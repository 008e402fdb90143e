"""What kernels read: sums of split-K partials and, for a matmul of few tokens, its rows of the weight and activations
with or without a fused norm.

A norm scales each token by one number. So a matmul can multiply `hidden * weight`, sum the squares of `hidden` at the
same time, and scale its result at the end: hidden is read once, and the norm needs no launch.
"""

import triton
import triton.language as tl


@triton.jit
def wait_and_launch_next():
    """With programmatic dependent launch: wait until the previous launch is complete, then let the next one begin.

    The next one begins after all programs of this one have called it. So what a launch reads before it waits may come
    from any launch but the previous one. If it could begin earlier, several launches would wait on the multiprocessors
    at the same time, in the way of the one that computes.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def sum_partials(split_k_partials, at, inside, distance, NUM_PARTIALS: tl.constexpr):
    """The sum of split-K partials at `at`, in their order, float32; 0 where not `inside`. They are `distance` (int64)
    numbers apart."""
    total = tl.load(split_k_partials + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTIALS):
        total += tl.load(split_k_partials + part * distance + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def input_at(
    x,
    residual_out,
    split_k_partials,
    norm_weight,
    tokens,
    columns,
    inside,
    num_tokens,
    writes,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
):
    """Returns the numbers to multiply with and those to sum the squares of, float32, in the shape of `columns`; 0 where
    not `inside`.

    Without NORM both are x [M, WIDTH]. With it, `x` is the incoming residual, `split_k_partials` [NUM_PARTS, M, WIDTH]
    are added to it first, and a program with `writes` stores the sum in `residual_out`. That is another buffer, because
    other programs may not have read `x` yet.
    """
    at = tokens * WIDTH + columns
    hidden = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        for part in tl.static_range(NUM_PARTIALS):
            hidden += tl.load(split_k_partials + part * num_tokens * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
        if NUM_PARTIALS > 0:
            tl.store(residual_out + at, hidden, mask=inside & (tokens < num_tokens) & writes)
        scaled = hidden * tl.load(norm_weight + columns, mask=inside, other=0.0)
        return scaled, hidden
    return hidden, hidden


@triton.jit
def weight_rows_of(program, offsets, N: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Rows of the weight that a program reads for its BLOCK_N rows of the result, clamped to N. With SWIGLU they are
    twice as many: a row of gate, then the row of up, N below it."""
    if SWIGLU:
        rows = tl.minimum(program * BLOCK_N + offsets // 2, N - 1) + offsets % 2 * N
    else:
        rows = tl.minimum(program * BLOCK_N + offsets, N - 1)
    return rows
