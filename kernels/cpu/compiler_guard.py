"""Runs a compiler, and ends all its processes when the process that wants the library ends, however it does.

A compiler is several processes: if only its first one is killed, the others compute on for a minute. Run as
a script, in a process group of its own, with the process that waits and the command. It ends as the compiler does.
"""

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> NoReturn:
    """Run `command` while the process `parent`, which started this one, lives."""
    signal.signal(signal.SIGTERM, _end_all)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        _end_all()
    process = os.posix_spawn(command[0], command, os.environ)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_all(*_: Any) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
