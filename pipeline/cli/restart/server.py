"""`pipeline restart --new-version`: replaces a running server by a new process."""

import argparse
import json
import sys
import time
from contextlib import suppress
from pathlib import Path

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server, pid_of
from pipeline.errors import UserError
from pipeline.supervisor.admin.admin_client import Admin, find_servers, is_running
from pipeline.supervisor.restart.server_restart import RestartOrder

POLL_S = 0.1


def run(args: argparse.Namespace) -> int:
    """Returns 1 if the server was not replaced."""
    try:
        if args.stage is not None:
            raise UserError(
                f"{args.stage}: --new-version, --new-model and --set replace the whole server: leave it out"
            )
        if args.closing_text and args.finish == "request":
            raise UserError("--closing-text needs --finish sentence or --finish now")
        order = RestartOrder(
            options=_options_of(args),
            finish=args.finish,
            closing_text=args.closing_text,
            drain_s=args.drain_timeout,
            stops_first=args.stop_first,
        )
        name = choose_server(args, takes_any_model=True)
        begun_s = time.monotonic()
        print("starting the next server", file=sys.stderr)
        with Admin(name) as server:
            pid = server.restart_server(order, args.timeout)
        if order.stops_first:
            _wait_for_next(name, begun_s + args.timeout)
        print(f"the next server serves, pid {pid}, after {time.monotonic() - begun_s:.1f} s")
        if not order.stops_first:
            print(
                "waiting until the open requests of the one before have ended; Ctrl-C only ends this", file=sys.stderr
            )
            while is_running(name):
                time.sleep(POLL_S)
            print(f"the one before has ended, after {time.monotonic() - begun_s:.1f} s")
    except UserError as error:
        complain("pipeline restart", error)
        return 1
    return 0


def _options_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The settings to change, each with its origin."""
    options = [(f"--set {text}", text) for text in args.set]
    if args.new_model is not None:
        key = "model" if args.model is None else f'models."{args.model}".model'
        options.append((f"--new-model {args.new_model}", f"{key}={json.dumps(args.new_model)}"))
    return options


def _wait_for_next(name: str, end_s: float) -> None:
    """Wait until the process of a server is the next one, and serves. Raises UserError if it is not, or in time."""
    pid = pid_of(name)
    while time.monotonic() < end_s:
        for other in find_servers():
            if pid_of(other) == pid and other != name:
                with suppress(UserError), Admin(other) as server:  # it may end meanwhile
                    if server.stats().state == "serving":
                        return
        if not Path(f"/proc/{pid}").exists():
            raise UserError("the next server did not start, so there is none now: its log says why")
        time.sleep(POLL_S)
    raise UserError("the next server is not ready in time: its log says why")
