"""Every test runs in `tools/check` exactly once: in parallel, or alone."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pipeline.kernels.cpu.isa import MAX_ISA, NEEDED
from tests.conftest import ALONE, LONGEST, SERVERS
from tests.long_tests import FEW, LONG, ONE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def check() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("check", str(ROOT / "tools" / "check"))
    spec = importlib.util.spec_from_loader("check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)  # it would be written beside the script
        loader.exec_module(module)
    return module


@pytest.mark.parametrize("beginning", [*ALONE, *SERVERS, *LONGEST, *LONG, *FEW, *ONE])
def test_every_listed_test_exists(beginning: str) -> None:
    """A renamed test would run beside others, and be flaky, or be run although it is long."""
    path, *names = beginning.partition("[")[0].split("::")
    assert (ROOT / path).exists()
    text = (ROOT / path).read_text() if names else ""
    for name in names:
        assert re.search(rf"^ *(async def|def|class) {name}", text, re.MULTILINE), name


def test_the_parts_together_are_all_tests(check: ModuleType) -> None:
    """Each test has one of the two marks or none: the second is set only without the first."""
    shared, servers, alone = (" ".join(check.STEPS[step]) for step in ("shared", "servers", "alone"))
    assert "pytest -m not alone and not servers -p" in shared
    assert "pytest -m servers -p" in servers
    assert alone.endswith("pytest -m alone")


def test_shared_leaves_out_only_what_is_for_the_other_groups(check: ModuleType) -> None:
    index, ignored = check.TEST_PATHS["shared"]
    assert index == "tests" and f"{ignored.removeprefix('--ignore=')}/" in SERVERS


@pytest.mark.parametrize(("step", "beginnings"), [("servers", SERVERS), ("alone", ALONE)])
def test_each_part_collects_the_files_of_its_tests(check: ModuleType, step: str, beginnings: tuple[str, ...]) -> None:
    indices = [Path(index) for index in check.TEST_PATHS[step]]
    for beginning in beginnings:
        path = Path(beginning.partition("::")[0])
        assert any(path.is_relative_to(index) for index in indices), beginning


class Run:
    """`tools/check` with the given arguments, and the given exit codes of its commands."""

    def __init__(self, check: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str, **codes: int) -> None:
        self.commands: list[str] = []
        self.isas: list[str | None] = []
        self.beside: list[tuple[str, list[str]]] = []
        """Each step, and those that collect their tests meanwhile."""
        self.num_compiling = 0
        self.awaited_after: list[str] | None = None
        """The commands before the wait for the library that servers use."""
        self.ended_after: dict[str, list[str]] = {}
        """Of each step that runs beside others, the commands before its end."""
        monkeypatch.delenv(MAX_ISA, raising=False)

        def run(command: list[str], env: dict[str, str], **_: object) -> SimpleNamespace:
            self.isas.append(env.get(MAX_ISA))
            step = next(name for name, own in check.STEPS.items() if command[1 : 1 + len(own)] == own)
            more = command[1 + len(check.STEPS[step]) :]
            self.commands.append(" ".join([step, *(more if more != check.TEST_PATHS.get(step) else [])]))
            return SimpleNamespace(returncode=codes.get(step, 0))

        def start_compiling() -> SimpleNamespace:
            assert self.commands == []
            self.num_compiling += 1
            return SimpleNamespace(send_signal=lambda number: None, wait=lambda: 0)

        def await_first_library() -> None:
            assert self.awaited_after is None
            self.awaited_after = list(self.commands)

        def start_beside(step: str) -> str:
            assert not {"servers", "shared", "alone"} & set(self.commands)
            return step

        def finish(step: str) -> tuple[str, str, str, float]:
            assert step not in self.ended_after
            self.ended_after[step] = list(self.commands)
            return step, "", "FAILED" if codes.get(step) else "ok", 1.0

        def start_waiting(command: list[str]) -> list[str]:
            return command

        def run_step(command: list[str], environ: dict[str, str], waiting: dict[str, list[str]], tell: bool) -> int:
            code: int = run([sys.executable, *command], environ).returncode
            step = self.commands[-1].split()[0]
            assert tell == (step == "servers" and "shared" in waiting)
            self.beside.append((step, [*waiting]))
            return code

        def run_waiting(command: list[str], others: dict[str, list[str]]) -> int:
            return run_step(command, dict(os.environ), others, False)

        monkeypatch.setattr(sys, "argv", ["tools/check", *words])
        monkeypatch.setattr(check, "start_waiting", start_waiting)
        monkeypatch.setattr(check, "run_waiting", run_waiting)
        monkeypatch.setattr(check, "run_step", run_step)
        monkeypatch.setattr(check, "start_beside", start_beside)
        monkeypatch.setattr(check, "finish", finish)
        monkeypatch.setattr(check, "start_compiling", start_compiling)
        monkeypatch.setattr(check, "await_first_library", await_first_library)
        monkeypatch.setattr(subprocess, "run", run)
        self.code = check.main()


def test_all_steps_run_in_order(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(check, monkeypatch, "--fail-fast")
    assert (run.code, run.commands) == (
        0,
        ["format", "lint", "imports", "words", "sizes", "types", "servers", "shared", "alone"],
    )


def test_each_group_of_tests_is_collected_beside_the_one_before_it(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [("format", []), ("lint", [])]
    run = Run(check, monkeypatch)
    assert run.beside == [*before, ("servers", ["shared"]), ("shared", ["alone"]), ("alone", [])]
    run = Run(check, monkeypatch, "shared", "alone", servers=1)
    assert run.beside == [("shared", ["alone"]), ("alone", [])]
    for words in (["--fail-fast", "tests"], ["--isa", "avx2", "tests"]):
        run = Run(check, monkeypatch, *words)
        assert run.beside == [("servers", []), ("shared", []), ("alone", [])]


def test_a_group_that_waits_runs_when_it_may_and_its_output_and_its_exit_code_are_reported(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """In its turn, or when the step before it notifies it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for is_notified in (False, True):
        (tmp_path / "test_it.py").write_text(f"""
from pathlib import Path
Path({str(tmp_path / "collected")!r}).touch()

def test_it():
    Path({str(tmp_path / "run")!r}).touch()
    raise AssertionError("it ran")
""")
        command = [
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ]
        one = check.start_waiting(command)
        wait_for(lambda: (tmp_path / "collected").exists(), one.process)
        assert not (tmp_path / "run").exists()
        if is_notified:
            tell = "import os, sys; os.write(int(sys.argv[sys.argv.index('--tell-fd') + 1]), b'.')"
            assert check.run_step(["-c", tell], dict(os.environ), {"it": one}, tell=True) == 0
            wait_for(lambda: (tmp_path / "run").exists(), one.process)
        assert check.run_waiting(one, {}) == 1
        assert b"AssertionError: it ran" in capfdbinary.readouterr().out
        for name in ("collected", "run"):
            (tmp_path / name).unlink()


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None and time.monotonic() < end_s
        time.sleep(0.01)


def test_some_steps_run_beside_the_tests_and_are_reported_before_tests_that_measure(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ["format", "lint", "servers", "shared"]
    ended_after = dict.fromkeys(("imports", "words", "sizes", "types"), before)
    run = Run(check, monkeypatch)
    assert (run.code, run.ended_after, run.commands) == (0, ended_after, [*before, "alone"])
    for failed in ended_after:
        run = Run(check, monkeypatch, **{failed: 1})
        assert (run.code, run.ended_after, run.commands) == (1, ended_after, [*before, "alone"])
    run = Run(check, monkeypatch, "types", "servers")
    assert (run.code, run.ended_after) == (0, {"types": ["servers"]})
    for words in (["types"], ["types", "shared", "alone"], ["--fail-fast", "types", "servers"]):
        run = Run(check, monkeypatch, *words)
        assert run.ended_after == {} and run.commands[0] == "types"


@pytest.mark.parametrize("name", ["imports", "words", "types"])
def test_the_output_and_the_exit_code_of_a_step_beside_others_are_reported(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], name: str
) -> None:
    code = "import os; print('found', os.nice(0)); raise SystemExit(3)"
    monkeypatch.setitem(check.STEPS, name, ["-c", code])
    step, isa, result, took_s = check.finish(check.start_beside(name))
    assert (step, isa, result) == (name, "", "FAILED") and took_s > 0
    lowest = min(19, os.nice(0) + 19)
    assert capfdbinary.readouterr().out.endswith(b"\nfound %d\n" % lowest)


def test_libraries_are_compiled_beside_the_steps_before_the_tests(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINE_ALL_CASES", raising=False)
    run = Run(check, monkeypatch)
    assert run.num_compiling == 1 and run.awaited_after == run.commands[: run.commands.index("servers")]
    assert Run(check, monkeypatch, "servers").awaited_after == []
    for words in (["shared"], ["format", "lint", "types"], ["--isa", "avx2"]):
        assert Run(check, monkeypatch, *words).num_compiling == 0
    monkeypatch.setenv("PIPELINE_ALL_CASES", "1")
    assert Run(check, monkeypatch, "tests").num_compiling == 1, "the nightly needs optimized ones"
    assert (ROOT / check.COMPILE[1].replace(".", "/")).with_suffix(".py").exists()


def test_it_continues_after_a_failure_or_stops_with_fail_fast(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(check, monkeypatch, "lint", "tests", shared=1)
    assert (run.code, run.commands) == (1, ["lint", "servers", "shared", "alone"])
    run = Run(check, monkeypatch, "--fail-fast", "lint", "tests", servers=1)
    assert (run.code, run.commands) == (1, ["lint", "servers"])


def test_tests_run_once_for_each_instruction_set(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(check, monkeypatch, "--isa", "avx2", "lint", "servers")
    assert run.commands == ["lint", "servers"]
    assert run.isas == [None, "avx2"]
    monkeypatch.setattr(check, "isas_here", lambda: ["avx512", "avx2", "portable"])
    run = Run(check, monkeypatch, "--isa", "all", "lint", "servers", "alone")
    assert run.commands == ["lint", *["servers", "alone"] * 3]
    assert run.isas == [None, "avx512", "avx512", "avx2", "avx2", "portable", "portable"]


def test_every_instruction_set_is_an_option(check: ModuleType) -> None:
    assert list(check.ISA_ENVIRON) == list(NEEDED)
    assert set(check.isas_here()) <= set(NEEDED)


def test_arguments_for_pytest_go_to_all_parts(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(check, monkeypatch, "tests", "alone", "--", "-k", "prefix")
    assert (run.code, run.commands) == (
        0,
        [f"{part} -k prefix" for part in ("servers", "shared", "alone")],
    )


@pytest.mark.parametrize(
    ("shared", "servers", "alone", "code"),
    [(5, 5, 0, 0), (0, 5, 5, 0), (5, 0, 5, 0), (5, 5, 5, 1), (5, 0, 1, 1), (5, 1, 0, 1), (2, 5, 5, 1)],
)
def test_a_part_without_selected_tests_is_not_a_failure(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, shared: int, servers: int, alone: int, code: int
) -> None:
    codes = {"shared": shared, "servers": servers, "alone": alone}
    for steps in (["tests"], []):
        assert Run(check, monkeypatch, *steps, "--", "tests/shm", **codes).code == code


def test_a_part_without_any_tests_is_a_failure(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a selection, a list that matches nothing would hide every test."""
    for part in check.TESTS:
        assert Run(check, monkeypatch, "tests", **{part: 5}).code == 1


def test_an_unknown_step_is_an_error_that_names_it(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Run(check, monkeypatch, "test")
    assert "no such step: test; there are format, lint" in capsys.readouterr().err
