"""Checks norms, embeddings, activations and matrix products: everything between two attention layers.

Shapes: M tokens, N rows and K columns of a weight, P split-k partials, H hidden size, I intermediate size.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.matrix import Matrix, quantize
from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels.blocks import random_blocks
from tools.gpu_check.kernels.checking import EXACT, ROUNDED, check_output
from tools.gpu_check.readings import Reading
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY

MODELS = {"8B": LLAMA_8B, "1B": LLAMA_1B, "135M": SMOLLM2_135M}
EPS = 1e-5
FEW = (1, 2, 5, 16)
"""Token counts that our own GEMM kernels handle."""
MANY = (17, 64, 200)
NUM_PARTIALS = 3


def items(context: Context) -> list[Item]:
    made = [Item(f"products of floats, {name}", partial(_floats, name=name), limit_s=100) for name in _names(context)]
    made += [
        Item(f"products of {format}, {name}", partial(_codes, name=name, format=format), limit_s=110)
        for format, name in CODES
        if not context.interpreted or format in ("int4", "q8_0", "q5_0")
    ]
    made += [Item(f"products with norms, {name}", partial(_fused, name=name)) for name in _names(context)]
    return [*made, Item("norms", _norms), Item("embedding", _embedding), Item("swiglu", _gate), Item("logits", _logits)]


CODES: tuple[tuple[str, str], ...] = (
    ("int4", "8B"),
    ("int8", "8B"),
    ("int4", "135M"),
    ("q8_0", "135M"),
    ("q4_1", "135M"),
    ("q4_0", "135M"),
    ("q4_k", "8B"),
    ("q6_k", "8B"),
    ("q5_k", "1B"),
    ("q5_0", "135M"),
    ("q5_1", "135M"),
)


def _names(context: Context) -> list[str]:
    return ["8B"] if context.interpreted else list(MODELS)


def _config(context: Context, name: str) -> ModelConfig:
    return TINY if context.interpreted else MODELS[name]


def matrices_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's matrices."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    return {
        "qkv": (queries + 2 * config.num_kv_heads * config.head_dim, hidden),
        "out": (hidden, queries),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }


# ---------------------------------------------------------------------------------------------------------- products


def _floats(context: Context, name: str) -> Iterator[Reading]:
    for dtype in (torch.bfloat16,) if name != "135M" else (torch.bfloat16, torch.float32):
        for which, (rows, columns) in matrices_of(_config(context, name)).items():
            matrix = _on_device(_random(rows, columns), dtype, None)
            counts = (2,) if context.interpreted else (*FEW, *MANY) if which in ("qkv", "down") else (1, 16, 64)
            for num in counts:
                yield _linear(f"{which} {_short(dtype)}, {name}, {num} tokens", matrix, num, with_bias=which == "qkv")


def _codes(context: Context, name: str, format: str) -> Iterator[Reading]:
    config = _config(context, name)
    for which, (rows, columns) in matrices_of(config).items():
        numbers = _random(rows, columns)
        matrix = _on_device(numbers, torch.bfloat16, format)
        counts = (1,) if context.interpreted else (1, 4, 16, 40, 200) if which == "down" else (1, 16)
        for num in counts:
            yield _linear(f"{which} {format}, {name}, {num} tokens", matrix, num, with_bias=which == "down")


def _linear(case: str, matrix: Any, num: int, *, with_bias: bool) -> Reading:
    from pipeline.kernels.triton.gemm.linear import (
        dequantize_scratch,
        linear,
        num_split_k_partials,
        split_k_partials_dtype,
    )

    x = gpu.random(num, num, matrix.num_columns, dtype=matrix.dtype)
    bias = gpu.random(9, matrix.num_rows) if with_bias else None
    dtype = split_k_partials_dtype(matrix, num)
    partials = torch.empty(num_split_k_partials(matrix, num), num, matrix.num_rows, dtype=dtype, device=gpu.device())
    wide = dequantize_scratch(matrix.dtype, gpu.device()) if matrix.form != "float" else None
    right = _product(x, matrix) + (0 if bias is None else bias.double())
    sums = torch.empty(num, matrix.num_rows, dtype=torch.float64, device=gpu.device())

    def run() -> None:
        gpu.poison(partials)
        linear(partials, x, matrix, bias, wide)
        torch.sum(partials, 0, dtype=torch.float64, out=sums)

    bound = EXACT if matrix.form == "float" and dtype == torch.float32 else ROUNDED
    return check_output(case, run, sums, right, bound, f"{len(partials)} parts of {_short(dtype)}")


def _fused(context: Context, name: str) -> Iterator[Reading]:
    from pipeline.kernels.triton.gemm.fused import norm_linear, norm_swiglu
    from pipeline.kernels.triton.gemm.linear import num_split_k_partials

    config = _config(context, name)
    shapes = matrices_of(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    for format in (None, "int4") if name != "1B" else (None,):
        qkv = _on_device(_random(*shapes["qkv"]), torch.bfloat16, format)
        gate_up = _on_device(_random(*shapes["gate_up"]), torch.bfloat16, format)
        weight = 1 + 0.1 * gpu.random(5, hidden)
        for num in (1,) if context.interpreted else (1, 3, 16):
            residual = gpu.random(1, num, hidden)
            partials = gpu.random(2, NUM_PARTIALS, num, hidden)
            summed = residual.double() + partials.double().sum(0)
            normed = _rms(summed, weight)
            what = f"{format or 'bf16'}, {name}, {num} tokens"
            left = torch.empty_like(residual)
            out = torch.empty(
                num_split_k_partials(qkv, num), num, qkv.num_rows, dtype=torch.float32, device=gpu.device()
            )
            sums = torch.empty(num, qkv.num_rows, dtype=torch.float64, device=gpu.device())

            def product(  # type: ignore[no-untyped-def]
                out=out,
                left=left,
                residual=residual,
                partials=partials,
                weight=weight,
                qkv=qkv,
                sums=sums,
            ):
                gpu.poison(out)
                gpu.poison(left)
                norm_linear(out, left, residual, partials, weight, EPS, qkv, None)
                torch.sum(out, 0, dtype=torch.float64, out=sums)

            yield check_output(f"norm + qkv {what}", product, sums, normed @ _wide(qkv).t(), ROUNDED)
            yield check_output(f"norm + qkv {what}: residual", product, left, summed, EXACT)
            gated = torch.empty(num, inner, dtype=torch.bfloat16, device=gpu.device())

            def gate(  # type: ignore[no-untyped-def]
                gated=gated,
                left=left,
                residual=residual,
                partials=partials,
                weight=weight,
                gate_up=gate_up,
            ):
                norm_swiglu(gated, left, residual, partials, weight, EPS, gate_up, None)

            gates, ups = (normed @ _wide(gate_up).t()).chunk(2, -1)
            yield check_output(
                f"norm + gate and up {what}", gate, gated, torch.nn.functional.silu(gates) * ups, ROUNDED
            )


def _logits(context: Context) -> Iterator[Reading]:
    from pipeline.kernels.triton.gemm.linear import logits

    for name in _names(context):
        config = _config(context, name)
        formats: tuple[str | None, ...] = (None, "q8_0") if name == "135M" or context.interpreted else (None,)
        for format in formats:
            head = _on_device(_random(config.vocab_size, config.hidden_size), torch.bfloat16, format)
            for num in (2,) if context.interpreted else (1, 8, 32):
                x = gpu.random(num, num, config.hidden_size, dtype=torch.bfloat16)
                out = torch.empty(num, config.vocab_size, dtype=torch.float32, device=gpu.device())
                case = f"logits {format or 'bf16'}, {name}, {num} samples"
                bound = EXACT if format is None else ROUNDED
                yield check_output(case, partial(logits, out, x, head), out, _product(x, head), bound)


def _random(rows: int, columns: int) -> Tensor:
    return gpu.random(rows % 97, rows, columns, scale=columns**-0.5)


def _on_device(numbers: Tensor, dtype: torch.dtype, format: str | None) -> Any:
    from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix

    rows, columns = numbers.shape
    device = gpu.device()
    match format:
        case None:
            plain: Format = "f32" if dtype == torch.float32 else "bf16"
            return DeviceMatrix.of([Matrix(plain, numbers.to(dtype), rows, columns)], dtype, device)
        case "int8" | "int4":
            return DeviceMatrix.of([Matrix("f32", numbers, rows, columns)], dtype, device, format)
        case "q8_0" | "q4_1" | "q4_0":
            return DeviceMatrix.of([quantize(numbers.cpu(), format)], dtype, device)
        case "q5_0" | "q5_1" | "q4_k" | "q5_k" | "q6_k":  # there is no quantizer for them here
            return DeviceMatrix.of([random_blocks(rows, columns, format, rows)], dtype, device)
    raise ValueError(format)


def _wide(matrix: Any) -> Tensor:
    wide: Tensor = matrix.dequantize()
    return wide.double()


def _product(x: Tensor, matrix: Any) -> Tensor:
    """[M, N] float64, computed for some rows of the weight at a time to save memory."""
    numbers = matrix.dequantize()
    return torch.cat([x.double() @ rows.double().t() for rows in numbers.split(1 << 15)], dim=1)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}[dtype]


# ------------------------------------------------------------------------------------------------- norms and the rest


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def _norms(context: Context) -> Iterator[Reading]:
    from pipeline.kernels.triton.norm import NormWeights, add_norm, take_norm

    for name in _names(context):
        hidden = _config(context, name).hidden_size
        weight = 1 + 0.1 * gpu.random(5, hidden)
        many = 4 if context.interpreted else 200
        for num, num_split_k_partials, dtype in (
            (3, 2, torch.float32),
            (many, 1, torch.bfloat16),
            (5, 0, torch.float32),
        ):
            before = gpu.random(1, num, hidden)
            partials = gpu.random(2, num_split_k_partials, num, hidden, dtype=dtype) if num_split_k_partials else None
            summed = before.double() + (0 if partials is None else partials.double().sum(0))
            residual = before.clone()
            out = torch.empty(num, hidden, dtype=torch.bfloat16, device=gpu.device())

            def add(out=out, residual=residual, before=before, partials=partials, weight=weight):  # type: ignore[no-untyped-def]
                residual.copy_(before)
                add_norm(out, residual, partials, NormWeights(weight), EPS)

            case = f"{name}, {num} tokens, {num_split_k_partials} parts of {_short(dtype)}"
            yield check_output(f"add and norm, {case}", add, out, _rms(summed, weight), ROUNDED)
            yield check_output(f"add and norm, {case}: residual", add, residual, summed, EXACT)
            index = torch.tensor([num - 1, 0], dtype=torch.int32, device=gpu.device())
            last = torch.empty(2, hidden, dtype=torch.bfloat16, device=gpu.device())
            yield check_output(
                f"norm of two rows, {case}",
                partial(take_norm, last, before, partials, index, NormWeights(weight), EPS),
                last,
                _rms(summed, weight)[index.long()],
                ROUNDED,
            )


def _embedding(context: Context) -> Iterator[Reading]:
    from pipeline.kernels.triton.norm import embed

    config = _config(context, "135M")
    for format in (None, "q8_0", "int4"):
        table = _on_device(_random(config.vocab_size, config.hidden_size), torch.bfloat16, format)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(0, config.vocab_size, (33,), generator=generator, dtype=torch.int32).to(gpu.device())
        out = torch.empty(33, config.hidden_size, device=gpu.device())
        right = table.dequantize()[ids.long()]
        case = f"embedding, {format or 'bf16'}"
        yield check_output(case, partial(embed, out, table, ids), out, right, EXACT)


def _gate(context: Context) -> Iterator[Reading]:
    from pipeline.kernels.triton.activations import silu_mul

    for name in _names(context):
        inner = _config(context, name).intermediate_size
        for num, num_split_k_partials, dtype in (
            (2, 4, torch.float32),
            (3 if context.interpreted else 130, 1, torch.bfloat16),
        ):
            partials = gpu.random(3, num_split_k_partials, num, 2 * inner, dtype=dtype)
            out = torch.empty(num, inner, dtype=torch.bfloat16, device=gpu.device())
            gates, ups = partials.double().sum(0).chunk(2, -1)
            right = torch.nn.functional.silu(gates) * ups
            case = f"silu and product, {name}, {num} tokens"
            yield check_output(case, partial(silu_mul, out, partials), out, right, ROUNDED)
