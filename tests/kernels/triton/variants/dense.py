"""Launches of norms, SwiGLU and products, in the sizes of real models."""

from dataclasses import dataclass

import torch

from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import GPU_BLOCK_BYTES, Format, row_bytes
from pipeline.kernels.triton import activations, lora, norm
from pipeline.kernels.triton.attention.qk_norm import QkNormWeights, qk_norm
from pipeline.kernels.triton.gemm import fused
from pipeline.kernels.triton.gemm.dequantize import dequantize_rows
from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix
from pipeline.kernels.triton.gemm.linear import config_of, launch_gemm, num_split_k_partials, split_k_partials_dtype
from pipeline.kernels.triton.logits import finish_logits

BF16 = torch.bfloat16
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    hidden: int
    qkv: int
    inner: int
    vocabulary: int


SMOLLM2_135M = Sizes(576, 960, 1536, 49152)
LLAMA_1B = Sizes(2048, 3072, 8192, 128256)
QWEN2_0B5 = Sizes(896, 1152, 4864, 151936)
QWEN2_1B5 = Sizes(1536, 2048, 8960, 151936)
LLAMA_8B = Sizes(4096, 6144, 14336, 128256)
GEMMA_2_9B = Sizes(3584, 8192, 14336, 256000)


def launches() -> None:
    """One of each kind."""
    _add_norm(LLAMA_8B, 2, num_parts_in=2)
    _linear("int4g128", LLAMA_8B.qkv, LLAMA_8B.hidden, 1)
    _linear("bf16", LLAMA_8B.hidden, LLAMA_8B.inner, 16)
    _linear("int4g128", LLAMA_8B.hidden, LLAMA_8B.inner, 16)
    _norm_linear("bf16", LLAMA_1B.qkv, LLAMA_1B.hidden, 1, num_parts_in=1)
    _norm_swiglu("bf16", SMOLLM2_135M.inner, SMOLLM2_135M.hidden, 1, num_parts_in=1, pdl=True)
    _norm_swiglu("int8g64", SMOLLM2_135M.inner, SMOLLM2_135M.hidden, 8, num_parts_in=2)
    _embed("int4g32", SMOLLM2_135M)
    _others(GEMMA_2_9B, 2)
    # Of a Q4_K_M file, where V and down are q6_k.
    _linear("q4_k", QWEN2_1B5.qkv, QWEN2_1B5.hidden, 1)
    _linear("q6_k", QWEN2_1B5.hidden, QWEN2_1B5.inner, 1)
    _linear("q6_k", QWEN2_1B5.hidden, QWEN2_1B5.inner, 16)
    _norm_swiglu("q4_k", QWEN2_1B5.inner, QWEN2_1B5.hidden, 8, num_parts_in=2)
    _linear("q5_0", 896, 896, 8)
    _embed("q6_k", QWEN2_1B5)
    _lora(LLAMA_8B, (4096, 1024, 1024), BF16)


def all_launches() -> None:
    """About 450, which take many minutes."""
    _lora(SMOLLM2_135M, (1536, 1536), torch.float32, num_tokens=300)
    for sizes in (SMOLLM2_135M, LLAMA_1B, LLAMA_8B):
        hidden, group = sizes.hidden, 128 if sizes.hidden % 128 == 0 else 64
        for num_parts_in in (1, 3, 8):
            _add_norm(sizes, 4, num_parts_in=num_parts_in)
            _take_norm(sizes, 4, num_parts_in=num_parts_in)
            _gate(sizes, 4, num_parts_in)
        for format in ("bf16", f"int8g{group}", f"int4g{group}", "int8g32", "int4g32"):
            _embed(format, sizes)
            for num_tokens in (1, 8, 16):
                _linear(format, sizes.qkv, hidden, num_tokens)
                _linear(format, hidden, sizes.inner, num_tokens)
                _logits(format, sizes.vocabulary, hidden, num_tokens)
                _norm_linear(format, sizes.qkv, hidden, num_tokens, num_parts_in=1 if num_tokens == 1 else 4)
                _norm_swiglu(format, sizes.inner, hidden, num_tokens, num_parts_in=1 if num_tokens == 1 else 8)
                _gate_up(format, sizes.inner, hidden, num_tokens)
            for num_tokens in () if format == "bf16" else (32, 64, 128):
                _linear(format, sizes.qkv, hidden, num_tokens)
        _norm_linear("bf16", sizes.qkv, hidden, 1, num_parts_in=1, pdl=True)
        _norm_linear("bf16", sizes.qkv, hidden, 16, num_parts_in=1, pdl=True)
        _linear("f32", hidden, hidden, 1)
        _linear("f32", hidden, hidden, 16)
        _dequantize(f"int4g{group}", sizes.hidden, sizes.hidden)
    for format in ("q4_k", "q5_k", "q6_k", "fp8g128"):
        for sizes in (QWEN2_1B5, LLAMA_8B):
            _of_a_file(format, sizes)
    for format in ("q5_0", "q5_1"):
        _of_a_file(format, QWEN2_0B5)


def _of_a_file(format: str, sizes: Sizes) -> None:
    """Everything that a format of GGUF or FP8 is used for."""
    hidden = sizes.hidden
    _embed(format, sizes)
    _dequantize(format, 64, hidden)
    for num_tokens in (1, 8, 16, 32, 128):
        _linear(format, sizes.qkv, hidden, num_tokens)
        _linear(format, hidden, sizes.inner, num_tokens)
        _logits(format, sizes.vocabulary, hidden, num_tokens)
    for num_tokens in (1, 8, 16):
        _norm_linear(format, sizes.qkv, hidden, num_tokens, num_parts_in=1 if num_tokens == 1 else 4)
        _norm_swiglu(format, sizes.inner, hidden, num_tokens, num_parts_in=1 if num_tokens == 1 else 8)
        _gate_up(format, sizes.inner, hidden, num_tokens)
    _norm_linear(format, sizes.qkv, hidden, 1, num_parts_in=1, pdl=True)


def _matrix(format: str | Format, num_rows: int, num_columns: int) -> DeviceMatrix:
    """Its content is never read."""
    if format in ("bf16", "f32"):
        dtype = BF16 if format == "bf16" else torch.float32
        values = torch.empty(num_rows, num_columns, dtype=dtype)
        return DeviceMatrix("float", values, None, None, 0, 0, dtype, num_rows, num_columns)
    if format in GPU_BLOCK_BYTES:
        # Without memory, because splitting it into planes would take longer than the compilation.
        data = torch.empty(num_rows, row_bytes(format, num_columns), dtype=torch.uint8, device="meta")
        return DeviceMatrix.of([Matrix(format, data, num_rows, num_columns)], BF16, "meta")
    form, _, group_text = format.partition("g")
    group = int(group_text)
    scales = torch.empty(num_rows, num_columns // group, dtype=torch.float16)
    if form == "int8":
        values = torch.empty(num_rows, num_columns, dtype=torch.int8)
        return DeviceMatrix("int8", values, scales, None, 0, group, BF16, num_rows, num_columns)
    if form == "fp8":
        values = torch.empty(num_rows, num_columns, dtype=torch.uint8)
        return DeviceMatrix("fp8", values, scales.float(), None, 0, group, BF16, num_rows, num_columns)
    values = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8)
    minimums = torch.empty_like(scales)
    return DeviceMatrix("int4", values, scales, minimums, 0, group, BF16, num_rows, num_columns)


def _partials(num_parts_in: int, num_tokens: int, width: int) -> torch.Tensor | None:
    if num_parts_in == 0:
        return None
    return torch.empty(num_parts_in, num_tokens, width, dtype=BF16 if num_parts_in == 1 else torch.float32)


def _linear(format: str, num_rows: int, num_columns: int, num_tokens: int) -> None:
    matrix = _matrix(format, num_rows, num_columns)
    split_k_partials = torch.empty(
        num_split_k_partials(matrix, num_tokens), num_tokens, num_rows, dtype=split_k_partials_dtype(matrix, num_tokens)
    )
    x = torch.empty(num_tokens, num_columns, dtype=matrix.dtype)
    launch_gemm("linear", split_k_partials, x, matrix, None, config_of("linear", matrix, num_tokens))


def _logits(format: str, num_rows: int, num_columns: int, num_tokens: int) -> None:
    matrix = _matrix(format, num_rows, num_columns)
    x = torch.empty(num_tokens, num_columns, dtype=matrix.dtype)
    launch_gemm("logits", torch.empty(num_tokens, num_rows), x, matrix, None)


def _gate_up(format: str, inner: int, num_columns: int, num_tokens: int) -> None:
    matrix = _matrix(format, 2 * inner, num_columns)
    x = torch.empty(num_tokens, num_columns, dtype=matrix.dtype)
    fused.swiglu(torch.empty(num_tokens, inner, dtype=matrix.dtype), x, matrix, torch.empty(2 * inner))


def _norm_linear(
    format: str, num_rows: int, num_columns: int, num_tokens: int, *, num_parts_in: int, pdl: bool = False
) -> None:
    matrix = _matrix(format, num_rows, num_columns)
    dtype = split_k_partials_dtype(matrix, num_tokens)
    split_k_partials = torch.empty(num_split_k_partials(matrix, num_tokens), num_tokens, num_rows, dtype=dtype)
    residual, residual_out = torch.empty(num_tokens, num_columns), torch.empty(num_tokens, num_columns)
    parts_in, weight = _partials(num_parts_in, num_tokens, num_columns), torch.empty(num_columns)
    fused.norm_linear(split_k_partials, residual_out, residual, parts_in, weight, EPS, matrix, None, pdl=pdl)


def _norm_swiglu(
    format: str, inner: int, num_columns: int, num_tokens: int, *, num_parts_in: int, pdl: bool = False
) -> None:
    matrix = _matrix(format, 2 * inner, num_columns)
    out = torch.empty(num_tokens, inner, dtype=matrix.dtype)
    residual, residual_out = torch.empty(num_tokens, num_columns), torch.empty(num_tokens, num_columns)
    parts_in, weight = _partials(num_parts_in, num_tokens, num_columns), torch.empty(num_columns)
    fused.norm_swiglu(out, residual_out, residual, parts_in, weight, EPS, matrix, None, pdl=pdl)


def _add_norm(sizes: Sizes, num_tokens: int, *, num_parts_in: int) -> None:
    width = sizes.hidden
    out, residual = torch.empty(num_tokens, width, dtype=BF16), torch.empty(num_tokens, width)
    norm.add_norm(out, residual, _partials(num_parts_in, num_tokens, width), norm.NormWeights(torch.empty(width)), EPS)


def _take_norm(sizes: Sizes, num_tokens: int, *, num_parts_in: int) -> None:
    width = sizes.hidden
    out, residual = torch.empty(num_tokens, width, dtype=BF16), torch.empty(num_tokens, width)
    index = torch.zeros(num_tokens, dtype=torch.int32)
    weights = norm.NormWeights(torch.empty(width))
    norm.take_norm(out, residual, _partials(num_parts_in, num_tokens, width), index, weights, EPS)


def _gate(sizes: Sizes, num_tokens: int, num_parts_in: int) -> None:
    split_k_partials = _partials(num_parts_in, num_tokens, 2 * sizes.inner)
    assert split_k_partials is not None
    activations.silu_mul(torch.empty(num_tokens, sizes.inner, dtype=BF16), split_k_partials)


def _others(sizes: Sizes, num_tokens: int) -> None:
    """What models do beyond Llama."""
    hidden, qkv = sizes.hidden, sizes.qkv
    weight = torch.empty(hidden)
    rms, layer = norm.NormWeights(weight), norm.NormWeights(weight, weight, centers=True)
    for norms, factor in (((rms, rms), 1.0), ((layer, layer), 1.0), ((layer, None), 0.22), ((None, rms), 1.0)):
        out, residual = torch.empty(num_tokens, hidden, dtype=BF16), torch.empty(num_tokens, hidden)
        norm.add_norm(out, residual, _partials(2, num_tokens, hidden), norms[0], EPS, norm.Sublayer(norms[1], factor))
    positions, table = torch.zeros(4, dtype=torch.int32), _matrix("bf16", 64, hidden)
    norm.embed(torch.empty(4, hidden), table, positions, 12.0, table, positions, 2)
    for kind in ("gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"):
        for gated in (False, True):
            x = torch.empty(1, num_tokens, (2 if gated else 1) * sizes.inner, dtype=BF16)
            activations.activate(torch.empty(num_tokens, sizes.inner, dtype=BF16), x, kind, gated=gated)
    finish_logits(torch.empty(num_tokens, sizes.vocabulary), torch.empty(sizes.vocabulary), 0.1, 30.0)
    for together, centers in ((True, False), (False, True)):
        weights = QkNormWeights(torch.empty(qkv // 2), torch.empty(qkv // 4), EPS, together, centers)
        qk_norm(torch.empty(1, num_tokens, qkv), torch.empty(2, num_tokens, qkv), weights, 128)


def _embed(format: str, sizes: Sizes) -> None:
    table = _matrix(format, 64, sizes.hidden)
    norm.embed(torch.empty(4, sizes.hidden), table, torch.zeros(4, dtype=torch.int32))


def _dequantize(format: str, num_rows: int, num_columns: int) -> None:
    matrix = _matrix(format, num_rows, num_columns)
    dequantize_rows(torch.empty(16, num_columns, dtype=BF16), matrix, 3)


def _lora(sizes: Sizes, outputs: tuple[int, ...], dtype: torch.dtype, *, num_tokens: int = 8, rank: int = 64) -> None:
    a = torch.zeros(2, len(outputs), rank, sizes.hidden, dtype=dtype)
    b, ranks = torch.zeros(2, rank, sum(outputs), dtype=dtype), torch.zeros(2, len(outputs), dtype=torch.int32)
    ends = tuple(int(end) for end in torch.tensor(outputs).cumsum(0))
    out, x = (torch.zeros(num_tokens, width, dtype=dtype) for width in (sum(outputs), sizes.hidden))
    adapters, shrunk = torch.zeros(num_tokens, dtype=torch.int32), lora.scratch(num_tokens, rank, "cpu")
    lora.add(out, x, adapters, lora.LoraMatrices(a, b, ranks, ends), shrunk)
