"""Lower bounds for a step's time on a GPU, and the summary of its measured times. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from pipeline.cli.profile.results import Case, KernelTime, MachineRates, OpTime, StepTime
from pipeline.kernels.step_inputs import BLOCK_SIZE, block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.measuring.launches import Launches
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from pipeline.stages.execute.measuring.cases import floor_of

PRODUCTS, ATTENTION, REST = "products", "attention", "rest"
"""The ops that a step's kernels are grouped into."""
OPS_OF_KERNELS = {
    **dict.fromkeys(("gemv", "skinny_gemm", "_dequantize", "_experts"), PRODUCTS),
    **dict.fromkeys(("_decode_kernel", "_attend_kernel"), ATTENTION),
}
LIBRARIES = ("gemm", "nvjet", "cutlass", "cublas")
"""Substrings of the names of cuBLAS's kernels."""


@dataclass(slots=True)
class GpuSamples:
    """Measurements of one case."""

    steps_ms: list[float] = field(default_factory=list)
    launches_ms: list[float] = field(default_factory=list)
    launched: list[Launches] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of an op in a step."""

    num_bytes: float = 0.0
    operations: float = 0.0

    def floor_s(self, rates: MachineRates, dtype: torch.dtype) -> float:
        """Least seconds: by bytes or by operations, whichever takes longer."""
        flops = rates.float32_flops if dtype == torch.float32 else rates.bf16_flops
        return max(self.num_bytes / rates.read_bytes, self.operations / flops)


def weight_bytes(model: DeviceModel) -> dict[str, int]:
    """Bytes of the matrices on the GPU, by format. A tied head counts once."""
    counted: Counter[str] = Counter()
    layers = *model.matrices, *model.expert_matrices
    for matrix in (*layers, model.head, *(() if model.table is model.head else (model.table,))):
        counted[matrix.format] += matrix.num_bytes
    return dict(counted)


def costs_of(case: Case, config: ModelConfig, model: DeviceModel, kv_dtype: torch.dtype) -> dict[str, Cost]:
    """The least work of a step by op: read each matrix, key and value once, write the new keys and values (of
    `kv_dtype`), multiply and add. Moving activations is negligible and left out."""
    layers = sum(matrix.num_rows * matrix.num_columns for matrix in model.matrices)
    head = model.head.num_rows * model.head.num_columns
    num_bytes = float(sum(matrix.num_bytes for matrix in (*model.matrices, model.head)))
    weights = float(layers)
    if (experts := config.experts) is not None:
        share = experts.num_per_token / experts.num
        weights += share * sum(matrix.num_rows * matrix.num_columns for matrix in model.expert_matrices)
        # What tokens choose at random. A token reads its own experts.
        read = 1 - (1 - share) ** case.num_tokens
        num_bytes += read * sum(matrix.num_bytes for matrix in model.expert_matrices)
    products = Cost(num_bytes, 2 * (case.num_tokens * weights + case.num_seqs * head))
    moved = seen = 0
    positions = range(case.context - case.num_new, case.context)
    for layer in range(config.num_layers):
        window = config.window_of(layer) or case.context
        moved += max(case.num_new, min(case.context, window))
        seen += sum(min(position + 1, window) for position in positions)
    block = block_bytes(1, config.num_kv_heads, config.head_dim, kv_dtype.itemsize)
    attention = Cost(
        case.num_seqs * moved * block / BLOCK_SIZE,
        case.num_seqs * seen * 4 * config.num_heads * config.head_dim,
    )
    return {PRODUCTS: products, ATTENTION: attention, REST: Cost()}


def op_of(kernel: str) -> str:
    """The op of a kernel, by its name."""
    if any(part in kernel.lower() for part in LIBRARIES):
        return PRODUCTS
    return OPS_OF_KERNELS.get(kernel, REST)


def summarize(
    case: Case, samples: GpuSamples, costs: dict[str, Cost], rates: MachineRates, dtype: torch.dtype
) -> StepTime:
    """Medians of a case's samples, the times of its kernels, and the lower bounds."""
    step_s = median(samples.steps_ms) / 1e3
    kernels = _kernel_times(samples.launched)
    total = Cost(sum(cost.num_bytes for cost in costs.values()), sum(cost.operations for cost in costs.values()))
    ops = [_op_time(op, kernels, cost, cost.floor_s(rates, dtype)) for op, cost in costs.items()] if kernels else []
    return StepTime(
        case=case,
        ms=step_s * 1e3,
        num_samples=len(samples.steps_ms),
        tokens_per_s=case.num_tokens / step_s,
        ops=ops,
        in_turn=floor_of(sum(cost.floor_s(rates, dtype) for cost in costs.values()), step_s),
        overlapped=floor_of(total.floor_s(rates, dtype), step_s),
        launch_ms=median(samples.launches_ms),
        kernels=kernels,
    )


def _kernel_times(launched: Iterable[Launches]) -> list[KernelTime]:
    """Times per kernel, summed over its grids, longest first."""
    found: dict[str, list[Launches]] = {}
    for each in launched:
        found.setdefault(each.kernel, []).append(each)
    times = [
        KernelTime(name, op_of(name), sum(each.num for each in some), sum(each.total_us for each in some) / 1e3)
        for name, some in found.items()
    ]
    return sorted(times, key=lambda kernel: -kernel.ms)


def _op_time(op: str, kernels: Sequence[KernelTime], cost: Cost, least_s: float) -> OpTime:
    members = [kernel for kernel in kernels if kernel.op == op]
    seconds = sum(kernel.ms for kernel in members) / 1e3
    per_s = 1 / seconds if seconds else 0.0
    return OpTime(
        name=op,
        is_integer=False,
        count=round(sum(kernel.count for kernel in members)),
        ms=seconds * 1e3,
        bytes=cost.num_bytes,
        operations=cost.operations,
        gb_per_s=cost.num_bytes * per_s / 1e9,
        gflop_per_s=cost.operations * per_s / 1e9,
        floor=floor_of(least_s, seconds),
    )
