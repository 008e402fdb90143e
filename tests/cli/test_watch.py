"""The computations and tables of `pipeline ps` and `pipeline top`; tests/e2e uses them on a running server."""

import io
import sys
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pipeline.cli.watch import draw, top
from pipeline.cli.watch.view import View, note_of, view_of
from pipeline.metrics.stats import (
    ExecuteCounts,
    GapCounts,
    HistogramCounts,
    ScheduleCounts,
    ServerStats,
    StageCounts,
    StateSlotCounts,
)
from tests.metrics.test_exposition import gateway, schedule, server, stage


def at(unix_s: float, *, output: int = 50, prompt: int = 100, cpu_s: float = 2.5, wait_s: float = 1.5) -> ServerStats:
    """A server's stats at a time."""
    running = stage("schedule.0", schedule(num_output_tokens=output, num_prompt_tokens=prompt))
    assert running.counts is not None
    counts = msgspec.structs.replace(running.counts, wait_s=wait_s)
    return msgspec.structs.replace(
        server(
            msgspec.structs.replace(running, cpu_s=cpu_s, counts=counts),
            stage("gateway.0", gateway(4, 0.05)),
            stage("execute.0", None, "starting"),
        ),
        unix_s=unix_s,
        model="m",
    )


def test_rates_are_over_the_last_interval() -> None:
    view = view_of([at(0.0), at(10.0), at(12.0, output=150, prompt=130, cpu_s=3.5, wait_s=2.0)])
    assert view.output_tokens_per_s == 50.0
    assert view.prompt_tokens_per_s == 15.0
    [running] = [one for one in view.stages if one.name == "schedule.0"]
    assert running.cpu_percent == 50.0
    assert running.busy_percent == 75.0


def test_the_share_of_time_spent_waiting_for_plans_is_shown() -> None:
    looks = [at(0.0), at(10.0)]
    assert view_of(looks).plan_wait_percent == 0.0
    [running] = [one for one in looks[1].stages if one.name == "schedule.0"]
    assert running.counts is not None and isinstance(running.counts.own, ScheduleCounts)
    gaps = [GapCounts(0, HistogramCounts([], 0.2), 3.004), GapCounts(7, HistogramCounts([], 0.3), 6.5)]
    own = msgspec.structs.replace(running.counts.own, plan_wait_s=HistogramCounts([], 0.5003), gaps=gaps)
    running = msgspec.structs.replace(running, counts=msgspec.structs.replace(running.counts, own=own))
    view = view_of([looks[0], msgspec.structs.replace(looks[1], stages=[running])])
    assert view.plan_wait_percent == pytest.approx(5.0)
    assert view.device_percent == pytest.approx(95.0)
    assert view.depth == 2


def test_a_single_sample_has_no_rates_but_medians_since_the_start() -> None:
    view = view_of([at(10.0)])
    assert view.output_tokens_per_s is None
    assert view.stages[0].cpu_percent is None
    assert view.time_to_first_token_ms == pytest.approx(50, rel=0.2)
    assert (view.running, view.waiting, view.kv_blocks_held, view.kv_blocks_total) == (3, 4, 5, 10)


def test_medians_are_over_the_window_only() -> None:
    view = view_of([at(0.0), at(1.0)])
    assert view.time_to_first_token_ms is None, "no token arrived in the window"


def test_a_restarted_stage_has_no_rate_across_the_restart() -> None:
    before, now = at(0.0), at(1.0)
    other = [msgspec.structs.replace(one, pid=one.pid + 1) for one in now.stages]
    view = view_of([before, msgspec.structs.replace(now, stages=other)])
    assert [one.cpu_percent for one in view.stages] == [None, None, None]


def test_falling_counters_give_no_negative_rate() -> None:
    assert view_of([at(0.0, output=500), at(1.0, output=0)]).output_tokens_per_s == 0.0


def test_the_explanations_fit_into_80_columns() -> None:
    assert max(map(len, draw.HELP.splitlines())) <= 80


def rendered(view: View, width: int, message: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw.top(view, width, message))
    text: Any = console.file
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 99, 100, 120, 140, 200])
def test_everything_fits_the_terminal(width: int) -> None:
    view = view_of([at(0.0), at(1.0, output=10**6, prompt=10**6)])
    view.address = "http://[2001:db8:85a3::8a2e:370:7334]:65535"
    view.model = "a-model-with-quite-a-long-name-as-they-often-have"
    view.uptime_s = 10**6
    view.running, view.waiting, view.open_requests = 4096, 65536, 65536
    view.kv_blocks_total, view.kv_blocks_held, view.kv_blocks_cached = 3_000_000, 1_234_567, 1_000_000
    for one in view.stages:
        one.pid, one.rss_bytes, one.cpu_percent, one.num_queued = 4194304, 500 * 1024**3, 12800.0, 65536
        one.messages_per_s, one.busy_percent, one.note = 123456.0, 100.0, "65536 running"
    lines = rendered(view, width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for words in (
        "tokens in/s",
        "TTFT",
        "device busy",
        "plan wait",
        "schedule.0",
        "4194304",
        "1234567 held",
        *(["65536 running", "500 GiB"] if width >= 80 else []),
    ):
        assert words in text, f"{words!r} does not fit {width} columns"
    assert "…" not in text.partition("\n")[2], "nothing is cut but the model's name"


@pytest.mark.parametrize(("width", "gone"), [(200, ""), (60, "queue busy %"), (40, "queue busy % holds memory")])
def test_a_narrow_terminal_lacks_columns_of_stages_and_cuts_no_other(width: int, gone: str) -> None:
    view = view_of([at(0.0), at(1.0)])
    view.model = "tiny"
    for one in view.stages:
        one.name, one.pid, one.rss_bytes, one.note = f"detokenize{one.name[-2:]}", 12345, 683 * 1024**2, "0 running"
    text = "\n".join(rendered(view, width))
    assert "…" not in text and str(view.stages[0].pid) in text
    headings = next(line for line in text.splitlines() if line.startswith("stage"))
    assert [one for one in ("queue", "busy %", "holds", "memory", "CPU %") if one not in headings] == [
        one for one in ("queue", "busy %", "holds", "memory", "CPU %") if one in gone
    ]


def test_a_pipe_truncates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    line = draw.server_line(
        7, "m" * 300, "http://[2001:db8:85a3::8a2e:370:7334]:65535", "serving", 10.0, draw.PIPE_COLUMNS
    )
    draw.console().print(line)
    text: Any = sys.stdout
    assert (
        text.getvalue() == f"pipeline 7  {'m' * 300}  serving  up 10 s  http://[2001:db8:85a3::8a2e:370:7334]:65535\n"
    )


class OneServer:
    """An `Admin` that knows two samples."""

    def __init__(self) -> None:
        self._samples = [at(0.0), at(1.0)]

    def stats(self) -> ServerStats:
        return self._samples.pop(0)


@pytest.mark.parametrize("columns", [60, 80])
def test_a_pipe_has_as_many_columns_as_are_set(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", io.StringIO())
    top._once(OneServer(), 0.0, as_json=False)  # type: ignore[arg-type]
    text: Any = sys.stdout
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    (bar,) = [line for line in lines if line.startswith("KV ")]
    assert bar.endswith("of 10")


def test_in_a_narrow_terminal_the_address_has_a_line_of_its_own() -> None:
    line = draw.server_line(12345, "an-organization/a-long-model-name", "http://127.0.0.1:8000", "ready", 4000.0, 80)
    assert line.plain.splitlines() == [
        "pipeline 12345  an-organization/a-long-model-name  ready  up 1 h 6 min",
        "         http://127.0.0.1:8000",
    ]
    line = draw.server_line(12345, "m" * 100, "http://127.0.0.1:8000", "ready", 4000.0, 80)
    assert [len(part) for part in line.plain.splitlines()] == [80, 44]
    assert "mm…mm" in line.plain


def test_an_idle_executor_has_no_rows() -> None:
    """It keeps the rows of sequences that have ended until the next step."""
    own = ExecuteCounts(num_rows=7, num_steps=1, num_tokens=1, step_s=0.0, wait_s=0.0)
    executor = msgspec.structs.replace(stage("execute.0", None), counts=StageCounts(0, 0, [], own, 0, 0.0, 0, 0, 0))
    assert [note_of(executor, num_running) for num_running in (0, 1, 9, None)] == [
        "0 rows",
        "1 row",
        "7 rows",
        "7 rows",
    ]


def test_a_stage_without_a_process_of_its_own_shows_none() -> None:
    looks = []
    for look in (at(0.0), at(1.0)):
        threads = [
            msgspec.structs.replace(one, num_threads=0, rss_bytes=0, cpu_s=0.0) if one.name == "gateway.0" else one
            for one in look.stages
        ]
        looks.append(msgspec.structs.replace(look, stages=threads))
    view = view_of(looks)
    [gate] = [one for one in view.stages if one.name == "gateway.0"]
    assert (gate.cpu_percent, gate.rss_bytes) == (None, None)
    [line] = [line for line in rendered(view, 80) if line.startswith("gateway.0")]
    assert "MiB" not in line and draw.NONE in line


def test_the_bar_shows_used_cached_and_free_blocks() -> None:
    view = view_of([at(1.0)])
    [bar] = [line for line in rendered(view, 100) if line.startswith("KV")]
    held, cached, free = (bar.count(sign) for sign in "█▒░")
    assert held + cached + free == 60
    assert held == 30
    assert cached == 18


def test_slots_are_shown_if_the_model_has_states() -> None:
    assert view_of([at(0.0)]).states is None and not any("slots" in line for line in rendered(view_of([at(0.0)]), 80))
    now = at(0.0)
    running = next(one for one in now.stages if one.name == "schedule.0")
    assert running.counts is not None and isinstance(running.counts.own, ScheduleCounts)
    states = StateSlotCounts(*range(10, 23))
    counts = msgspec.structs.replace(running.counts, own=msgspec.structs.replace(running.counts.own, states=states))
    running = msgspec.structs.replace(running, counts=counts)
    lines = rendered(view_of([msgspec.structs.replace(now, stages=[running])]), 80)
    assert "states 12 slots held, 11 cached of 13; 16 hits, 18 evicted" in lines


def test_swap_space_is_shown_if_there_is_any() -> None:
    view = view_of([at(0.0)])
    assert not any(line.startswith("swap ") for line in rendered(view, 120))
    view.swapped, view.swap_blocks_held, view.swap_blocks_total = 3, 5, 8
    view.blocks_swapped_out, view.blocks_swapped_in = 1200, 700
    lines = rendered(view, 120)
    assert "swap 5 blocks held of 8; 1,200 copied out, 700 back" in [line.rstrip() for line in lines]
    assert any(line.split()[:2] == ["swapped", "3"] for line in lines)


def test_errors_are_shown_below() -> None:
    assert rendered(view_of([at(1.0)]), 80, "no answer")[-1] == "no answer"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (61, "1 min 1 s"), (3700, "1 h 1 min"), (90000, "1 d 1 h")],
)
def test_durations_are_short_and_readable(seconds: float, words: str) -> None:
    assert draw.duration(seconds) == words


def test_the_json_of_top_is_flat_and_plain() -> None:
    view = msgspec.json.decode(msgspec.json.encode(view_of([at(0.0), at(1.0)])))
    assert view["running"] == 3
    assert {"name", "pid", "cpu_percent", "rss_bytes", "num_queued"} <= view["stages"][0].keys()


def test_a_stage_shows_its_load() -> None:
    own = ExecuteCounts(num_rows=7, num_steps=1, num_tokens=1, step_s=0.0, wait_s=0.0)
    counts = StageCounts(0, 0, [], own, 0, 0.0, 0, 0, 0)
    view = view_of([server(msgspec.structs.replace(stage("execute.0", None), counts=counts))])
    assert view.stages[0].note == "7 rows"
