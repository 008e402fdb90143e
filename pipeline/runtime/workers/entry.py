"""The entry point of a `Worker`'s process. Run as a script with the number of its socket, a title, a dotted module and
the module's arguments."""

import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends. Forked children do not inherit this."""
    import ctypes
    import os
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main(socket_fd: int, title: str, program: str, args: list[str]) -> None:
    """Run `program.main(socket, *args)`. Returns when the other end of the socket is closed."""
    import importlib
    import os
    import signal
    import socket

    import setproctitle

    # Only the owner ends this process, by closing its socket or by ending itself.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(os.getppid())
    setproctitle.setproctitle(title)

    from pipeline.runtime.workers.worker import WorkerLostError

    try:
        importlib.import_module(program).main(socket.socket(fileno=socket_fd), *args)
    except WorkerLostError:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    # This script was started by its path: keep the files beside it from being imported by a bare name.
    import importlib.util
    from pathlib import Path

    _path = Path(__file__).resolve().parent.parent / "entry.py"
    _spec = importlib.util.spec_from_file_location("_entry", _path)
    assert _spec is not None and _spec.loader is not None
    _entry = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_entry)
    _entry.adopt_package()
    from pipeline.runtime.workers.entry import main as _main

    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
