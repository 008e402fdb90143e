"""Linear layers: `split_k_partials.sum(0) = x @ weight.T + bias`, with sums in float32.

The implementation depends on the number of tokens M:

    M              floats                    codes
    1              vector.py                 vector.py
    2 … 16         skinny.py                 skinny.py
    17 … 128       cuBLAS                    skinny.py
    above          cuBLAS                    dequantized into scratch memory, then cuBLAS

Up to 16 tokens a matmul is bound by the bytes of its weight. If the matrix has few rows, its columns are split among
programs, each of which writes a float32 split-K partial. The next kernel sums them in order. Otherwise there is one
partial, of the dtype of x.

Shapes: M tokens, N rows and K columns of a weight, P split-K partials, S samples, V vocabulary size, H hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from pipeline.kernels.triton.gemm import tuned
from pipeline.kernels.triton.gemm.dequantize import add_bias, dequantize_rows
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.gemm.skinny import skinny_gemm
from pipeline.kernels.triton.gemm.tuned import CODE_TOKENS, SKINNY_TOKENS, VECTOR_TOKENS, GemmConfig, Op
from pipeline.kernels.triton.gemm.vector import gemv
from pipeline.kernels.triton.launch import INTERPRETED, UPCAST_DOT

DEQUANTIZED_VALUES = 1 << 25
"""Values to dequantize at once, 64 MiB as bfloat16: enough rows for cuBLAS to reach its full speed."""

MAX_STAGE_BYTES = 192 * 1024
"""Shared memory for tiles in flight. A program may have 227 KiB, but sums and operands need some too."""

DTYPES = {
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
    torch.float32: triton.language.float32,
}


def num_split_k_partials(matrix: DeviceMatrix, num_tokens: int) -> int:
    """P for a matmul with `num_tokens` tokens. It does not change while serving."""
    if num_tokens > SKINNY_TOKENS:
        return 1
    return config_of("linear", matrix, num_tokens).split


def split_k_partials_dtype(matrix: DeviceMatrix, num_tokens: int) -> torch.dtype:
    """The dtype of the partials: float32 if there are several, else the matrix's."""
    return matrix.dtype if num_split_k_partials(matrix, num_tokens) == 1 else torch.float32


def dequantize_scratch(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Scratch memory for matmuls of many tokens with codes. All matrices share it, because they run one by one."""
    return torch.empty(DEQUANTIZED_VALUES, dtype=dtype, device=device)


def linear(
    split_k_partials: Tensor,
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    wide: Tensor | None = None,
    *,
    split: int | None = None,
    pdl: bool = False,
) -> None:
    """split_k_partials [P, M, N] of `split_k_partials_dtype`, x [M, K] of the matrix's dtype, bias [N] float32 or None.

    Rows of the result may be parts of longer ones. `split` replaces the P of `num_split_k_partials`. `wide` is
    `dequantize_scratch`; without it, our own kernels multiply codes for any number of tokens. With `pdl`, our own
    kernels may start while the previous launch ends (programmatic dependent launch).
    """
    num_tokens = len(x)
    if num_tokens <= SKINNY_TOKENS or (matrix.form != "float" and (num_tokens <= CODE_TOKENS or wide is None)):
        launch_gemm(
            "linear", split_k_partials, x, matrix, bias, config_of("linear", matrix, num_tokens, split), pdl=pdl
        )
        return
    out = split_k_partials[0]
    if matrix.form == "float":
        torch.mm(x, matrix.values.t(), out=out)
    else:
        assert wide is not None
        step = wide.numel() // matrix.num_columns
        for begin in range(0, matrix.num_rows, step):
            end = min(begin + step, matrix.num_rows)
            rows = wide[: (end - begin) * matrix.num_columns].view(-1, matrix.num_columns)
            dequantize_rows(rows, matrix, begin)
            torch.mm(x, rows.t(), out=out[:, begin:end])
    if bias is not None:
        add_bias(out, bias)


def logits(out: Tensor, x: Tensor, matrix: DeviceMatrix) -> None:
    """`out = x @ matrix.T`, not rounded. out [S, V] float32, x [S, H]."""
    if len(x) <= SKINNY_TOKENS or matrix.form != "float":
        launch_gemm("logits", out, x, matrix, None)
    elif matrix.dtype == torch.float32:
        torch.mm(x, matrix.values.t(), out=out)
    elif out.is_cuda:
        torch.ops.aten.mm.dtype_out(x, matrix.values.t(), torch.float32, out=out)
    else:  # torch has no such matmul on a CPU
        torch.mm(x.float(), matrix.values.float().t(), out=out)


def config_of(op: Op, matrix: DeviceMatrix, num_tokens: int, split: int | None = None) -> GemmConfig:
    """The launch configuration of our own matmul, with another number of split-K partials if `split` is given."""
    config = tuned.choose(
        op,
        num_tokens=num_tokens,
        num_rows=matrix.num_rows // 2 if op == "swiglu" else matrix.num_rows,
        num_columns=matrix.num_columns,
        format=matrix.format,
        device=matrix.device,
    )
    return config if split is None else replace(config, split=split)


def launch_gemm(
    op: Op,
    out: Tensor,
    x: Tensor,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Launch our own matmul. out [P, M, N], or [M, N / 2] with op "swiglu"; P is `config.split`."""
    launch(op, out, x, x, x, x, 0, 0.0, matrix, bias, len(x), config, norm=False, pdl=pdl)


def launch(
    op: Op,
    out: Tensor,
    x: Tensor,
    residual_out: Tensor,
    partials_in: Tensor,
    norm_weight: Tensor,
    num_partials_in: int,
    eps: float,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    num_tokens: int,
    config: GemmConfig | None,
    *,
    norm: bool,
    pdl: bool,
) -> None:
    """Launch vector.py or skinny.py. Unused tensor arguments get any tensor."""
    config = config or config_of(op, matrix, num_tokens)
    num_rows = matrix.num_rows // 2 if op == "swiglu" else matrix.num_rows
    tiles = triton.cdiv(num_rows, config.block_n)
    shared: dict[str, Any] = {
        "N": num_rows,
        "K": matrix.num_columns,
        "OUT": out.stride(-2),
        "HAS_BIAS": bias is not None,
        "NORM": norm,
        "NUM_PARTIALS": num_partials_in,
        "SWIGLU": op == "swiglu",
        "SPLIT": config.split,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PDL": pdl,
        "num_warps": config.num_warps,
    }
    if pdl:
        shared["launch_pdl"] = True
    is_vector = num_tokens <= VECTOR_TOKENS
    weight = matrix.planes(words=is_vector)
    inputs = (out, x, residual_out, partials_in, norm_weight, eps, weight, matrix.values if bias is None else bias)
    if is_vector:
        gemv[(tiles, config.split)](*inputs, ASM=not INTERPRETED, **shared)
        return
    grid = (tiles, config.split, triton.cdiv(num_tokens, config.block_m))
    skinny_gemm[grid](
        *inputs,
        num_tokens,
        BLOCK_M=config.block_m,
        NUM_STAGES=_num_stages(config, op, matrix, num_partials_in) if norm else config.num_stages,
        DTYPE=DTYPES[matrix.dtype],
        UPCAST=UPCAST_DOT,
        **shared,
    )


def _num_stages(config: GemmConfig, op: Op, matrix: DeviceMatrix, num_partials_in: int) -> int:
    """Stages of a matmul with a fused norm, whose stages also hold residual and partials in float32."""
    halves = 2 if op == "swiglu" else 1
    weight_bytes = tuned.bytes_of_columns(matrix.format, config.block_k) * config.block_n * halves
    hidden_bytes = 4 * config.block_k * (config.block_m * (1 + num_partials_in) + 1)
    return max(1, min(config.num_stages, MAX_STAGE_BYTES // (weight_bytes + hidden_bytes)))
