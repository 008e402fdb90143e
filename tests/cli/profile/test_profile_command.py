"""`pipeline profile`: what it prints, where, and with which exit code."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.cli.profile.report import LEAST_WIDTH
from pipeline.cli.profile.results import Case, Floor, MachineRates, OpTime, Profile, ProfilePlan, StepTime
from pipeline.config.settings import Settings
from pipeline.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent.parent

Requested = list[tuple[Settings, ProfilePlan]]


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Restore the process's log, which the command opens."""
    log = logging.getLogger("pipeline")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error."""
    try:
        code = main(["profile", *argv])
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err


def measured(settings: Settings, plan: ProfilePlan) -> Profile:
    """A possible result of the stage."""
    is_native = settings.execute.kernels != "torch"
    rates = MachineRates(20e9, 100e9, 90e9, 300e9) if is_native else None
    qkv = OpTime("qkv", True, 30, 2.5, 1e8, 3e8, 40.0, 120.0, Floor(2.0, 0.8))
    pick = OpTime("sample", False, 1, 0.5, 0.0, 0.0, 0.0, 0.0, None)
    steps = [
        StepTime(
            case=case,
            ms=4.0,
            num_samples=7,
            tokens_per_s=case.num_tokens * 250.0,
            ops=[qkv, pick] if is_native else [],
            in_turn=Floor(3.0, 0.75) if is_native else None,
            overlapped=Floor(1.0, 0.25) if is_native else None,
            against_ms=14.0 if plan.against else None,
            speedup=3.5 if plan.against else None,
        )
        for case in plan.cases()
    ]
    return Profile(
        version="1",
        model="some [model]",
        weight_bytes={"q8_0": 30_000_000, "q4_1": 66_000_000},
        kv_dtype="bfloat16",
        kernels="cpu, avx2" if is_native else "torch, bfloat16",
        cpu="A CPU",
        num_threads=2,
        plan=plan,
        before=rates,
        after=rates,
        steps=steps,
        against="torch, bfloat16" if plan.against else None,
    )


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> Requested:
    """The plans that the stage receives."""
    requested: Requested = []

    def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
        requested.append((settings, plan))
        return measured(settings, plan)

    install(monkeypatch, profile)
    return requested


def install(monkeypatch: pytest.MonkeyPatch, profile: object) -> None:
    module = ModuleType("pipeline.stages.execute.measuring.profile")
    module.profile = profile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.stages.execute.measuring.profile", module)


def test_the_stage_receives_the_steps_and_settings_of_the_options(
    requested: Requested, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(
        *("execute", "--set", "execute.num_threads=1", "--model", "a b.gguf", "--quantization", "q8_0"),
        *("--kernels", "portable", "--batch", "2, 64,2", "--context", "99", "--prefill", "none", "--rounds", "3"),
        *("--against", "torch", "--verify", "7,3"),
        capsys=capsys,
    )
    assert (code, err) == (0, "")
    ((settings, plan),) = requested
    assert (settings.model, settings.quantization) == ("a b.gguf", "q8_0")
    assert (settings.execute.num_threads, settings.execute.kernels) == (1, "portable")
    assert plan == ProfilePlan((2, 64), 99, (), 3, "torch", None, verifies=(7, 3))
    assert plan.cases()[2:4] == [Case("verify", 2, 8, 99), Case("verify", 2, 4, 99)]


def test_by_default_decode_and_prefill_are_measured(requested: Requested, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("execute", "--shape", "qwen2-0.5b", capsys=capsys)[0] == 0
    ((_, plan),) = requested
    assert plan.shape == "qwen2-0.5b"
    assert plan.cases() == [
        Case("decode", 1, 1, 256),
        Case("decode", 8, 1, 256),
        Case("decode", 32, 1, 256),
        Case("prefill", 1, 128, 128),
        Case("prefill", 1, 512, 512),
    ]


def rows(out: str) -> list[list[str]]:
    """The cells of all tables."""
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in out.splitlines() if "│" in line]


def test_the_tables_hold_ops_steps_and_machine(requested: Requested, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("execute", "--against=torch", "--batch=8", "--prefill=512", capsys=capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= LEAST_WIDTH
    assert "some [model]: q4_1 66.0 MB + q8_0 30.0 MB; keys and values bfloat16" in out
    assert "A CPU, 2 threads; kernels: cpu, avx2" in out
    whole = ["whole step", "31", "4.000", "25.0", "75.0", "3.000", "75 %"]
    ops = [["qkv", "30", "2.500", "40.0", "120.0 int8", "2.000", "80 %"], ["sample", "1", "0.500", *"––––"], whole]
    step = ["4.000", "2,000.0", "25.0", "75.0", "3.000", "75 %", "1.000", "25 %", "7", "14.00", "3.50"]
    prefill = ["4.000", "128,000.0", *step[2:]]
    assert [[cell for cell in row if cell] for row in rows(out)] == [
        ["decode 8 at 256"],
        *ops,
        ["prefill 512"],
        *ops,
        ["decode 8 at 256", *step],
        ["prefill 512", *prefill],
    ]
    assert "This machine before: reads 20.0 GB/s; GFLOP/s: 100 float32, 90 bfloat16, 300 int8" in out
    assert "Beside it: torch, bfloat16." in out
    assert "differ" not in out


def test_a_machine_that_drifts_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
        after = MachineRates(18e9, 101e9, 90e9, 200e9)
        return msgspec.structs.replace(measured(settings, plan), after=after)

    install(monkeypatch, profile)
    _, out, _ = run("execute", capsys=capsys)
    assert "The two differ by up to 50 %" in out


def test_kernels_without_times_per_op_are_reported(requested: Requested, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("execute", "--kernels=torch", "--batch=8", "--prefill=none", capsys=capsys)
    assert code == 0
    assert rows(out) == [["decode 8 at 256", "4.000", "2,000.0", *"––––––", "7"]]
    assert "Single ops and floors are available for native kernels only; these are torch, bfloat16." in out


def test_json_is_written_to_a_file_beside_the_tables_or_alone_to_standard_output(
    requested: Requested, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    code, out, _ = run("execute", "--json", str(path), capsys=capsys)
    assert code == 0
    assert "whole step" in out
    written = msgspec.json.decode(path.read_bytes(), type=Profile)
    assert written == measured(*requested[0])
    code, out, _ = run("execute", "--json", "-", capsys=capsys)
    assert (code, msgspec.json.decode(out, type=Profile)) == (0, written)


@pytest.mark.parametrize("name", [".", "no/such/folder.json", "x" * 300, "a\0b"])
def test_an_unwritable_report_is_an_error_before_measuring(
    requested: Requested, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run("execute", "--json", str(tmp_path / name), capsys=capsys)
    assert (code, out, err.count("\n"), requested) == (2, "", 1, [])
    assert err.startswith(f"pipeline: error: --json {tmp_path}")
    assert "can't be written: " in err
    assert list(tmp_path.iterdir()) == []


def test_a_user_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
        raise UserError("this can't be: lower that")

    install(monkeypatch, profile)
    path = tmp_path / "profile.json"
    expected = (1, "", "pipeline profile: error: this can't be: lower that\n")
    assert run("execute", "--json", str(path), capsys=capsys) == expected
    assert not path.exists()


def test_a_missing_model_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def profile(settings: Settings, plan: ProfilePlan, prepare: Callable[[], Path]) -> Profile:
        prepare()
        raise AssertionError("there is no such model")

    install(monkeypatch, profile)
    code, out, err = run("execute", "--model", str(tmp_path / "none.gguf"), capsys=capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("pipeline profile: error: ")
    assert "none.gguf" in err


def test_a_missing_gpu_is_an_error_of_one_line_before_a_model_is_fetched(
    requested: Requested, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("pipeline.supervisor.gpu.DRIVER", "libthere-is-none.so.1")
    code, out, err = run("execute", "--set", "execute.device=cuda", capsys=capsys)
    assert (code, out, err.count("\n"), requested) == (1, "", 1, [])
    assert err.startswith("pipeline profile: error: execute.device is 'cuda', but this machine has no NVIDIA driver")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: STAGE"),
        (["kitchen"], "invalid choice: 'kitchen' (choose from "),
        (["execute", "--batch", "1,x"], "--batch: needs a whole number from 1 to 4096, got 'x'"),
        (["execute", "--batch", "0"], "--batch: needs a whole number from 1 to 4096, got '0'"),
        (["execute", "--batch", "9" * 5000], "--batch: needs a whole number from 1 to 4096"),
        (["execute", "--context", ""], "--context: needs a whole number from 1 to 1048576, got ''"),
        (["execute", "--prefill", "1,"], "--prefill: needs a whole number from 1 to 1048576, got ''"),
        (["execute", "--rounds", "none"], "--rounds: needs a whole number from 1 to 1000, got 'none'"),
        (["execute", "--against", "onnx"], "--against: invalid choice: 'onnx'"),
        (["execute", "--against=torch", "--set", "execute.device=cuda"], "--against torch: it computes on a CPU"),
        (["execute", "--kernels=torch", "--set", "execute.device=cuda"], "execute.kernels: 'torch' computes on a CPU"),
        (["execute", "--shape", "kitchen"], "--shape: invalid choice: 'kitchen' (choose from "),
        (["execute", "--batch=none", "--prefill=none"], "there is nothing to measure"),
        (["execute", "--quantization=q2"], "quantization: needs "),
        (["execute", "--layers=2"], "--layers 2: it needs --shape"),
        (["execute", "--shape=gemma2-2b", "--layers=27"], "--layers 27: gemma2-2b has only 26"),
        (["execute", "--set", "execute.thread=1"], "did you mean execute.num_threads?"),
    ],
)
def test_invalid_options_are_errors_of_one_line(
    argv: list[str], words: str, requested: Requested, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*argv, capsys=capsys)
    assert (code, out, err.count("\n"), requested) == (2, "", 1, [])
    assert err.startswith("pipeline: error: ")
    assert words in err


def test_an_unknown_stage_is_an_error_that_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run("detokenise", capsys=capsys)
    assert "execute" in err and "detokenize" in err


@pytest.mark.parametrize("command", [[], ["execute"], ["gateway"], ["pipeline"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*command, "--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(["usage: pipeline profile", *command]))
    assert (command or ["execute"])[0] in out


def test_a_shape_is_profiled_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    argv = ("execute", "--shape=smollm2-135m", "--quantization=q4_1", "--batch=1", "--context=17", "--prefill=16")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "profile", *argv, "--rounds=1", "--json", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "round 1 of 1" in done.stderr
    assert "smollm2-135m, random weights: q4_1 66.4 MB + q8_0 30.1 MB" in done.stdout
    profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    assert profile.num_threads == len(os.sched_getaffinity(0))
    assert profile.before is not None
    assert profile.before.read_bytes > 0
    assert [step.case.num_tokens for step in profile.steps] == [1, 16]
    for step in profile.steps:
        assert step.overlapped is not None
        assert 0 < step.overlapped.share < 10
        assert {"qkv", "attention", "swiglu", "head"} <= {op.name for op in step.ops}
