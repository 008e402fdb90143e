"""`pipeline trace`: a window of time on a running server, or one request that has ended, as a Chrome trace file."""

import argparse
import sys
import threading

from pipeline.cli.out_file import require_writable
from pipeline.cli.server_choice import choose_server
from pipeline.cli.trace.options import MAX_SECONDS
from pipeline.errors import UserError
from pipeline.metrics import chrome_trace
from pipeline.metrics.request_timings import RequestTimings
from pipeline.runtime import messages as m
from pipeline.runtime.channels import MessageDecoder
from pipeline.runtime.tracing import StageTrace
from pipeline.supervisor.admin_client import Admin

MARGIN_S = 5.0
"""How much longer than the window stages record, because the command that ends it may be late."""
TAKE_S = 30.0
"""Longest time for stages to return their events."""


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the server can't be traced. Raises ConfigError."""
    try:
        if not 0 < args.seconds <= MAX_SECONDS:
            raise UserError(f"--seconds must be above 0 and at most {MAX_SECONDS:g}")
        require_writable(args.out, "--out")
        with Admin(choose_server(args)) as server:
            data = _request(server, args.request) if args.request else _window(server, args.seconds)
        args.out.write_bytes(data)
    except (UserError, OSError) as error:
        print(f"pipeline trace: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: open it in https://ui.perfetto.dev or chrome://tracing", file=sys.stderr)
    return 0


def _window(server: Admin, seconds: float) -> bytes:
    started = server.send_command(m.Trace(0, seconds + MARGIN_S), [])
    names = [name for name, answer in started.items() if not answer.error]
    for name, answer in started.items():
        if answer.error:
            print(f"pipeline trace: warning: {name} is missing from the trace: {answer.error}", file=sys.stderr)
    if not names:
        raise UserError("no stage is ready to be recorded")
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        print("pipeline trace: ended early", file=sys.stderr)
    decoder: MessageDecoder[StageTrace] = MessageDecoder(StageTrace)
    stages = []
    for name, answer in server.send_command(m.TakeTrace(0), names, TAKE_S).items():
        if answer.error:
            print(f"pipeline trace: warning: {name} is missing from the trace: {answer.error}", file=sys.stderr)
            continue
        stage = decoder.decode(bytes(answer.body))
        if stage.num_lost:
            print(f"pipeline trace: warning: {name} lost its first {stage.num_lost} events", file=sys.stderr)
        stages.append(stage)
    return chrome_trace.of_window(stages)


def _request(server: Admin, response_id: str) -> bytes:
    decoder: MessageDecoder[RequestTimings | None] = MessageDecoder(RequestTimings | None)
    answers = server.send_command(m.FindRequest(0, response_id), ["gateway"])
    for answer in answers.values():
        if not answer.error and (times := decoder.decode(bytes(answer.body))) is not None:
            return chrome_trace.of_request(times)
    raise UserError(
        f"no gateway knows {response_id!r}: gateways keep the timings of their last successful requests only"
    )
