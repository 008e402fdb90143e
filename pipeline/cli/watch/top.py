"""`pipeline top`: watches one server. Prints plain text once if standard output is not a terminal."""

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
from rich.live import Live

from pipeline.cli.complain import complain
from pipeline.cli.safe_console import SafeConsole
from pipeline.cli.server_choice import choose_server
from pipeline.cli.watch import draw
from pipeline.cli.watch.view import View, view_of
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.supervisor.admin.admin_client import Admin, is_running

WINDOW_S = 30.0
"""Window of the medians, in seconds."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 60.0


def run(args: argparse.Namespace) -> int:
    try:
        if not MIN_INTERVAL_S <= args.interval <= MAX_INTERVAL_S:
            raise UserError(f"--interval must be {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
        with Admin(choose_server(args)) as server:
            if args.once or args.json or not sys.stdout.isatty():
                _once(server, args.interval, as_json=args.json)
                return 0
            return _live(server, args.interval)
    except UserError as error:
        complain("pipeline top", error)
        return 1


def _once(server: Admin, interval_s: float, *, as_json: bool) -> None:
    """Take two samples and print the rates between them."""
    history = [server.stats()]
    select.select([], [], [], interval_s)
    history.append(server.stats())
    view = view_of(history)
    if as_json:
        print(msgspec.json.encode(view).decode())
        return
    console = draw.console()
    console.print(draw.top(view, console.width if console.is_terminal else min(console.width, draw.MEDIUM)))


def _live(server: Admin, interval_s: float) -> int:
    """Update until q, Ctrl-C, or the end of the server."""
    history: deque[ServerStats] = deque(maxlen=max(2, round(WINDOW_S / interval_s)))
    console = SafeConsole(highlight=False)
    view: View | None = None
    explains = False
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            begun = time.monotonic()
            message = ""
            try:
                history.append(server.stats())
                view = view_of(history)
            except UserError as error:
                if not is_running(server.server):
                    break
                message = str(error)
            if view is not None:
                footer = draw.HELP if explains else draw.KEYS
                live.update(draw.top(view, console.width, message, footer), refresh=True)
            key = pressed(max(0.0, begun + interval_s - time.monotonic()))
            if key == "q":
                return 0
            explains ^= key == "h"
    print(f"server {server.server} has ended")
    return 0


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits up to a timeout and returns the key that was pressed, q or h, or nothing. Keys are
    not echoed. The terminal is restored on every path."""
    if not sys.stdin.isatty():
        yield lambda timeout_s: "q" if select.select([], [], [], timeout_s)[0] else ""
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def pressed(timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return ""
            key = os.read(fd, 1)
            if key in (b"q", b"Q", b""):
                return "q"
            if key in (b"h", b"H", b"?"):
                return "h"

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
