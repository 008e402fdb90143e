"""`pipeline record` and `pipeline replay`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.cli.complain import complain
from pipeline.cli.out_file import require_writable
from pipeline.cli.replay.replaying import Replayed, replay
from pipeline.cli.replay.signals import signals_as_interrupt
from pipeline.cli.replay.traffic_command import record_traffic
from pipeline.cli.server_choice import choose_server
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from pipeline.replay.compare import ReplayComparison, compare
from pipeline.replay.recorder import RecordState
from pipeline.runtime import messages as m
from pipeline.runtime.log.logs import open_log
from pipeline.supervisor.admin.admin_client import Admin, is_running

FAILED = 1
DIFFERENT = 3
RENEW_S = 1.0
LEASE_S = 6.0
"""The stage ends a recording if it hears nothing from the command for this long."""
WRITE_S = 60.0
"""Longest wait for the stage's thread to finish writing."""
POLL_S = 0.1
FOREVER_S = 1e9
MAX_BYTES = 2**32
TRAFFIC = "traffic"
"""Instead of a stage."""


def record(args: argparse.Namespace) -> int:
    """Record a running stage until the time is up, Ctrl-C, or another termination signal."""
    if args.stage == TRAFFIC:
        return record_traffic(args)
    if args.block_tokens is not None or args.replica is not None:
        raise ConfigError(["--block-tokens and --replica are for `pipeline record traffic`"])
    require_writable(args.out, "--out")
    try:
        with Admin(choose_server(args)) as server, signals_as_interrupt():
            names = [one.name for one in server.stats().stages if args.stage in (one.name, one.name.partition(".")[0])]
            if len(names) != 1:
                raise UserError(
                    f"there is no stage {args.stage!r}" if not names else f"choose one of {', '.join(names)}"
                )
            path = str(args.out.absolute())
            seconds = args.seconds or FOREVER_S
            order = m.Record(0, path, args.max_bytes or MAX_BYTES, seconds, with_sent=not args.no_sent, lease_s=LEASE_S)
            _send_command(server, order, names[0])
            is_early = _wait(server, path, names[0], args.seconds)
            state = _end(server, path, names[0])
    except UserError as error:
        complain("pipeline record", error)
        return FAILED
    if is_early:
        print(f"pipeline record: ended early: {state.ended}", file=sys.stderr)
    print(f"{args.out}: {state.num_bytes:,} bytes of {names[0]}")
    return 0


def _send_command(server: Admin, control_request: m.ControlRequest, stage: str) -> msgspec.Raw:
    answer = server.send_command(control_request, [stage])[stage]
    if answer.error:
        raise UserError(answer.error)
    return answer.body


def _wait(server: Admin, path: str, stage: str, seconds: float | None) -> bool:
    """Renew the recording's lease until the time is up or Ctrl-C. A terminal shows how the file grows. Returns whether
    the recording ended by itself."""
    end = time.monotonic() + (seconds if seconds is not None else float("inf"))
    screen = Console(stderr=True, highlight=False)
    try:
        with screen.status(f"recording {stage}; Ctrl-C ends it") as status:
            while (left_s := end - time.monotonic()) > 0:
                time.sleep(min(left_s, RENEW_S))
                state = _keep(server, path, stage)
                if state is not None and state.ended:
                    return time.monotonic() < end
                if state is not None:
                    status.update(f"recording {stage}: {state.num_bytes:,} bytes; Ctrl-C ends it")
    except KeyboardInterrupt:
        pass
    return False


def _keep(server: Admin, path: str, stage: str) -> RecordState | None:
    """Renew the lease. Returns None if the stage did not answer in time, for example because it is stopped in a
    debugger."""
    try:
        answer = server.send_command(m.KeepRecord(0, path), [stage])[stage]
    except UserError as error:
        if not is_running(server.server):
            raise UserError(f"the server has ended; {path} has everything before that") from error
        return None
    return None if answer.error else msgspec.msgpack.decode(answer.body, type=RecordState)


def _end(server: Admin, path: str, stage: str) -> RecordState:
    """End the recording, and wait until the file is complete. Raises UserError if it does not become complete."""
    deadline = time.monotonic() + WRITE_S
    while True:
        state = msgspec.msgpack.decode(_send_command(server, m.EndRecord(0, path), stage), type=RecordState)
        if state.failure:
            raise UserError(f"{path} is incomplete: {state.failure}")
        if state.is_closed:
            return state
        if time.monotonic() > deadline:
            raise UserError(f"{path} is still incomplete: {stage} has {state.num_pending_bytes:,} bytes left to write")
        time.sleep(POLL_S)


def run_replay(args: argparse.Namespace) -> int:
    """Replay a stage from a file. Returns 3 if it sends something different."""
    if args.out is not None:
        require_writable(args.out, "--out")
    open_log("replay", "warning")
    with tempfile.TemporaryDirectory(prefix="pipeline-replay-") as folder:
        out = args.out or Path(folder) / "sent"
        try:
            replayed = replay(args.stage, args.file, out, paced=args.speed == "1x", inline=args.inline)
            header = replayed.header
            expected = args.expect or (args.file if header.has_sent and header.from_start else None)
            comparison = compare(out, expected)
        except UserError as error:
            complain("pipeline replay", error)
            return FAILED
    _print(args.file, replayed, comparison, expected)
    return 0 if comparison.are_same else DIFFERENT


def _print(path: Path, replayed: Replayed, comparison: ReplayComparison, expected: Path | None) -> None:
    screen = Console(highlight=False)
    header, counts = replayed.header, dict(replayed.counts)
    begun = "from its start" if header.from_start else "from the middle"
    screen.print(f"{path}: {header.name} of version {header.version}, recorded {begun}", markup=False, soft_wrap=True)
    if replayed.flaw:
        screen.print(f"{path}: {replayed.flaw}", markup=False, soft_wrap=True)
    turns, messages = counts.pop("turns"), counts.pop("messages")
    table = Table()
    for heading in ("direction", "messages", "per second"):
        table.add_column(heading, justify="left" if heading == "direction" else "right")
    table.add_row(f"received, in {turns:,} turns", f"{messages:,}", f"{messages / replayed.took_s:,.0f}")
    for peer, count in sorted(comparison.sent.items()):
        table.add_row(f"sent to {peer}", f"{count:,}", f"{count / replayed.took_s:,.0f}")
    for what, count in counts.items():
        table.add_row(f"left out: {what}", f"{count:,}", "–")
    screen.print(table)
    screen.print(f"took {replayed.took_s:.2f} s, including the stage's start and end")
    if expected is None:
        screen.print(
            "not compared: the recording does not have everything that the stage sent since its start; "
            "one of `pipeline serve --record` has",
            soft_wrap=True,
        )
    elif comparison.are_same:
        total = sum(comparison.sent.values())
        part = "" if comparison.num_same == total else f"; {total - comparison.num_same:,} more were sent after its end"
        screen.print(
            f"same as in {expected}: {comparison.num_same:,} messages, byte for byte{part}",
            markup=False,
            soft_wrap=True,
        )
    else:
        screen.print(f"differs from {expected}: {comparison.difference}", markup=False, soft_wrap=True)
