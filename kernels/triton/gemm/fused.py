"""Matmuls fused with the sum of split-K partials and the norm before them, and with SwiGLU after them.

At batch 1 a small model's time is that of its launches, one or two microseconds each. With fusion a layer is: qkv (with
its norm), attention in two launches, output, gate and up (with norm and SwiGLU), down. Every program of a matmul sums
partials and computes the norm itself, from caches; `fuses` decides where that costs too much.

The residual alternates between two buffers, because some programs still read the old one while others write the new.

Shapes as in linear.py; I intermediate size.
"""

from torch import Tensor

from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.gemm.linear import launch, launch_gemm
from pipeline.kernels.triton.gemm.tuned import SKINNY_TOKENS, VECTOR_TOKENS, GemmConfig, Op

L1_BYTES_PER_S = 2e13
"""A matmul of one token reads its inputs again from the L1 caches: 64 of 128 bytes per cycle on 132 multiprocessors
(reasoned, not measured)."""
L2_BYTES_PER_S = 4e12
"""A matmul of several tokens copies its inputs from the L2 cache into shared memory (likewise)."""
LAUNCH_S = 2.5e-6
"""Cost of a separate norm in a graph: its node, its start and its end (likewise)."""


def fuses(num_tokens: int, num_partials_in: int, num_columns: int, num_programs: int) -> bool:
    """Whether a matmul with a fused norm is expected to take less time than a norm and a matmul.

    Each of `num_programs` programs reads residual and partials, `num_tokens` rows of `num_columns` float32.
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
    """`residual_out = residual_in + partials_in.sum(0)`, and the matmul of its norm; M is at most 16.

    partials_out [num_split_k_partials, M, N], residual_in and residual_out [M, K] float32, partials_in [P, M, K] of any
    dtype, norm_weight [K] float32, bias [N] float32 or None. Without `partials_in`, `residual_out` is not written.
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
    """The same, then `out = silu(gate) * up`. out [M, I], matrix [2I, K] with gate in its first half, bias [2I]."""
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
    """`silu(gate) * up` of normalized x [M, K]; M is at most 16. Otherwise as `norm_swiglu`."""
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
