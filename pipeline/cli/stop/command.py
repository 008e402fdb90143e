"""`pipeline stop`: ends a running server, as Ctrl-C in its terminal does."""

import argparse
import os
import select
import signal
import sys
import time

from pipeline.cli.complain import complain
from pipeline.cli.server_choice import choose_server, pid_of
from pipeline.errors import UserError
from pipeline.supervisor.admin_client import find_servers
from pipeline.supervisor.signals import SAME_SIGNAL_S


def run(args: argparse.Namespace) -> int:
    """Returns 1 if there is no such server, or if it has not ended in time."""
    try:
        names = find_servers() if args.all else [choose_server(args)]
        if not names:
            raise UserError("no server is running on this machine")
        for name in names:
            _stop(name, args.now, args.timeout)
    except UserError as error:
        complain("pipeline stop", error)
        return 1
    return 0


def _stop(server: str, now: bool, timeout_s: float) -> None:
    """End a server and wait until its supervisor has ended. Raises UserError."""
    pid = pid_of(server)
    try:
        fd = os.pidfd_open(pid)  # unlike the pid, it never means another process
    except ProcessLookupError:
        return
    try:
        if server not in find_servers():
            return  # it ended before the descriptor was opened, and the pid may be another process's
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        print(f"pid {pid}: stopping{'' if now else '; requests in flight may end first'}", file=sys.stderr, flush=True)
        begin_s = time.monotonic()
        if now and not _has_ended(fd, 2 * SAME_SIGNAL_S):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
        if not _has_ended(fd, timeout_s):
            raise UserError(
                f"the server with pid {pid} has not ended within {timeout_s:g} s: wait for its requests, or add --now"
            )
        print(f"pid {pid} has ended after {time.monotonic() - begin_s:.1f} s")
    except ProcessLookupError:  # it has ended between two of these
        return
    finally:
        os.close(fd)


def _has_ended(fd: int, timeout_s: float) -> bool:
    """Wait for the process of a descriptor to end."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))
