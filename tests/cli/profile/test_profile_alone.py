"""`pipeline profile STAGE`: the stage's output is complete, counted and reported."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.cli.profile.alone.clock import ProcessTimes
from pipeline.cli.profile.alone.harness import Harness
from pipeline.cli.profile.alone.loads import AHEAD
from pipeline.cli.profile.alone.measure import measure
from pipeline.cli.profile.alone.result import StageProfile, limit_of
from pipeline.cli.profile.flame_graph import write
from pipeline.config.settings import ScheduleSettings, Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.process.stack_sampler import Stacks, StackSampler
from pipeline.runtime.topology import SUPERVISOR

STREAMS = 8


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    log = logging.getLogger("pipeline")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


def profile(stage: str, folder: Path, settings: Settings | None = None, **looks: Path) -> StageProfile:
    seen: list[str] = []
    result = measure(
        stage,
        settings or Settings(log_level="warning"),
        folder,
        num_streams=STREAMS,
        seconds=0.4,
        warmup_s=0.1,
        progress=lambda what, share: seen.append(what),
        **looks,
    )
    assert seen[0] == "starting" and seen[-1] == "measuring"
    assert result.seconds >= 0.4
    assert 0 < result.main_cpu_s <= result.cpu_s < 4 * result.seconds
    assert result.latency is not None
    latency = result.latency
    assert 0 < latency.p50_us <= latency.p90_us <= latency.p99_us <= latency.max_us
    assert 10 * 2**20 < result.rss_bytes <= result.peak_rss_bytes
    assert msgspec.json.decode(msgspec.json.encode(result), type=StageProfile) == result
    return result


def test_ingest_answers_every_submit_to_both_neighbours(smollm2_dir: Path) -> None:
    result = profile("ingest", smollm2_dir)
    submits = result.messages_in["Submit"]
    assert submits > 5
    assert abs(result.messages_out["Accepted"] - submits) <= STREAMS
    assert abs(result.messages_out["Admit"] - submits) <= STREAMS
    assert 100 < result.num_tokens / result.messages_out["Admit"] < 250


@pytest.mark.parametrize("depth", [1, 2])
def test_schedule_plans_a_step_for_every_result(smollm2_dir: Path, depth: Any) -> None:
    sets = Settings(log_level="warning", schedule=ScheduleSettings(max_steps_in_flight=depth))
    result = profile("schedule", smollm2_dir, sets)
    assert result.messages_in["StepResult"] > 10
    assert abs(result.messages_out["Step"] - result.messages_in["StepResult"]) <= depth
    assert result.num_tokens <= STREAMS * result.messages_out["Step"]
    assert abs(result.messages_in.get("Admit", 0) - result.messages_in.get("Closed", 0)) <= STREAMS


def test_detokenize_outputs_every_id_once(smollm2_dir: Path) -> None:
    result = profile("detokenize", smollm2_dir)
    assert abs(result.num_tokens - STREAMS * result.messages_in["Settled"]) <= STREAMS * AHEAD
    assert 0 < result.messages_out["Deltas"] <= result.messages_in["Settled"] + AHEAD
    assert set(result.messages_out) <= {"Deltas", "Release"}


def test_the_gateway_sends_clients_every_token_once(smollm2_dir: Path) -> None:
    result = profile("gateway", smollm2_dir)
    assert result.num_tokens > 100
    assert result.num_tokens <= STREAMS * (result.messages_in["Deltas"] + AHEAD)
    assert abs(result.messages_out.get("Submit", 0) - result.messages_out.get("Closed", 0)) <= STREAMS


def test_a_flame_graph_and_a_trace_show_the_working_stage(smollm2_dir: Path, tmp_path: Path) -> None:
    flame, trace = tmp_path / "flame.txt", tmp_path / "trace.json"
    result = profile("detokenize", smollm2_dir, flame=flame, trace=trace)
    lines = flame.read_text().splitlines()
    assert all(re.fullmatch(r".+ \d+", line) for line in lines)
    assert any("DetokenizeStage.turn (detokenize/stage.py:" in line for line in lines)
    events = json.loads(trace.read_text())["traceEvents"]
    wakes = [event for event in events if event["ph"] == "X" and event["name"] == "wake"]
    assert len(wakes) >= result.messages_out["Deltas"] // 2
    assert any(event["ph"] == "M" and "detokenize" in str(event["args"]) for event in events)


def test_the_error_of_a_stage_that_has_ended_may_still_be_on_its_way() -> None:
    class Inbox:
        num_waits = 0

        def wait_all(self, timeout_s: float) -> list[Any]:
            self.num_waits += 1
            return [m.StageFailed("no such file")] if self.num_waits == 3 else []

    harness = Harness.__new__(Harness)
    harness.stage, harness._inboxes = "detokenize", {SUPERVISOR: Inbox()}  # type: ignore[dict-item]
    harness.child = SimpleNamespace(is_alive=False, describe_end=lambda: "exited with code 1")  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^detokenize failed: no such file$"):
        harness.wait_for(lambda message: False, 60, "to be ready")
    with pytest.raises(UserError, match=r"^detokenize exited with code 1$"):
        harness.wait_for(lambda message: False, 60, "to be ready")


def test_a_stage_that_fails_is_reported_with_its_error(tmp_path: Path, smollm2_dir: Path) -> None:
    (tmp_path / "model.json").write_bytes((smollm2_dir / "model.json").read_bytes())
    with pytest.raises(UserError, match=r"detokenize failed: .*(No such file|not found|tokenizer)"):
        measure(
            "detokenize",
            Settings(log_level="error"),
            tmp_path,
            num_streams=1,
            seconds=0.1,
            warmup_s=0.1,
            progress=lambda *_: None,
        )


def test_the_command_prints_a_table_and_writes_json(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["profile", "detokenize", "--streams", "4", "--seconds", "0.2", "--warmup", "0.1"]
    assert main([*argv, "--json", str(tmp_path / "r.json"), "--flame", str(tmp_path / "f.svg")]) == 0
    out = capsys.readouterr().out
    assert "detokenize alone, 4 streams" in out and "CPU per token" in out and "p99" in out
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=StageProfile).num_streams == 4
    assert (tmp_path / "f.svg").read_text().startswith("<svg ")
    assert main([*argv, "--json", "-"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=StageProfile).stage == "detokenize"
    assert main([*argv, "--flame", str(tmp_path)]) == 2
    assert "--flame" in capsys.readouterr().err
    for wrong in (["--streams", "0"], ["--seconds", "nan"], ["--streams", "2000"]):
        with pytest.raises(SystemExit):
            main(["profile", "ingest", *wrong])
        assert "needs a" in capsys.readouterr().err


def test_the_limiting_resource_is_reported() -> None:
    def limit(busy: float, waited: float, load: float, load_waited: float) -> str:
        return limit_of(
            2.0, ProcessTimes(2 * busy, 2 * busy, 2 * waited), ProcessTimes(2 * load, 2 * load, 2 * load_waited)
        )

    assert limit(0.95, 0.0, 0.9, 0.0) == "stage"
    assert limit(0.5, 0.4, 0.9, 0.0) == "cores"
    assert limit(0.5, 0.0, 0.5, 0.4) == "cores"
    assert limit(0.5, 0.05, 0.95, 0.0) == "load"
    assert limit(0.5, 0.05, 0.5, 0.05) == "turns"


def test_the_sampler_finds_the_cpu_s_hot_spots_and_cleans_up() -> None:
    import signal
    import time

    def spin(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            sum(range(100))

    sampler = StackSampler()
    sampler.start()
    spin(0.3)
    stacks = sampler.stop()
    total = sum(stacks.counts.values())
    assert total >= 10
    assert sum(count for stack, count in stacks.counts.items() if "spin (" in stack) > 0.7 * total
    assert 0.0005 < stacks.interval_s < 0.03
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    with pytest.raises(UserError, match="nothing is being sampled"):
        sampler.stop()


def test_stacks_become_a_flame_graph_and_a_speedscope_profile(tmp_path: Path) -> None:
    stacks = Stacks({"run (a.py:1);work <b> (b.py:2)": 3, "run (a.py:1)": 1}, 0.004)
    for name in ("f.svg", "f.json", "f.folded"):
        write(stacks, tmp_path / name, "a & b")
    svg = (tmp_path / "f.svg").read_text()
    assert "work &lt;b&gt; (b.py:2): 3 samples, 75.0 %" in svg and "a &amp; b: 4 samples of 4 ms" in svg
    scope = json.loads((tmp_path / "f.json").read_text())
    assert [frame["name"] for frame in scope["shared"]["frames"]] == ["run (a.py:1)", "work <b> (b.py:2)"]
    assert scope["profiles"][0]["endValue"] == pytest.approx(0.016)
    assert (tmp_path / "f.folded").read_text() == "run (a.py:1) 1\nrun (a.py:1);work <b> (b.py:2) 3\n"
