"""Recording spans, and the Chrome trace made from them."""

import json
import time
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.trace import chrome_trace
from pipeline.metrics.request_timings import HOPS, RequestTimings, SequenceTimings, stamps
from pipeline.runtime import messages as m
from pipeline.runtime import tracing
from pipeline.runtime.tracing import StageTrace, TraceEvent, Tracer
from tests.rig import Rig

PHASES = {"M", "X", "s", "t", "f", "C", "i"}


def check(data: bytes) -> list[dict[str, Any]]:
    """The events of a file, which must be valid: the format's required fields, nested slices per thread, and arrows in
    order, each with one start and one end."""
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    slices = defaultdict(list)
    flows = defaultdict(list)
    for event in events:
        assert event["ph"] in PHASES
        assert isinstance(event["pid"], int)
        assert event["ts"] >= 0
        assert event["name"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "stf":
            assert isinstance(event["id"], str), "ids are above what a double holds"
            assert event["cat"] == "request"
            assert (event.get("bp") == "e") == (event["ph"] != "s")
            flows[event["id"]].append(event)
    for spans in slices.values():
        open_ends: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, "slices of a thread overlap"
            open_ends.append(end)
    for path in flows.values():
        assert [event["ph"] for event in path] == ["s", *["t"] * (len(path) - 2), "f"]
        assert [event["ts"] for event in path] == sorted(event["ts"] for event in path)
        for event in path:
            around = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in around), "an arrow ends outside any slice"
    return events


def test_nothing_is_recorded_by_default() -> None:
    tracer = Tracer()
    assert not tracer.on
    assert tracer.take() == ([], 0)


def test_recorded_events_are_returned_once_in_order() -> None:
    tracer = Tracer()
    tracer.start(60)
    now = time.monotonic()
    tracer.span("a", now, now + 1, {"x": 1}, [7, 7, 8])
    tracer.counters("c", now, {"y": 2})
    assert tracer.take() == (
        [TraceEvent("a", now, now + 1, {"x": 1}, [7, 8]), TraceEvent("c", now, 0.0, {"y": 2}, [])],
        0,
    )
    assert not tracer.on
    assert tracer.take() == ([], 0)


def test_a_full_ring_keeps_the_newest_events_and_counts_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CAPACITY", 4)
    tracer = Tracer()
    tracer.start(60)
    now = time.monotonic()
    for i in range(10):
        tracer.span(str(i), now, now, {})
    records, num_lost = tracer.take()
    assert [record.name for record in records] == ["6", "7", "8", "9"]
    assert num_lost == 6
    tracer.start(60)
    tracer.span("new", now, now, {})
    assert [record.name for record in tracer.take()[0]] == ["new"]


def test_a_window_that_is_not_collected_ends_by_itself() -> None:
    tracer = Tracer()
    tracer.start(0.5)
    now = time.monotonic()
    tracer.span("in", now, now + 0.1, {})
    tracer.span("after", now, now + 0.7, {})
    assert not tracer.on
    assert [record.name for record in tracer.take()[0]] == ["in"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_slices_of_a_lane_never_overlap(spans: list[tuple[int, int]]) -> None:
    records = [TraceEvent("x", float(begin), float(begin + length) or 1.0, {}, []) for begin, length in spans]
    check(chrome_trace.of_window([StageTrace("ingest.0", 5, records, 0)]))


def test_a_window_has_processes_in_flow_order_slices_counters_and_arrows() -> None:
    big = 2**63 + 1
    stages = [
        StageTrace(
            "schedule.0",
            30,
            [TraceEvent("plan", 1.002, 1.003, {}, [big]), TraceEvent("q", 1.003, 0.0, {"n": 1}, [])],
            5,
        ),
        StageTrace("gateway.0", 10, [TraceEvent("submit", 1.0, 1.001, {"response_id": "c"}, [big])], 0),
        StageTrace("execute.0", 40, [TraceEvent("step", 1.003, 1.009, {"tokens": 3}, [big, 9])], 0),
    ]
    data = chrome_trace.of_window(stages)
    events = check(data)
    assert json.loads(data)["otherData"]["lost"] == {"schedule.0": 5, "gateway.0": 0, "execute.0": 0}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert order[10] < order[30] < order[40]
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] in "stf"] == [(10, 0.0), (30, 2000.0), (40, 3000.0)]
    assert {e["id"] for e in events if e["ph"] in "stf"} == {f"{big:x}"}, "a request with one event has no arrow"
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"n": 1}]
    assert [(e["dur"], e["args"]) for e in events if e["name"] == "step"] == [(6000.0, {"tokens": 3})]


def test_stages_that_share_a_process_have_separate_tracks() -> None:
    stages = [StageTrace(name, 7, [TraceEvent("x", 1.0, 2.0, {}, [])], 0) for name in ("gateway.0", "schedule.0")]
    events = check(chrome_trace.of_window(stages))
    assert len({e["pid"] for e in events if e["name"] == "process_name"}) == 2


def test_an_empty_window_is_a_valid_file() -> None:
    check(chrome_trace.of_window([]))
    check(chrome_trace.of_window([StageTrace("gateway.0", 1, [], 0)]))


def test_the_hops_of_a_request_are_in_stage_order() -> None:
    times = [10.0 + i for i in range(len(HOPS) + 1)]
    request = RequestTimings("cmpl-1", 5.0, [SequenceTimings(3, i, times, 16.5, 7, 4, 9) for i in range(2)])
    data = chrome_trace.of_request(request)
    assert json.loads(data)["otherData"] == {"response_id": "cmpl-1", "received_unix_s": 5.0}
    events = check(data)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    first = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [(names[e["pid"]], e["name"], e["ts"], e["dur"]) for e in first] == [
        ("gateway", "gateway", 0.0, 1e6),
        ("ingest", "tokenize", 1e6, 1e6),
        ("ingest", "admit", 2e6, 1e6),
        ("schedule", "queue", 3e6, 1e6),
        ("execute", "prefill", 4e6, 1e6),
        ("execute", "decode", 5e6, 1e6),
        ("detokenize", "detokenize", 6e6, 1e6),
        ("gateway", "deliver", 7e6, 1e6),
    ]
    assert first[4]["args"] == {"tokens": 7, "cached": 4}
    assert len({e["id"] for e in events if e["ph"] == "s"}) == 2


def test_timestamps_never_decrease() -> None:
    assert stamps(5.0, 0.0, 6.0, 5.5, 7.0) == [5.0, 5.0, 6.0, 6.0, 7.0]


def test_a_stage_records_between_trace_and_take_trace() -> None:
    with Rig("schedule") as rig:
        rig.start(m.ExecuteFacts(16, 16, 64, 100))
        rig.send(m.Trace(1, 30.0))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.send(m.TakeTrace(2))
        trace = msgspec.msgpack.decode(rig.receive("supervisor", m.Answer).body, type=StageTrace)
        assert (trace.stage, trace.num_lost) == ("schedule.0", 0)
        assert {record.name for record in trace.records} == {"wake"}
        rig.send(m.Trace(1, 30.0))
        assert rig.receive("supervisor", m.Answer).error == ""
        for goes_on in (True, False):
            rig.load()
            rig.send(m.TakeTrace(2, goes_on))
            trace = msgspec.msgpack.decode(rig.receive("supervisor", m.Answer).body, type=StageTrace)
            assert trace.records
        rig.send(m.TakeTrace(3))
        again = msgspec.msgpack.decode(rig.receive("supervisor", m.Answer).body, type=StageTrace)
        assert again.records == []


def test_a_second_window_is_rejected_while_the_first_is_open() -> None:
    with Rig("schedule") as rig:
        rig.start(m.ExecuteFacts(16, 16, 64, 100))
        rig.send(m.Trace(1, 30.0))
        rig.send(m.Trace(2, 30.0))
        assert rig.receive("supervisor", m.Answer).error == ""
        assert "another trace is running" in rig.receive("supervisor", m.Answer).error
        rig.send(m.TakeTrace(3))
        rig.send(m.Trace(4, 30.0))
        assert [rig.receive("supervisor", m.Answer).error for _ in range(2)] == ["", ""]


def test_an_expired_window_blocks_no_other() -> None:
    tracer = Tracer()
    tracer.start(1e-6)
    time.sleep(0.001)
    assert tracer.on
    assert tracer.left_s == 0.0


@pytest.mark.parametrize("window_s", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_an_invalid_window_is_rejected_and_the_stage_continues(window_s: float) -> None:
    with Rig("schedule") as rig:
        rig.start(m.ExecuteFacts(16, 16, 64, 100))
        rig.send(m.Trace(1, window_s))
        assert "the trace window must be" in rig.receive("supervisor", m.Answer).error
        rig.load()
