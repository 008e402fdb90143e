"""The activation of a SwiGLU feed-forward layer (Shazeer, 2020, arXiv:2002.05202).

Shapes: M tokens, I intermediate size, P split-K partials (see norm.py).
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def silu_mul(out: Tensor, split_k_partials: Tensor) -> None:
    """`out = silu(gate) * up`. out [M, I]; split_k_partials [P, M, 2I], whose sum has gate in its first half."""
    num_tokens, width = out.shape
    _silu_mul[(num_tokens, triton.cdiv(width, BLOCK))](
        out, split_k_partials, num_tokens, WIDTH=width, NUM_PARTIALS=len(split_k_partials), BLOCK=BLOCK, num_warps=4
    )


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)) in float32, without overflow."""
    power = tl.exp(-tl.abs(gate))
    return gate * tl.where(gate >= 0, 1.0, power) / (1.0 + power)


@triton.jit(do_not_specialize=["num_tokens"])
def _silu_mul(out, split_k_partials, num_tokens, WIDTH: tl.constexpr, NUM_PARTIALS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(NUM_PARTIALS):
        begin = split_k_partials + (part * num_tokens.to(tl.int64) + token) * (2 * WIDTH)
        gate += tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(begin + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)
