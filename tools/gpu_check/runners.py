"""Executors of either device, made without a server around them."""

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from pipeline.config.settings import Quantization, Settings
from pipeline.stages.execute.weights import Weights

CUDA_RUNNER = "pipeline.stages.execute.cuda.runner"


def settings_for(
    device: str,
    *,
    dtype: str = "bfloat16",
    max_model_len: int,
    kv_cache_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    quantization: Quantization = "none",
) -> Settings:
    """On a CPU torch computes, whose ops are the plain references."""
    replace, plain = msgspec.structs.replace, Settings()
    kernels = "torch" if device == "cpu" else "auto"
    return replace(
        plain,
        max_model_len=max_model_len,
        quantization=quantization,
        execute=replace(plain.execute, device=device, dtype=dtype, kernels=kernels, kv_cache_bytes=kv_cache_bytes),
        schedule=replace(plain.schedule, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
    )


def make_runner(settings: Settings, folder: Path, weights: Weights | None = None) -> Any:
    """The executor's runner of `settings.execute.device` for a prepared folder; with `weights` in place of those that
    the folder names."""
    if settings.execute.device == "cpu":
        from pipeline.stages.execute.runner import Runner

        return Runner(settings, folder)
    import importlib

    module: Any = importlib.import_module(CUDA_RUNNER)
    if weights is None:
        return module.CudaRunner(settings, folder)
    with mock.patch.object(module, "Weights", lambda *_: weights):
        return module.CudaRunner(settings, folder)


def close(runner: Any) -> None:
    """Give back what it holds, on the GPU too once nobody names it."""
    runner.close()
