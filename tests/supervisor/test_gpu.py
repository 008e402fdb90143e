"""A missing GPU is an error at startup, before a model is fetched."""

import logging
import os
import socket

import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.supervisor import gpu
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.supervisor import Supervisor

CUDA = Settings(execute=ExecuteSettings(device="cuda"))


def missing(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_machine_without_a_driver_gets_a_clear_error() -> None:
    problem = gpu.why_none(CUDA, missing, {})
    assert problem is not None and "\n" not in problem
    assert problem.startswith("execute.device is 'cuda', but this machine has no NVIDIA driver (libcuda.so.1 is not ")
    assert "set execute.device to 'cpu'" in problem


def test_an_available_or_unneeded_driver_is_no_error() -> None:
    libraries: list[str] = []
    assert gpu.why_none(CUDA, libraries.append, {}) is None
    assert libraries == ["libcuda.so.1"]
    assert gpu.why_none(Settings(), missing, {}) is None
    assert gpu.why_none(CUDA, missing, {"TRITON_INTERPRET": "1"}) is None, "the interpreter runs the kernels"
    assert gpu.why_none(CUDA, missing, {"TRITON_INTERPRET": "0"}) is not None


@pytest.mark.parametrize("instant", [False, True])
def test_the_server_ends_before_anything_is_reserved_or_prepared(
    instant: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Except if no model runs."""
    monkeypatch.setattr(gpu, "why_none", lambda settings: "no GPU")
    prepared: list[bool] = []

    def prepare(self: Supervisor, begun: float) -> None:
        prepared.append(True)
        raise MemoryError("far enough")

    monkeypatch.setattr(Supervisor, "_start_all", prepare)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(CUDA, [listener], logging.getLogger("test"), RunMode(instant=instant))
        assert supervisor.run(0.0) == 1
        supervisor.close()
    assert prepared == ([True] if instant else [])
    assert ("no GPU" in caplog.text) is not instant


def test_triton_interpret_is_parsed_as_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    for value in ("1", "0", "true", "off", "YES", "on", "n", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert gpu.is_interpreted(os.environ) == knobs.runtime.interpret
