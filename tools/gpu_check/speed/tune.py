"""Times the candidate configurations of GEMMs on this GPU, and writes the table that kernels/triton/gemm/tuned.py
ships.

First many processes compile the candidates in parallel (`tune_compile.py`). Then one process times them alone. The
fastest candidate wins, unless its lead over the rule's choice is within the noise, or its result differs from a
float64 product. Weights rotate through more memory than the L2 cache holds. Batch size 1 comes first. The table is
written after each product, so that an end before the last one loses nothing.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.stored_matrix import Format
from pipeline.runtime.model.model_config import ModelConfig
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.kernels.blocks import random_blocks
from tools.gpu_check.kernels.checking import ROUNDED
from tools.gpu_check.kernels.dense import matrices_of
from tools.gpu_check.machine import rates
from tools.gpu_check.readings import Reading
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY

CACHE_BYTES = 64 * 2**20
"""More than an L2 cache holds."""
NOISE = 0.02
"""Smallest lead over the rule's choice that counts."""
MOST = 40
"""Candidates for a GEMM."""
FUSED_TOKENS = 16
"""Largest token count at which gate and up are fused with SwiGLU."""
REFUSALS = ("OutOfResources", "CompilationError", "PTXASError")
"""Errors of candidates that need more registers or shared memory than the GPU has."""
CASES: tuple[tuple[str, ModelConfig, str | None, int], ...] = (
    ("8B", LLAMA_8B, None, 1),
    ("8B int4", LLAMA_8B, "int4", 1),
    ("8B q4_k", LLAMA_8B, "q4_k", 1),
    ("8B q6_k", LLAMA_8B, "q6_k", 1),
    ("1B", LLAMA_1B, None, 1),
    ("135M", SMOLLM2_135M, None, 1),
    ("8B", LLAMA_8B, None, 8),
    ("135M", SMOLLM2_135M, None, 8),
    ("8B int4", LLAMA_8B, "int4", 8),
    ("8B q4_k", LLAMA_8B, "q4_k", 8),
    ("8B q6_k", LLAMA_8B, "q6_k", 8),
    ("1B", LLAMA_1B, None, 8),
    ("8B", LLAMA_8B, None, 16),
    ("135M", SMOLLM2_135M, None, 16),
    ("8B int4", LLAMA_8B, "int4", 64),
)
"""Model, its shape, weight format, and tokens of a step."""
BLOCKS: dict[str, Format] = {"q4_k": "q4_k", "q6_k": "q6_k"}
"""The formats of files among them."""


@dataclass(frozen=True, slots=True)
class Product:
    """A GEMM to tune."""

    case: str
    op: str
    num_rows: int
    num_columns: int
    format: str | None
    num_tokens: int

    def matrices(self, num_bytes: int) -> list[Any]:
        """Random weights of this shape, at least `num_bytes` in total."""
        from pipeline.kernels.matrix import Matrix
        from pipeline.kernels.triton.gemm.device_matrix import DeviceMatrix

        made: list[Any] = []
        while not made or sum(matrix.num_bytes for matrix in made) < num_bytes:
            if (of_file := BLOCKS.get(self.format or "")) is not None:
                blocks = random_blocks(self.num_rows, self.num_columns, of_file, len(made))
                made.append(DeviceMatrix.of([blocks], torch.bfloat16, gpu.device()))
                continue
            scale = self.num_columns**-0.5
            numbers = gpu.random(len(made), self.num_rows, self.num_columns, dtype=torch.bfloat16, scale=scale)
            matrix = Matrix("bf16", numbers, self.num_rows, self.num_columns)
            made.append(DeviceMatrix.of([matrix], torch.bfloat16, gpu.device(), self.format))  # type: ignore[arg-type]
        return made

    def shape(self, matrix: Any) -> Any:
        """The key of the table."""
        from pipeline.kernels.triton.gemm.tuned import GemmShape, bucket_of

        rows = self.num_rows // 2 if self.op == "swiglu" else self.num_rows
        return GemmShape(self.op, bucket_of(self.num_tokens), rows, self.num_columns, matrix.format)  # type: ignore[arg-type]

    def candidates(self, matrix: Any, most: int) -> list[Any]:
        """The rule's choice, then others in a fixed random order."""
        from pipeline.kernels.triton.gemm import tuned

        named = asdict(self.shape(matrix)) | {"num_tokens": self.num_tokens}
        first, *others = tuned.candidates(named.pop("op"), device=gpu.device(), **named)
        random.Random(1).shuffle(others)
        return [first, *others[: most - 1]]

    def launch(self, matrix: Any, config: Any, x: Tensor, out: Tensor) -> None:
        from pipeline.kernels.triton.gemm.linear import launch_gemm

        launch_gemm(self.op, out, x, matrix, None, config)  # type: ignore[arg-type]

    def x(self) -> Tensor:
        return gpu.random(1, self.num_tokens, self.num_columns, dtype=torch.bfloat16)

    def out(self, config: Any) -> Tensor:
        """An output buffer."""
        num, rows, device = self.num_tokens, self.num_rows, gpu.device()
        if self.op == "swiglu":
            return torch.empty(num, rows // 2, dtype=torch.bfloat16, device=device)
        if self.op == "logits":
            return torch.empty(num, rows, dtype=torch.float32, device=device)
        dtype = torch.float32 if config.split > 1 else torch.bfloat16
        return torch.empty(config.split, num, rows, dtype=dtype, device=device)


def products(context: Context) -> list[Product]:
    """All GEMMs to tune, the most important first."""
    made = []
    for name, config, format, num in (("tiny", TINY, None, 2),) if context.interpreted else CASES:
        for which, (rows, columns) in matrices_of(config).items():
            op = "swiglu" if which == "gate_up" and num <= FUSED_TOKENS else "linear"
            made.append(Product(f"{which}, {name}, {num} tokens", op, rows, columns, format, num))
        if format is None:
            size = config.vocab_size, config.hidden_size
            made.append(Product(f"head, {name}, {num} tokens", "logits", *size, format, num))
    return made


def most_of(context: Context) -> int:
    return 2 if context.interpreted else 12 if context.small else MOST


def items(context: Context) -> list[Item]:
    found: dict[Any, Any] = {}
    todo = products(context)
    return [
        Item(product.case, partial(_tuned, product=product, num_left=len(todo) - i, found=found))
        for i, product in enumerate(todo)
    ]


def _tuned(context: Context, product: Product, num_left: int, found: dict[Any, Any]) -> Iterator[Reading]:
    """Time the candidates of one product. `num_left` products share the remaining time."""
    end_s = context.left_s - context.left_s / num_left
    matrices = product.matrices(CACHE_BYTES if not context.interpreted else 1)
    x = product.x()
    times: dict[Any, float] = {}
    refused = 0
    for config in product.candidates(matrices[0], most_of(context)):
        if times and context.left_s < end_s and not context.interpreted:
            break
        try:
            times[config] = _time(product, matrices, config, x)
        except Exception as error:
            if type(error).__name__ not in REFUSALS:
                raise
            refused += 1
    assert times, "no candidate could be launched"
    first, rule_ms = next(iter(times.items()))
    best, best_ms = min(times.items(), key=lambda one: one[1])
    if best_ms > rule_ms * (1 - NOISE):
        best, best_ms = first, rule_ms
    off = _error(product, matrices[0], best, x)
    is_right = off <= ROUNDED
    found[product.shape(matrices[0])] = best if is_right else first
    where = _write_table(context, found)
    bound_us = matrices[0].num_bytes / rates.bandwidth(context) * 1e6
    note = f"{len(times)} timed, {refused} refused; the rule's choice takes {rule_ms * 1e3:.1f} µs; best {_words(best)}"
    note += f"; error {off:.1e}; {where}"
    numbers = {"times_us": [[asdict(config), each * 1e3] for config, each in times.items()]}
    del matrices
    gpu.free_memory()
    yield Reading(
        *(product.case, best_ms * 1e3, "µs", bound_us),
        less_is_better=True,
        result="" if is_right else "FAIL",
        note=note,
        numbers=numbers,
    )


def _time(product: Product, matrices: list[Any], config: Any, x: Tensor) -> float:
    out = product.out(config)

    def run(matrix: Any) -> gpu.Run:
        return lambda: product.launch(matrix, config, x, out)

    runs = [run(matrix) for matrix in matrices]
    if gpu.device().type == "cuda":
        runs *= max(1, 8 // len(runs))
    return gpu.time_graphed(runs, 15).median_ms


def _words(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(config).items())


def _error(product: Product, matrix: Any, config: Any, x: Tensor) -> float:
    """Relative error of a candidate, against float64."""
    from pipeline.kernels.triton.gemm.dequantize import dequantize_rows

    values = matrix.values
    if matrix.form != "float":
        values = torch.empty(product.num_rows, product.num_columns, dtype=x.dtype, device=x.device)
        dequantize_rows(values, matrix, 0)
    right = x.double() @ values.double().t()
    if product.op == "swiglu":
        gate, up = right.chunk(2, 1)
        right = torch.nn.functional.silu(gate) * up
    out = product.out(config)
    gpu.poison(out)
    product.launch(matrix, config, x, out)
    found = out.double().sum(0) if product.op == "linear" else out
    return gpu.relative_error(found, right)


def _write_table(context: Context, found: dict[Any, Any]) -> str:
    """Write the table beside the report, in the format of the shipped one. Entries that were not measured keep their
    shipped values. Returns where it is."""
    from pipeline.kernels.triton.gemm import tuned

    architecture = tuned.architecture(gpu.device())
    entries = {**tuned.table(architecture), **found}
    name = "interpreted" if context.interpreted else torch.cuda.get_device_name()
    if context.task.out is None:
        return "no table without --out"
    path = tuned.write_table(Path(context.task.out), architecture, entries, name)
    return f"{len(entries)} entries in {path}"
