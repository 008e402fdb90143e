"""tools/serving_bench/token_costs.py measures CPU time per token and the gaps between steps."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from pipeline.errors import UserError
from pipeline.runtime.tracing import Args, StageTrace, TraceEvent
from tests.cli.fake_server import FakeServer
from tools.benchmarks.pairs import Comparison
from tools.serving_bench import token_costs
from tools.serving_bench.token_costs import EXECUTE, gaps_us, parts_us, usage_of, with_common_figures

BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"


def event(name: str, begin_ms: float, end_ms: float, step: int) -> TraceEvent:
    args: Args = {"step": step}
    return TraceEvent(name, begin_ms / 1000, end_ms / 1000, args, [])


def traces(steps: list[TraceEvent], scheduled: list[TraceEvent]) -> dict[str, StageTrace]:
    return {EXECUTE: StageTrace(EXECUTE, 1, steps, 0), "schedule.0": StageTrace("schedule.0", 2, scheduled, 0)}


def test_a_gap_is_between_the_end_of_a_step_and_the_start_of_the_next() -> None:
    steps = [event("step", 0, 4, 1), event("step", 4.5, 8, 2), event("step", 8.25, 12, 3)]
    assert gaps_us(steps) == pytest.approx([500, 250])


@pytest.mark.parametrize(
    ("settle", "plan", "expected"),
    [
        ((4.1, 4.2), (4.25, 4.4), [100, 150, 150, 100]),
        ((4.6, 4.7), (4.1, 4.3), [100, 0, 200, 200]),  # planned before settling
    ],
)
def test_the_parts_of_a_gap_add_up_to_it(
    settle: tuple[float, float], plan: tuple[float, float], expected: list[float]
) -> None:
    steps = [event("step", 0, 4, 1), event("step", 4.5, 8, 2)]
    parts = parts_us(traces(steps, [event("settle", *settle, 1), event("plan", *plan, 2)]))
    assert list(parts) == ["result to schedule", "settle", "plan", "step to execute"]
    assert list(parts.values()) == pytest.approx(expected)
    assert sum(parts.values()) == pytest.approx(gaps_us(steps)[0])


def test_a_gap_has_no_parts_if_its_step_was_planned_before() -> None:
    steps = [event("step", 0, 4, 1), event("step", 4.1, 8, 2)]
    assert parts_us(traces(steps, [event("plan", 0.2, 0.3, 2), event("settle", 4.2, 4.3, 1)])) == {}


def test_a_comparison_has_the_figures_that_all_readings_have() -> None:
    comparison = Comparison(("a", "b"), ([{"gap": 1.0, "plan": 2.0}, {"gap": 3.0}], [{"gap": 4.0}, {"gap": 5.0}]))
    assert with_common_figures(comparison).readings == ([{"gap": 1.0}, {"gap": 3.0}], [{"gap": 4.0}, {"gap": 5.0}])


def test_the_cpu_time_of_all_threads_and_children_counts() -> None:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        assert usage_of(child.pid).cpu_us > 190_000
        assert usage_of(os.getpid()).cpu_us > usage_of(child.pid).cpu_us
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    assert usage_of(child.pid).cpu_us == 0


def test_each_sleep_of_a_thread_counts() -> None:
    begun, ended = threading.Event(), threading.Event()

    def sleeper() -> None:
        for _ in range(50):
            begun.wait(0.001)
        begun.set()
        ended.wait()

    thread = threading.Thread(target=sleeper)
    before = usage_of(os.getpid()).num_switches
    thread.start()
    begun.wait()
    assert usage_of(os.getpid()).num_switches - before >= 50
    ended.set()
    thread.join()


def test_streams_that_end_before_the_measurement_are_an_error() -> None:
    async def main(url: str) -> None:
        async with token_costs._streams(url, 3, seed=5, num_tokens=4):
            pass

    with FakeServer() as server:
        with pytest.raises(UserError, match="ended too soon"):
            asyncio.run(main(server.url))
        streamed = [body for body in server.bodies if body.get("stream")]
    assert len({body["prompt"] for body in streamed}) == 3
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 for body in streamed)


def test_a_server_that_does_not_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert token_costs.main(["--set", "no.such=1", "--streams", "1"]) == 2
    assert "no.such" in capsys.readouterr().err
