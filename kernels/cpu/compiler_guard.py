"""Runs a compiler, and ends all its processes when the process that wants the library ends, however it does.

A compiler is several processes: if only its first one is killed, the others compute on for a minute. Run as
a script, in a process group of its own, with the process that waits, by how much the compiler is nicer than it, and the
command. It ends as the compiler does.
"""

import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
EXIT_CANT_RUN = 127
"""As of a shell."""


def main(parent: int, niceness: int, command: list[str]) -> NoReturn:
    """Run `command` while the process `parent`, which started this one, lives. Only the command gets the lower
    priority: with it, this process would end the command too late on a busy machine."""
    signal.signal(signal.SIGTERM, _end_all)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        _end_all()
    process = os.fork()
    if process == 0:
        try:
            os.nice(niceness)
            os.execv(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(EXIT_CANT_RUN)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_all(*_: Any) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
