"""Kills the servers that a test process started when that process ends for any reason.

A guardian is a separate process. It reads process ids from its standard input, which only the test process holds
open. At its end, also by SIGKILL, the guardian kills those that still run. Stages end with their supervisor.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
from functools import cache
from typing import Any


@cache
def _guardian(owner_pid: int) -> "subprocess.Popen[bytes]":
    # A session of its own: neither Ctrl-C nor a kill of the tests' process group ends it. `-S`: no site-packages.
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    atexit.register(guardian.communicate)  # closes its input and waits for it
    return guardian


def guard(process: "subprocess.Popen[Any]") -> None:
    """Ensure that a process is killed when this one ends."""
    pipe = _guardian(os.getpid()).stdin
    assert pipe is not None
    pipe.write(b"%d\n" % process.pid)
    pipe.flush()


def main() -> None:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    unread = b""
    guarded: set[int] = set()
    """pidfds, because process ids are reused"""
    while True:
        for fd, _ in poll.poll():
            if fd != 0:  # it has ended
                poll.unregister(fd)
                guarded.discard(fd)
                os.close(fd)
                continue
            data = os.read(0, 4096)
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                try:
                    pidfd = os.pidfd_open(int(line))
                except ProcessLookupError:
                    continue
                guarded.add(pidfd)
                poll.register(pidfd, select.POLLIN)
            if not data:
                for pidfd in guarded:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return


if __name__ == "__main__":
    main()
