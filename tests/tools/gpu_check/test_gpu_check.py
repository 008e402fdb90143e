"""`tools/gpu_check` without a GPU: failing sections, reports, and some of its sections with interpreted kernels."""

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from pipeline.stages.execute.cuda.measuring import launches
from tests.tools import gpu_check_fakes as fakes
from tools.gpu_check import child, gpu, parent, report, runners
from tools.gpu_check.child import Context, Task
from tools.gpu_check.kernels import ends
from tools.gpu_check.kernels.dense import items as dense_items
from tools.gpu_check.machine import rates
from tools.gpu_check.models import WeightsOnDevice, synthetic_tokenizer
from tools.gpu_check.readings import FailedItem, Line, Reading, check, read, write
from tools.gpu_check.servers import ranks, texts
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY, bits_in_groups, step_bytes
from tools.gpu_check.speed import breakdown, steps


@pytest.fixture(autouse=True)
def _fake_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.install()
    monkeypatch.setattr(parent, "command_of", fakes.command_of)


def _run(tmp_path: Path, name: str, *, inline: bool = False, left_s: float = 20.0) -> list[Line]:
    return parent._run_section(Task(section=name, lines=str(tmp_path / "lines"), left_s=left_s), inline)


def _cases(lines: list[Line]) -> list[str]:
    return [line.case for line in lines if isinstance(line, Reading)]


def _failures(lines: list[Line]) -> list[str]:
    return [line.traceback for line in lines if isinstance(line, FailedItem)]


class TestSections:
    def test_a_section_whose_process_dies_keeps_its_results_and_continues_in_another(self, tmp_path: Path) -> None:
        lines = _run(tmp_path, "dies")
        assert _cases(lines) == ["before the kill", "fine"]
        assert _failures(lines) == ["the process ended with signal 9 in 'killed'"]

    def test_an_interpreted_item_waits_for_its_processes_though_the_section_has_no_time_left(self) -> None:
        """It runs without a time limit, and a process may take long to start on a busy machine."""
        assert Context(Task("ranks", "", left_s=-100.0, interpreted=True)).wait_s > ranks.LIMIT_S
        assert Context(Task("ranks", "", left_s=-100.0)).wait_s == child.MIN_WAIT_S
        assert Context(Task("ranks", "", left_s=50.0)).wait_s == pytest.approx(50.0, abs=5)

    def test_a_hanging_item_is_killed(self, tmp_path: Path) -> None:
        lines = _run(tmp_path, "hangs")
        assert _cases(lines) == ["before the hang", "fine"]
        assert _failures(lines) == ["'hangs' was killed: it exceeded its time limit"]
        (left,) = (line.value for line in lines if isinstance(line, Reading) and line.case == "before the hang")
        assert left is not None
        end_s = time.monotonic() + 10
        while psutil.pid_exists(int(left)) and psutil.Process(int(left)).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end_s, "the item's child process still runs"
            time.sleep(0.02)

    def test_a_section_that_overruns_is_cut_and_reported(self, tmp_path: Path) -> None:
        lines = _run(tmp_path, "slow", left_s=2.0)
        # On a busy machine it may not have reached an item.
        assert len(_failures(lines)) == 1 and _failures(lines)[0].endswith(
            "was killed: it exceeded the section's time limit"
        )
        assert [line.case for line in lines if isinstance(line, Reading) and line.result == "cut"] == ["the rest"]

    def test_stopping_the_program_keeps_its_results(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stopped = threading.Event()
        monkeypatch.setattr(parent, "STOPPED", stopped)

        def stop() -> None:
            end_s = time.monotonic() + 20
            while not _cases(read(tmp_path / "lines")) and time.monotonic() < end_s:
                time.sleep(0.02)
            stopped.set()

        thread = threading.Thread(target=stop)
        thread.start()
        lines = _run(tmp_path, "slow", left_s=60.0)
        thread.join()
        assert _cases(lines) == ["before the hang", "the rest"]
        assert _failures(lines) == ["'hangs' was killed because gpu_check was stopped"]

    def test_an_error_is_reported_and_the_next_item_runs(self, tmp_path: Path) -> None:
        lines = _run(tmp_path, "raises", inline=True)
        assert _cases(lines) == ["before the error", "fine"]
        assert len(_failures(lines)) == 1 and "ValueError: so it is" in _failures(lines)[0]

    def test_an_asynchronous_error_belongs_to_its_item(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        errors = iter([RuntimeError("an illegal memory access was encountered")])

        def synchronize() -> None:
            for error in errors:
                raise error

        monkeypatch.setattr(gpu, "synchronize", synchronize)
        lines = _run(tmp_path, "late", inline=True)
        assert _cases(lines) == ["never", "fine"]
        assert len(_failures(lines)) == 1 and "illegal memory access" in _failures(lines)[0]

    def test_a_process_that_does_not_die_delays_no_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kill = parent._kill_session
        monkeypatch.setattr(parent, "_kill_session", lambda leader: None)
        monkeypatch.setattr(parent, "KILL_TIMEOUT_S", 0.1)
        monkeypatch.setattr(parent, "UNREAPED", left := [])
        try:
            lines = _run(tmp_path, "hangs")
        finally:
            for process in left:
                kill(process.pid)
                process.wait(10)
        assert _cases(lines) == ["before the hang", "fine"] and len(left) == 1

    def test_an_item_without_enough_time_is_skipped(self, tmp_path: Path) -> None:
        lines = _run(tmp_path, "late", inline=True)
        assert _cases(lines) == ["never", "fine"]
        (cut, _) = (line for line in lines if isinstance(line, Reading))
        assert cut.result == "cut" and "needs about" in cut.note

    def test_a_partial_line_of_a_killed_process_hides_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        write(path, Reading("one"))
        with path.open("a") as file:
            file.write('\n{"kind": "Reading", "case": "tw')
        write(path, Reading("three"))
        assert _cases(read(path)) == ["one", "three"]


def test_without_a_gpu_it_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.fail("to be run where there is no GPU")
    assert parent.main([]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "no NVIDIA GPU" in output.err


def test_the_machine_section_measures_and_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert parent.main(["--interpret", "--inline", "--only", "machine", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    cases = {reading["case"]: reading for reading in found["readings"]}
    assert found["interpreted"] and not found["failed"]
    assert cases["copy, read + written"]["value"] > 0 and cases["read only"]["unit"] == "GB/s"
    assert sum(case.startswith("result ") for case in cases) == 4
    text = (tmp_path / "found.md").read_text()
    assert report.MEANINGLESS in text and "| copy, read + written |" in text


class TestReadings:
    def test_targets_are_upper_or_lower_bounds(self) -> None:
        assert Reading("a", 100, must=90, goal=110).verdict == "must"
        assert Reading("a", 120, must=90, goal=110).verdict == "goal"
        assert Reading("a", 80, must=90, goal=110).verdict == "missed"
        assert Reading("a", 6.0, must=6.3, goal=5.7, less_is_better=True).verdict == "must"
        assert Reading("a", 6.4, must=6.3, goal=5.7, less_is_better=True).verdict == "missed"

    def test_nan_fails_an_error_bound(self) -> None:
        assert check("a", float("nan"), 1.0).result == "FAIL"
        assert gpu.relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")

    def test_a_missed_target_is_not_a_failure_and_a_failed_check_is(self) -> None:
        missed = Reading("a", 80, "tok/s", 160, must=90)
        assert not report.Results([missed], [], False).is_wrong
        assert report.Results([missed, check("b", 2.0, 1.0)], [], False).is_wrong
        assert report.Results([missed], [FailedItem("c", "Traceback\nValueError: so it is\n")], False).is_wrong
        assert "50%" in report.as_text(report.Results([missed], [], False))
        assert "FAILED c: ValueError: so it is" in report.as_text(
            report.Results([], [FailedItem("c", "x\nValueError: so it is")], False)
        )

    def test_json_has_no_nan_or_infinity(self) -> None:
        text = report.as_json(report.Results([check("a", float("inf"), 1.0), check("b", float("nan"), 1.0)], [], False))
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_bytes_of_a_step() -> None:
    """Compared with the sums in published tables."""
    assert step_bytes(LLAMA_8B, 1, 1000).kv == 131072 * 1000
    assert step_bytes(LLAMA_8B, 0, 0).weights / 1e9 == pytest.approx(15.01, abs=0.01)
    assert step_bytes(LLAMA_1B, 0, 0).weights / 1e9 == pytest.approx(2.472, abs=0.001)
    assert step_bytes(SMOLLM2_135M, 2, 1).weights / 1e9 == pytest.approx(0.269, abs=0.001)
    assert step_bytes(LLAMA_8B, 0, 0, bits_in_groups(4, 128)).weights / 1e9 == pytest.approx(4.76, abs=0.01)


def test_every_token_of_the_synthetic_tokenizer_is_text() -> None:
    tokenizer = synthetic_tokenizer(2000)
    assert tokenizer.get_vocab_size() == 2000
    assert tokenizer.decode([1999]) and len(tokenizer.encode("abcd efgh").ids) < 9


def _context(tmp_path: Path) -> Context:
    return Context(
        Task(
            "any",
            str(tmp_path / "lines"),
            60.0,
            interpreted=True,
            rates={"copy, read + written": 3000.0, "read only": 3100.0},
        )
    )


def test_equal_executors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "make_runner", fakes.make_runner)
    item, *_ = texts.items(_context(tmp_path))
    readings = list(item.run(_context(tmp_path)))
    assert [reading.result for reading in readings] == ["pass"] * 6
    assert all(reading.value == 0 for reading in readings[:5])


def test_an_executor_that_samples_other_ids_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object) -> fakes.Steps:
        runner = fakes.make_runner(*args)  # type: ignore[arg-type]
        runner.changes_ids = True
        return runner

    monkeypatch.setattr(texts, "make_runner", wrong)
    item, *_ = texts.items(_context(tmp_path))
    results = [reading.result for reading in item.run(_context(tmp_path))]
    assert results[:5] == ["FAIL"] * 5


def test_step_benchmarks_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "make_runner", fakes.make_runner)
    monkeypatch.setattr(steps, "WARM_STEPS", 1)
    monkeypatch.setattr(steps, "BATCH_TOKENS", 16)
    readings = {reading.case: reading for reading in steps.measure(_context(tmp_path), steps.MODELS[0])}
    assert readings["135M, batch 1: GPU busy"].value == pytest.approx(100 / 1.01, abs=0.5)
    assert readings["135M, batch 2"].value and readings["135M, batch 2"].bound
    assert readings["135M, batch 1: Python of a step"].must == 60
    assert {"135M: first graphs", "135M: prompts"} <= readings.keys()


def test_the_time_of_a_step_is_attributed_to_kernels_and_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def event(name: str, grid: int, us: float, kind: str = "kernel") -> dict[str, object]:
        return {"cat": kind, "name": name, "dur": us, "args": {"grid": [grid, 1, 1]}}

    events = [event("mul", 8, 3.0), event("mul", 8, 5.0), event("mul", 2, 1.0), event("op", 1, 99.0, "cpu_op")]
    found = launches.launches_of([*events, {"ph": "M"}], num_steps=2)
    assert found == [launches.Launches("mul", (8, 1, 1), 1.0, 4.0), launches.Launches("mul", (2, 1, 1), 0.5, 0.5)]
    monkeypatch.setattr(steps, "make_runner", fakes.make_runner)
    # torch's profiler takes seconds to start.
    monkeypatch.setattr(breakdown, "_profile", lambda rows: (rows.decode(2, 2), found)[1])
    readings = list(breakdown.items(_context(tmp_path))[0].run(_context(tmp_path)))
    assert [reading.value for reading in readings] == [4.5, 4.5]
    assert "1.5 launches; mul[8, 1, 1] 1 × 4.0 (89%)" in readings[0].note


@pytest.mark.parametrize("name", ["ends of a step", "copies of blocks", "swiglu"])
def test_some_kernels_pass(tmp_path: Path, name: str) -> None:
    context = _context(tmp_path)
    (item,) = [item for item in (*ends.items(context), *dense_items(context)) if item.name == name]
    assert {reading.result for reading in item.run(context)} == {"pass"}


def test_a_kernel_that_skips_an_element_fails() -> None:
    from tools.gpu_check.kernels.checking import check_output

    out, right = torch.empty(4), torch.arange(4.0)
    assert check_output("all", lambda: out.copy_(right), out, right, 1e-6).result == "pass"
    assert check_output("three", lambda: out[:3].copy_(right[:3]), out, right, 1e-6).result == "FAIL"
    turns = iter((right, right + 1e-7, right))
    reading = check_output("never the same", lambda: out.copy_(next(turns)), out, right, 1e-3)
    assert reading.result == "FAIL" and "race" in reading.note


def test_a_runner_uses_the_given_weights(tmp_path: Path) -> None:
    TINY.save(tmp_path)
    settings = runners.settings_for(
        "cuda", max_model_len=64, kv_cache_bytes=1 << 20, max_num_seqs=2, max_num_batched_tokens=32
    )
    weights = WeightsOnDevice(TINY, torch.bfloat16)
    runner = runners.make_runner(settings, tmp_path, weights)
    try:
        assert runner.weight_formats == "bf16" and weights.taken
    finally:
        runners.close(runner)


def test_a_copy_bounds_the_time_of_a_step_without_other_measurements(tmp_path: Path) -> None:
    measured = {"copy, read + written": 3000.0}
    assert rates.bandwidth(Context(Task("any", str(tmp_path / "lines"), 60.0, rates=measured))) == 3e12


def test_interpreted_kernels_run_on_the_cpu_instead_of_the_gpu() -> None:
    settings = runners.settings_for(
        "cuda", max_model_len=64, kv_cache_bytes=1 << 20, max_num_seqs=2, max_num_batched_tokens=32
    )
    assert settings.execute.device == "cpu" and settings.execute.kv_cache_bytes == 1 << 20
    assert child.number(0.00012) == "1.2e-04" and child.number(12345.6) == "12,346" and TINY.num_layers == 1


def test_ranks_are_only_checked_with_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(Task(section="ranks", lines=str(tmp_path / "lines"), left_s=20.0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (item,) = ranks.items(context)
    (reading,) = item.run(context)
    assert reading.result == "cut" and reading.note == "not checked: it needs 2 GPUs, and 1 is here"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert len(ranks.items(context)) == 6
