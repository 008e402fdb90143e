"""Fixtures for tests of commands."""

import os
from collections.abc import Iterator

import pytest

from pipeline.cli.check import command


@pytest.fixture
def check_model_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the process's state, which `pipeline check-model` changes."""
    import torch

    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, os.environ.get(name, "2"))
    monkeypatch.setattr(command, "open_log", lambda stage, level: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
