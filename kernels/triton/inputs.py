"""What a product of few tokens multiplies: which rows of its weights, and with what.

That is numbers as they are, or a residual on its way to a norm.
A norm scales each token by one number. So a product can take `hidden * weight`, sum the squares of `hidden` beside, and
scale its result at the end: hidden is read once, and no launch stands before the product.
"""

import triton
import triton.language as tl


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
    """Numbers to multiply with, and what their squares are summed of, float32, in the shape of `columns`; 0 where not
    `inside`.

    Without NORM both are x [M, WIDTH]. With it, `x` is the residual that came in, `split_k_partials` [NUM_PARTS, M,
    WIDTH] what is added to it first, and a program that `writes` stores the sum in `residual_out`. That is never the
    residual that came in: others may not have read it yet.
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
def weight_rows_of(program, places, N: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Rows of the weight that a program reads for its BLOCK_N rows of the result, of which the last may be beyond N; of
    these none is. With GATED they are twice as many: a gate's row, then its counterpart N below."""
    if SWIGLU:
        rows = tl.minimum(program * BLOCK_N + places // 2, N - 1) + places % 2 * N
    else:
        rows = tl.minimum(program * BLOCK_N + places, N - 1)
    return rows
