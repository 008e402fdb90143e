"""Products that do what stands before and behind them: a sum of parts and a norm before, a gate behind.

A small model at batch 1 takes its time from launches, of which each costs a microsecond or two whatever it does. So a
layer is here: qkv (with its norm), attention in two, output, gate and up (with norm and gate), down. Every program of a
product sums the parts and norms for itself; that is read from caches, and `fuses` says where it is too much.

The residual goes back and forth between two buffers: programs still read the old one while others write the new.

Shapes as in linear.py; I intermediate size.
"""

from torch import Tensor

from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.gemm.linear import launch, launch_gemm
from pipeline.kernels.triton.tuned import SKINNY_TOKENS, VECTOR_TOKENS, GemmConfig, Op

L1_BYTES_PER_S = 2e13
"""What a product of one token reads again, it finds in the L1 cache of its multiprocessor: 64 bytes a cycle, of 128, on
132 of them (reasoned, not measured)."""
L2_BYTES_PER_S = 4e12
"""What a product of several tokens copies into shared memory comes out of the L2 cache (likewise)."""
LAUNCH_S = 2.5e-6
"""What a norm of its own costs inside a graph: its node, its beginning and its end (likewise)."""


def fuses(num_tokens: int, num_partials_in: int, num_columns: int, num_programs: int) -> bool:
    """Whether a product with its own norm is expected to take less time than a norm and a product.

    Each of `num_programs` programs reads residual and parts, `num_tokens` rows of `num_columns` float32.
    """
    if num_tokens > SKINNY_TOKENS:
        return False
    bytes_read = num_programs * num_tokens * num_columns * 4 * (1 + num_partials_in)
    return bytes_read / (L1_BYTES_PER_S if num_tokens <= VECTOR_TOKENS else L2_BYTES_PER_S) < LAUNCH_S


def norm_linear(
    partials_out: Tensor,
    residual_out: Tensor | None,
    residual_in: Tensor,
    partials_in: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """`residual_out = residual_in + parts_in.sum(0)`, and the product of its norm; M is at most 16.

    parts_out [num_parts, M, N], residual_in and residual_out [M, K] float32, parts_in [P, M, K] of any dtype,
    norm_weight [K] float32, bias [N] float32 or None. Without `partials_in` nothing is written but the product.
    """
    _launch("linear", partials_out, residual_out, residual_in, partials_in, norm_weight, eps, matrix, bias, config, pdl)


def norm_swiglu(
    out: Tensor,
    residual_out: Tensor | None,
    residual_in: Tensor,
    partials_in: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """The same, then `out = silu(gate) * up`. out [M, I], matrix [2I, K] with the gate's half first, bias [2I]."""
    _launch("swiglu", out, residual_out, residual_in, partials_in, norm_weight, eps, matrix, bias, config, pdl)


def swiglu(
    out: Tensor,
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """`silu(gate) * up` of x [M, K], which is normalised already; M is at most 16. Otherwise as `norm_swiglu`."""
    assert len(x) <= SKINNY_TOKENS
    launch_gemm("swiglu", out, x, matrix, bias, config, pdl=pdl)


def _launch(
    op: Op,
    out: Tensor,
    residual_out: Tensor | None,
    residual_in: Tensor,
    partials_in: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    config: GemmConfig | None,
    pdl: bool,
) -> None:
    num_tokens = len(residual_in)
    assert num_tokens <= SKINNY_TOKENS
    launch(
        op,
        out,
        residual_in,
        residual_in if residual_out is None else residual_out,
        residual_in if partials_in is None else partials_in,
        norm_weight,
        0 if partials_in is None else len(partials_in),
        eps,
        matrix,
        bias,
        num_tokens,
        config,
        norm=True,
        pdl=pdl,
    )
