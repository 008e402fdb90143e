"""A model so small that Triton's interpreter computes a step of it in less than a second."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from tests.kernels.triton import interpreter as interpreter  # faster
from tests.stages.execute import checkpoints


@pytest.fixture(scope="session")
def slight_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a random Llama of two layers; its head is its embedding."""
    folder = tmp_path_factory.mktemp("slight")
    changes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "max_position": 96}
    checkpoints.write(folder, checkpoints.config_of(**changes, tie_embeddings=True))
    return folder


def on_device(
    *, dtype: Any = "float32", max_num_seqs: int = 4, tokens: int = 16, swap_bytes: int = 0, kv_bytes: int = 1024**2
) -> Settings:
    """Settings for a GPU, small because kernels are interpreted."""
    return Settings(
        execute=ExecuteSettings(
            device="cuda", dtype=dtype, kv_cache_bytes=kv_bytes, num_threads=1, swap_bytes=swap_bytes
        ),
        schedule=ScheduleSettings(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens),
    )


def on_cpu(like: Settings) -> Settings:
    """The same on the CPU with torch, as the reference for the GPU."""
    execute = ExecuteSettings(
        dtype=like.execute.dtype,
        kernels="torch",
        kv_cache_bytes=like.execute.kv_cache_bytes,
        num_threads=1,
        swap_bytes=like.execute.swap_bytes,
    )
    return Settings(execute=execute, schedule=like.schedule)
