"""What the first process of a server becomes when another process has taken over (server_restart.py): it passes signals
on to that one, waits until it and all that follow it have ended, and ends with their exit code.

Run as a script by an interpreter without site packages, so that it needs little memory.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
AGAIN_S = 0.3
"""If a child ends so soon after a signal, it may have received it too late to pass it on. Within this time, a server
takes a second one for the same."""


def adopt_orphans() -> None:
    """From now on, the kernel gives processes to this one whose parent, a child of it, has ended. It stays so after
    exec."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(first: int) -> list[int]:
    """The pids of this process's children: those of `first` if the kernel does not list them."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return [first]


def wait(first: int) -> int:
    """Wait until no child is left. Returns the worst exit code. The signals may be blocked before."""
    last, at_s, have_it = 0, -AGAIN_S, set[int]()

    def forward(number: int, _: object = None) -> None:
        nonlocal last, at_s
        if number != last or time.monotonic() >= at_s + AGAIN_S:
            last, at_s = number, time.monotonic()
            have_it.clear()
        for pid in children(first):
            try:
                if pid not in have_it:
                    os.kill(pid, number)
            except ProcessLookupError:
                continue
            have_it.add(pid)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    worst = 0
    while True:
        try:
            _, status = os.wait()
        except ChildProcessError:
            return worst
        code = os.waitstatus_to_exitcode(status)
        worst = max(worst, 128 - code if code < 0 else code)
        if time.monotonic() < at_s + AGAIN_S:
            forward(last)  # to children of the one that has ended


if __name__ == "__main__":
    sys.exit(wait(int(sys.argv[1])))
