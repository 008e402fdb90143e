"""The activation of a feed-forward layer, alone or as the gate of a GLU (Shazeer, 2020, arXiv:2002.05202), and other
functions of single numbers.

Shapes: M tokens, I intermediate size, P split-K partials (see norm.py).
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.triton.inputs import sum_partials

BLOCK = 1024


def silu_mul(out: Tensor, split_k_partials: Tensor) -> None:
    """`out = silu(gate) * up`. out [M, I]; split_k_partials [P, M, 2I], whose sum has gate in its first half."""
    activate(out, split_k_partials, "silu", gated=True)


def activate(out: Tensor, split_k_partials: Tensor, kind: str, *, gated: bool) -> None:
    """`out = kind(gate) * up`, or `out = kind(x)` if not `gated`.

    out [M, I]; split_k_partials [P, M, 2I], whose sum has gate in its first half, or [P, M, I]. `kind` is an
    `Activation` of `ModelConfig`, but not "swiglu_oai", which only experts have.
    """
    num_tokens, width = out.shape
    assert split_k_partials.shape[1:] == (num_tokens, 2 * width if gated else width)
    _activate[(num_tokens, triton.cdiv(width, BLOCK))](
        out,
        split_k_partials,
        num_tokens,
        WIDTH=width,
        NUM_PARTIALS=len(split_k_partials),
        KIND=kind,
        GATED=gated,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)) in float32, without overflow."""
    power = tl.exp(-tl.abs(gate))
    return gate * tl.where(gate >= 0, 1.0, power) / (1.0 + power)


@triton.jit
def tanh(x):
    """The hyperbolic tangent in float32, without overflow; its absolute error is one unit of 1."""
    power = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """The activation `KIND` of `kernels/activations.py`, float32."""
    if KIND == "silu":
        result = silu(x)
    elif KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # x * (1 + tanh(u)) / 2 is x * sigmoid(2u).
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        power = tl.exp(-2.0 * tl.abs(u))
        result = x * tl.where(u >= 0, 1.0, power) / (1.0 + power)
    elif KIND == "gelu_quick":
        power = tl.exp(-1.702 * tl.abs(x))
        result = x * tl.where(x >= 0, 1.0, power) / (1.0 + power)
    elif KIND == "relu":
        result = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(KIND == "relu2", "an unknown activation")
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        result = positive * positive
    return result


@triton.jit
def gated_activation(gate, up, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """`KIND(gate) * up`; "swiglu_oai" is that of gpt-oss, with its ALPHA and LIMIT."""
    if KIND == "swiglu_oai":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = silu(gate * ALPHA) / ALPHA * (up + 1.0)
    else:
        result = activation(gate, KIND) * up
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def _activate(
    out,
    split_k_partials,
    num_tokens,
    WIDTH: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    width: tl.constexpr = 2 * WIDTH if GATED else WIDTH
    begin = split_k_partials + token * width
    distance = num_tokens.to(tl.int64) * width
    result = sum_partials(begin, columns, inside, distance, NUM_PARTIALS)
    if GATED:
        up = sum_partials(begin + WIDTH, columns, inside, distance, NUM_PARTIALS)
        result = gated_activation(result, up, KIND, 1.0, 0.0)
    else:
        result = activation(result, KIND)
    tl.store(out + token * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)
