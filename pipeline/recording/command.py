"""`pipeline record` and `pipeline replay`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline import messages as m
from pipeline.admin_client import Admin, choose_server
from pipeline.errors import UserError
from pipeline.logs import open_log
from pipeline.manner import require_writable
from pipeline.recording.compare import Comparison, compare
from pipeline.recording.replaying import Replayed, replay

FAILED = 1
DIFFERENT = 3
PROGRESS_S = 0.5
FOREVER_S = 1e9


def record(args: argparse.Namespace) -> int:
    """Tee a live stage's inbox until the time is up or Ctrl-C."""
    require_writable(args.out, "--out")
    try:
        with Admin(choose_server(args.pid)) as server:
            names = [one.name for one in server.stats().stages if args.stage in (one.name, one.name.partition(".")[0])]
            if len(names) != 1:
                raise UserError(f"no stage {args.stage!r} is here" if not names else f"say which of {', '.join(names)}")
            path = str(args.out.absolute())
            order = m.Record(0, path, args.max_bytes, args.seconds or FOREVER_S, with_sent=not args.no_sent)
            _tell(server, order, names[0])
            _wait(args.out, names[0], args.seconds)
            num_bytes = _tell(server, m.EndRecord(0), names[0])
    except UserError as error:
        print(f"pipeline record: error: {error}", file=sys.stderr)
        return FAILED
    print(f"{args.out}: {int(num_bytes):,} bytes of {names[0]}")
    return 0


def _tell(server: Admin, aside: m.Aside, stage: str) -> int:
    answer = server.tell(aside, [stage])[stage]
    if answer.error:
        raise UserError(answer.error)
    value = msgspec.msgpack.decode(answer.body)
    return value if isinstance(value, int) else 0


def _wait(path: Path, stage: str, seconds: float | None) -> None:
    """Until the time is up, or Ctrl-C; a terminal is shown how the file grows."""
    end = time.monotonic() + (seconds if seconds is not None else float("inf"))
    screen = Console(stderr=True, highlight=False)
    try:
        with screen.status(f"recording {stage}; Ctrl-C ends it") as status:
            while (left_s := end - time.monotonic()) > 0:
                time.sleep(min(left_s, PROGRESS_S))
                if path.exists():
                    status.update(f"recording {stage}: {path.stat().st_size:,} bytes; Ctrl-C ends it")
    except KeyboardInterrupt:
        return


def run_replay(args: argparse.Namespace) -> int:
    """Drive a stage from a file. Returns 3 where it sends something else than is expected."""
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
            print(f"pipeline replay: error: {error}", file=sys.stderr)
            return FAILED
    _print(args.file, replayed, comparison, expected)
    return 0 if comparison.are_same else DIFFERENT


def _print(path: Path, replayed: Replayed, comparison: Comparison, expected: Path | None) -> None:
    screen = Console(highlight=False)
    header, counts = replayed.header, dict(replayed.counts)
    begun = "from its start" if header.from_start else "from the middle"
    screen.print(f"{path}: {header.name} of version {header.version}, recorded {begun}", markup=False, soft_wrap=True)
    if replayed.flaw:
        screen.print(f"{path}: {replayed.flaw}", markup=False, soft_wrap=True)
    wakes, messages = counts.pop("wakes"), counts.pop("messages")
    table = Table()
    for heading in ("", "messages", "a second"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(f"given, in {wakes:,} wakes", f"{messages:,}", f"{messages / replayed.took_s:,.0f}")
    for peer, count in sorted(comparison.sent.items()):
        table.add_row(f"sent to {peer}", f"{count:,}", f"{count / replayed.took_s:,.0f}")
    for what, count in counts.items():
        table.add_row(f"left out: {what}", f"{count:,}", "")
    screen.print(table)
    screen.print(f"took {replayed.took_s:.2f} s, with the stage's start and end")
    if expected is None:
        screen.print(
            "compared with nothing: the recording does not hold what the stage sent from its start", soft_wrap=True
        )
    elif comparison.are_same:
        total = sum(comparison.sent.values())
        part = "" if comparison.num_same == total else f"; {total - comparison.num_same:,} more came, which it lacks"
        screen.print(
            f"the same as in {expected}: {comparison.num_same:,} messages, byte by byte{part}",
            markup=False,
            soft_wrap=True,
        )
    else:
        screen.print(f"not the same as in {expected}: {comparison.difference}", markup=False, soft_wrap=True)
