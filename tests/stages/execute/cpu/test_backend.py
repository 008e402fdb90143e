"""The back end is selected once and reported, and the CPU library frees its resources."""

import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from pipeline.config.sections.stages import ScheduleSettings
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu import build, compiler, native_library
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu import backend
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.rig import PATIENCE_S
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import settings
from tests.stages.execute.native_driver import ISAS, Native, random_ids, write


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


# --- choice of a back end


def test_a_shape_without_kernels_falls_back_to_torch_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, checkpoints.config_of(**checkpoints.VARIANTS["one kv head"]))
    runner = CpuRunner(settings(dtype="bfloat16"), tmp_path)
    assert isinstance(runner.program, TorchProgram)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "torch" in warning.getMessage() and "head_dim is 8, not a multiple of 16" in warning.getMessage()
    with pytest.raises(UserError, match=r"execute\.kernels is 'portable', but head_dim is 8"):
        CpuRunner(settings(dtype="bfloat16", kernels="portable"), tmp_path)


def test_an_instruction_set_that_this_cpu_lacks_is_rejected(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available", lambda: ["portable"])
    for isa in ("avx512", "avx2", "neon"):
        with pytest.raises(UserError, match=f"kernels is '{isa}', but this CPU supports portable and torch"):
            CpuRunner(settings(dtype="bfloat16", kernels=isa), tiny)


def test_without_a_compiler_torch_is_used_with_one_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    runner = CpuRunner(settings(dtype="bfloat16"), tiny)
    assert isinstance(runner.program, TorchProgram)
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no C++ compiler found" in warning.getMessage() and "apt install" in warning.getMessage()
    with pytest.raises(UserError, match="no C\\+\\+ compiler found"):
        CpuRunner(settings(dtype="bfloat16", kernels="portable"), tiny)


def test_float32_uses_torch_without_a_warning(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(CpuRunner(settings(dtype="float32"), tiny).program, TorchProgram)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_explicitly_selected_kernels_reject_float32(tiny: Path) -> None:
    with pytest.raises(UserError, match="float32"):
        CpuRunner(settings(dtype="float32", kernels="portable"), tiny)


def test_the_best_instruction_set_is_selected_and_reported(tiny: Path) -> None:
    runner = CpuRunner(settings(dtype="bfloat16"), tiny)
    assert runner.program.name == f"cpu, {available()[0]}"
    runner.close()


@pytest.mark.parametrize(
    "error",
    [
        compiler.CompileError("unknown option"),
        native_library.IsaUnavailableError("no tile registers"),
        OSError("amx.so was replaced after it was built"),
    ],
)
def test_the_second_best_instruction_set_replaces_one_that_can_not_be_used(
    error: Exception, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = build.build

    def fail_for_amx(isa: Isa, *args: Any, **options: Any) -> Path:
        if isa == "amx":
            raise error
        return real(isa, *args, **options)

    monkeypatch.setattr(backend, "available", lambda: ["amx", "portable"])
    monkeypatch.setattr(build, "build", fail_for_amx)
    runner = CpuRunner(settings(dtype="bfloat16"), tiny)
    assert runner.program.name == "cpu, portable"
    runner.close()
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.getMessage() == f"instruction set amx is not available: {error}"
    with pytest.raises(UserError, match=rf"execute\.kernels is 'amx', but {error}"):
        CpuRunner(settings(dtype="bfloat16", kernels="amx"), tiny)


def test_torch_is_used_after_two_failures(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def fail(isa: Isa, *_: Any, **__: Any) -> Path:
        tried.append(isa)
        raise compiler.CompileError(f"no {isa}")

    monkeypatch.setattr(backend, "available", lambda: ["amx", "avx2", "portable"])
    monkeypatch.setattr(build, "build", fail)
    assert isinstance(CpuRunner(settings(dtype="bfloat16"), tiny).program, TorchProgram)
    assert tried == ["amx", "avx2"]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == [
        "instruction set amx is not available: no amx",
        "computing with torch, which is several times slower: no avx2",
    ]


# --- resources of a program


@pytest.mark.parametrize(
    ("isa", "are_quantized", "set_to", "expected"),
    [
        ("amx", False, 0, backend.AMX_PREFILL_TOKENS),
        ("amx", False, 120, 120),
        ("amx", False, 8, 48),
        ("amx", True, 0, 48),
        ("amx", True, 500, 500),
        ("avx512_bf16", False, 0, 48),
        ("avx2", False, 96, 96),
        (None, False, 0, 48),
    ],
)
def test_steps_of_prompts_alone_are_longer_with_float_weights_on_amx(
    tiny: Path, isa: Isa | None, are_quantized: bool, set_to: int, expected: int
) -> None:
    chosen = Settings(schedule=ScheduleSettings(max_num_batched_tokens=48, max_num_prefill_tokens=set_to))
    library = backend.Library(isa, ctypes.CDLL(None), "") if isa else None
    config = ModelConfig.load(tiny)
    assert backend.max_num_prefill_tokens(chosen, config, library, are_quantized) == expected


@pytest.mark.parametrize(
    ("max_position", "max_model_len", "set_to", "expected"),
    [(300, 0, 0, 512), (8192, 0, 0, 8192), (8192, 4096, 0, 4096), (512, 0, 5000, 5000)],
)
def test_a_step_of_an_encoder_has_room_for_its_longest_text(
    tiny: Path, max_position: int, max_model_len: int, set_to: int, expected: int
) -> None:
    chosen = Settings(max_model_len=max_model_len, schedule=ScheduleSettings(max_num_prefill_tokens=set_to))
    config = msgspec.structs.replace(ModelConfig.load(tiny), causal=False, max_position=max_position)
    assert backend.max_num_prefill_tokens(chosen, config, None, False) == expected


def test_the_runner_reports_how_many_tokens_its_arrays_hold(tiny: Path) -> None:
    runner = CpuRunner(settings(dtype="bfloat16"), tiny)
    assert runner.facts.max_num_prefill_tokens == len(runner.inputs.ids) >= 64
    runner.close()


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def until_threads(num: int) -> None:
    """Wait until there are so many. The kernel lists one that has been joined for another moment."""
    end_s = time.monotonic() + PATIENCE_S
    while (found := num_threads()) != num:
        assert time.monotonic() < end_s, f"{found} threads instead of {num}"


def wait_for_pages() -> None:
    """Wait for the threads that touch KV memory, once for each program."""
    for thread in threading.enumerate():
        if thread.name == "kv pages":
            thread.join(60)


def test_threads_end_with_the_program_and_closing_twice_is_harmless(tiny: Path) -> None:
    wait_for_pages()  # of earlier programs
    before = min(num_threads() for _ in range(200))
    driver = Native(tiny, ISAS[0], threads=4)
    wait_for_pages()
    until_threads(before + 3)
    driver.generate([random_ids(10, 0)], 3)
    driver.runner.close()
    until_threads(before)
    driver.runner.close()
    until_threads(before)


def test_a_closed_program_frees_its_memory(tiny: Path) -> None:
    def open_and_close() -> None:
        driver = Native(tiny, ISAS[0], threads=3, kv_mib=4)
        driver.generate([random_ids(40, 0)], 3)
        driver.runner.close()

    for _ in range(5):
        open_and_close()
    process, threads = psutil.Process(), num_threads()
    before = process.memory_info().rss
    for _ in range(50):
        open_and_close()
    assert num_threads() == threads
    # One leaked KV memory would be 4 MiB, all of them 200 MiB.
    assert process.memory_info().rss - before < 20 * 1024**2
