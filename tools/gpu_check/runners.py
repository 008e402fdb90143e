"""Executors of either device, made without a server around them."""

from pathlib import Path
from typing import Any

import msgspec

from pipeline.config.settings import Quantization, Settings
from pipeline.kernels.triton.launch import INTERPRETED
from pipeline.stages.execute.weights import Weights


def settings_for(
    device: str,
    *,
    dtype: str = "bfloat16",
    max_model_len: int,
    kv_cache_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    quantization: Quantization = "none",
    early_launch: bool = False,
) -> Settings:
    """On a CPU torch computes, whose ops are the plain references. Where kernels are interpreted, a GPU's memory is the
    machine's."""
    replace, plain = msgspec.structs.replace, Settings()
    if INTERPRETED:
        device = "cpu"
    kernels = "torch" if device == "cpu" else "auto"
    return replace(
        plain,
        max_model_len=max_model_len,
        quantization=quantization,
        execute=replace(
            plain.execute,
            device=device,
            dtype=dtype,
            kernels=kernels,
            kv_cache_bytes=kv_cache_bytes,
            programmatic_dependent_launch=early_launch,
        ),
        schedule=replace(plain.schedule, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )


def make_cpu_runner(settings: Settings, folder: Path) -> Any:
    """The CPU's executor for a prepared folder."""
    from pipeline.stages.execute.cpu.runner import CpuRunner

    return CpuRunner(settings, folder)


def make_runner(settings: Settings, folder: Path, weights: Weights | None = None) -> Any:
    """The GPU's executor for a prepared folder; with `weights` in place of those that the folder names."""
    from pipeline.stages.execute.cuda.runner import CudaRunner

    return CudaRunner(settings, folder, weights=weights)


def close(runner: Any) -> None:
    """Give back what it holds, on the GPU too once nobody names it."""
    runner.close()
