"""Writes Chrome's trace format, which chrome://tracing and ui.perfetto.dev open.

Each stage is a process, in flow order, with a slice for each piece of work. Overlapping slices of a stage, such as
those of a thread beside its loop, get lanes of their own. Arrows connect the slices of a request in order of time.
Counters are graphs. Times are µs since the first event.

The format: "Trace Event Format", Google, 2016; phases used are M (metadata), X (slice), s t f (flow), C (counters) and
i (mark).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pipeline.metrics.request_timings import HOPS, STAGE_OF, RequestTimings, SequenceTimings
from pipeline.runtime.topology import FLOW
from pipeline.runtime.tracing import StageTrace, TraceEvent

Event = dict[str, Any]
CATEGORY = "request"


def of_window(stages: Sequence[StageTrace]) -> bytes:
    """A trace file of the events that the stages recorded in a window."""
    if len({stage.pid for stage in stages}) < len(stages):  # several stages in one process: `pipeline serve --inline`
        stages = [msgspec.structs.replace(stage, pid=index + 1) for index, stage in enumerate(stages)]
    begin_s = min((record.begin_s for stage in stages for record in stage.records), default=0.0)
    events: list[Event] = []
    points: dict[int, list[_Point]] = defaultdict(list)
    for stage in stages:
        index = _sort_index(stage.stage)
        events += _process(stage.pid, stage.stage, index)
        spans = [record for record in stage.records if record.end_s]
        lanes = _lanes(spans)
        for lane in range(1, max((lane for _, lane in lanes), default=0) + 1):
            events.append(_thread(stage.pid, lane, "loop" if lane == 1 else f"beside {lane - 1}"))
        for record, lane in lanes:
            begin_us = _us(record.begin_s - begin_s)
            events.append(_slice(stage.pid, lane, record.name, begin_us, _us(record.end_s - begin_s), record.args))
            for request_id in record.requests:
                points[request_id].append((begin_us, index, stage.pid, lane))
        for record in stage.records:
            if not record.end_s:
                at_us = _us(record.begin_s - begin_s)
                events.append({"ph": "C", "name": record.name, "ts": at_us, "pid": stage.pid, "args": record.args})
    for request_id, path in points.items():
        events += _flow(f"{request_id:x}", path)
    return _file(events, {"lost": {stage.stage: stage.num_lost for stage in stages}})


def of_request(times: RequestTimings) -> bytes:
    """A trace file of one request: a slice for each hop, arrows between them, and a lane for each choice."""
    begin_s = min((one.stamps_s[0] for one in times.sequences), default=0.0)
    names = [name for name in FLOW if name in STAGE_OF.values()]
    events: list[Event] = []
    for index, name in enumerate(names):
        events += _process(index + 1, name, index)
        events += [_thread(index + 1, one.index + 1, f"choice {one.index}") for one in times.sequences]
    for one in times.sequences:
        path: list[_Point] = []
        for hop, start_s, end_s in zip(HOPS, one.stamps_s, one.stamps_s[1:], strict=False):
            index = names.index(STAGE_OF[hop])
            start_us = _us(start_s - begin_s)
            args = _hop_args(hop, one)
            events.append(_slice(index + 1, one.index + 1, hop, start_us, _us(end_s - begin_s), args))
            path.append((start_us, len(path), index + 1, one.index + 1))
        events += _flow(f"{one.request_id:x}/{one.index}", path)
        if one.first_text_s:
            at_us = _us(one.first_text_s - begin_s)
            gateway = names.index("gateway") + 1
            events.append(
                {"ph": "i", "s": "t", "name": "first text", "ts": at_us, "pid": gateway, "tid": one.index + 1}
            )
    return _file(events, {"response_id": times.response_id, "received_unix_s": times.received_unix_s})


def _hop_args(hop: str, sequence: SequenceTimings) -> dict[str, int | float | str]:
    match hop:
        case "tokenize":
            return {"tokens": sequence.num_prompt}
        case "prefill":
            return {"tokens": sequence.num_prompt, "cached": sequence.num_cached}
        case "decode":
            return {"tokens": sequence.num_output}
        case _:
            return {}


# ---------------------------------------------------------------------------------------------------------- events

_Point = tuple[float, int, int, int]
"""(µs, order of points at the same time, pid, tid)"""


def _sort_index(stage: str) -> int:
    name = stage.partition(".")[0]
    return FLOW.index(name) if name in FLOW else len(FLOW)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _process(pid: int, name: str, sort_index: int) -> list[Event]:
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": sort_index}},
    ]


def _thread(pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, begin_us: float, end_us: float, args: Any) -> Event:
    duration_us = round(end_us - begin_us, 3)
    return {"ph": "X", "name": name, "ts": begin_us, "dur": duration_us, "pid": pid, "tid": tid, "args": args}


def _flow(flow_id: str, path: list[_Point]) -> Iterable[Event]:
    """Arrows along a path. A single point has no arrow."""
    if len(path) < 2:
        return
    for index, (at_us, _, pid, tid) in enumerate(sorted(path)):
        phase = "s" if index == 0 else "f" if index == len(path) - 1 else "t"
        event = {"ph": phase, "name": "request", "cat": CATEGORY, "id": flow_id, "ts": at_us, "pid": pid, "tid": tid}
        yield event if phase == "s" else event | {"bp": "e"}  # binds to the enclosing slice, not to the next one


def _lanes(spans: Iterable[TraceEvent]) -> list[tuple[TraceEvent, int]]:
    """Give each span a lane (from 1) on which spans either nest or don't overlap."""
    open_ends: list[list[float]] = []
    """For each lane, the ends of the spans around the last one, the innermost last."""
    with_lanes = []
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):
        for ends in open_ends:
            while ends and ends[-1] <= span.begin_s:
                ends.pop()
        fits = (lane for lane, ends in enumerate(open_ends) if not ends or span.end_s <= ends[-1])
        lane = next(fits, len(open_ends))
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(span.end_s)
        with_lanes.append((span, lane + 1))
    return with_lanes


def _file(events: list[Event], other: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})
