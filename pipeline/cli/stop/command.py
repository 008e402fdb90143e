"""`pipeline stop`: ends running servers, as Ctrl-C in their terminals does."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server, pid_of
from pipeline.errors import UserError
from pipeline.supervisor.admin.admin_client import Admin, find_servers, is_running
from pipeline.supervisor.signals import SAME_SIGNAL_S

STAGES_S = 0.1
"""For the stages to answer, of which nothing is asked but the server's state."""
POLL_S = 60.0
"""Longest wait of one poll, which can't take any number."""


def run(args: argparse.Namespace) -> int:
    """Returns 1 if there is no such server, or if one has not ended in time."""
    try:
        found = find_servers() if args.all else [choose_server(args, takes_any_model=True)]
        names = list({pid_of(name): name for name in found}.values())  # a server of several models has one for each
        if not names:
            raise UserError("no server is running on this machine")
    except UserError as error:
        complain("pipeline stop", error)
        return 1
    with ExitStack() as opened:
        open_servers = {fd: name for name in names if (fd := _open(name, opened)) is not None}
        return _stop(open_servers, args.now, args.timeout)


def _open(server: str, opened: ExitStack) -> int | None:
    """A descriptor of the supervisor's process, which unlike its pid never means another one; None if it has ended."""
    try:
        fd = os.pidfd_open(pid_of(server))
    except ProcessLookupError:
        return None
    opened.callback(os.close, fd)
    # If it ended before the descriptor was opened, the pid may be another process's.
    return fd if is_running(server) else None


def _stop(servers: dict[int, str], now: bool, timeout_s: float) -> int:
    """End servers, by descriptor, all at once, and wait until they have ended. Returns 1 if one has not."""
    begin_s = time.monotonic()
    for fd, name in servers.items():
        # A second signal would end the requests for which a server that drains waits.
        is_draining = not now and _is_draining(name)
        if not is_draining:
            _send(fd)
        doing = "is stopping already" if is_draining else "stopping"
        ending = "" if now else "; requests in flight may end first"
        print(f"pid {pid_of(name)}: {doing}{ending}", file=sys.stderr, flush=True)
    if now:
        _report(servers, 2 * SAME_SIGNAL_S, begin_s)
        for fd in servers:
            _send(fd)
    _report(servers, timeout_s, begin_s)
    advice = "" if now else ": wait for its requests, or add --now"
    for name in servers.values():
        complain("pipeline stop", f"the server with pid {pid_of(name)} has not ended within {timeout_s:g} s{advice}")
    return 1 if servers else 0


def _is_draining(server: str) -> bool:
    try:
        with Admin(server) as admin:
            return bool(admin.stats(STAGES_S).state == "draining")
    except UserError:  # a server that does not answer is to be stopped, too
        return False


def _send(fd: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(fd, signal.SIGTERM)


def _report(servers: dict[int, str], timeout_s: float, begin_s: float) -> None:
    for name in _ended(servers, timeout_s):
        print(f"pid {pid_of(name)} has ended after {time.monotonic() - begin_s:.1f} s", flush=True)


def _ended(servers: dict[int, str], timeout_s: float) -> Iterator[str]:
    """Wait for processes to end, and yield the name of each that does; `servers` loses these."""
    poller = select.poll()
    for fd in servers:
        poller.register(fd, select.POLLIN)
    end = time.monotonic() + timeout_s
    while servers and (left_s := end - time.monotonic()) > 0:
        for fd, _ in poller.poll(min(left_s, POLL_S) * 1000):
            poller.unregister(fd)
            yield servers.pop(fd)
