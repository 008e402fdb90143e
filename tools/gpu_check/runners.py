"""Executors without a server around them."""

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
    early_launch: bool = True,
) -> Settings:
    """Settings for one device. A CPU uses the plain torch ops. With interpreted kernels, the GPU executor runs in host
    memory."""
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
            # Several processes compare models at the same time. Their threads would wait for each other.
            num_threads=1 if device == "cpu" else plain.execute.num_threads,
        ),
        schedule=replace(plain.schedule, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )


def make_cpu_runner(settings: Settings, folder: Path) -> Any:
    """A CPU executor for a prepared folder."""
    from pipeline.stages.execute.cpu.runner import CpuRunner

    return CpuRunner(settings, folder)


def make_runner(settings: Settings, folder: Path, weights: Weights | None = None) -> Any:
    """A GPU executor for a prepared folder. `weights` replaces the folder's weights."""
    from pipeline.stages.execute.cuda.runner import CudaRunner

    return CudaRunner(settings, folder, weights=weights)


def close(runner: Any) -> None:
    """Free the runner's resources, including its GPU memory."""
    runner.close()
