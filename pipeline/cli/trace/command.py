"""`pipeline trace`: a window of time on a running server, or one request that has ended, as a Chrome trace file."""

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.cli.complain import complain
from pipeline.cli.out_file import require_writable, write_output
from pipeline.cli.server_choice import choose_server
from pipeline.cli.trace import chrome_trace
from pipeline.cli.trace.options import MAX_SECONDS
from pipeline.errors import UserError
from pipeline.metrics.request_timings import RequestTimings
from pipeline.runtime import messages as m
from pipeline.runtime.tracing import StageTrace
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.admin.admin_client import Admin

MARGIN_S = 5.0
"""How much longer than the window stages record, because the command that ends it may be late."""
TAKE_S = 30.0
"""Longest time for stages to return their events."""
POLL_S = 0.2
"""Events are taken this often, because those that a stage still has when it dies are lost."""


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the server can't be traced. Raises ConfigError."""
    try:
        if not 0 < args.seconds <= MAX_SECONDS:
            raise UserError(f"--seconds must be above 0 and at most {MAX_SECONDS:g}")
        require_writable(args.out, "--out")
        with Admin(choose_server(args)) as server:
            data = _request(server, args.request) if args.request else _window(server, args.seconds)
        write_output(args.out, data)
    except (UserError, OSError) as error:
        complain("pipeline trace", error)
        return 1
    print(f"{args.out}: open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
    return 0


def _window(server: Admin, seconds: float) -> bytes:
    begin_s = time.monotonic()
    started = server.send_command(m.Trace(0, seconds + MARGIN_S), [])
    for name, answer in started.items():
        if answer.error:
            complain("pipeline trace", f"{name} is missing from the trace: {answer.error}", "warning")
    if all(answer.error for answer in started.values()):
        raise UserError("no stage is ready to be recorded")
    parts = _Parts({name for name, answer in started.items() if answer.error})
    with _interrupted() as is_interrupted:
        print(f"pipeline trace: recording for {seconds:g} s; Ctrl-C ends it early", file=sys.stderr, flush=True)
        while (left_s := begin_s + seconds - time.monotonic()) > 0 and not is_interrupted.wait(min(POLL_S, left_s)):
            parts.take(server, goes_on=True)
    parts.take(server, goes_on=False)
    restarts = server.restarts(begin_s)
    return chrome_trace.of_window([*parts.stages(), *([restarts] if restarts.records else [])])


@contextmanager
def _interrupted() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets. It interrupts nothing, so no events are lost; a second one does."""
    event = threading.Event()

    def end(*_: object) -> None:
        print("pipeline trace: ended early", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        event.set()

    before = signal.signal(signal.SIGINT, end)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


class _Parts:
    """What was taken from each process so far. A stage that was restarted has several."""

    def __init__(self, missing: set[str]) -> None:
        """`missing` are the stages that do not record."""
        self._missing = missing
        self._decoder: MessageDecoder[StageTrace] = MessageDecoder(StageTrace)
        self._taken: dict[tuple[str, int], StageTrace] = {}
        """By name and pid, in the order of their start."""

    def take(self, server: Admin, *, goes_on: bool) -> None:
        for name, answer in server.send_command(m.TakeTrace(0, goes_on), [], TAKE_S).items():
            if name in self._missing:
                continue
            if answer.error:
                complain("pipeline trace", f"events of {name} are missing: {answer.error}", "warning")
                continue
            part = self._decoder.decode(bytes(answer.body))
            if part.num_lost:
                complain("pipeline trace", f"{name} lost {part.num_lost} events", "warning")
            before = self._taken.get((name, part.pid), StageTrace(name, part.pid, [], 0))
            records, num_lost = before.records + part.records, before.num_lost + part.num_lost
            self._taken[name, part.pid] = StageTrace(name, part.pid, records, num_lost)

    def stages(self) -> list[StageTrace]:
        return list(self._taken.values())


def _request(server: Admin, response_id: str) -> bytes:
    decoder: MessageDecoder[RequestTimings | None] = MessageDecoder(RequestTimings | None)
    answers = server.send_command(m.FindRequest(0, response_id), ["gateway"])
    for answer in answers.values():
        if not answer.error and (times := decoder.decode(bytes(answer.body))) is not None:
            return chrome_trace.of_request(times)
    raise UserError(
        f"no gateway knows {response_id!r}: gateways keep the timings of their last successful requests only"
    )
