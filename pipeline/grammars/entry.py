"""What a `Worker`'s process does first. Run as a script, with the number of its socket, a title, a dotted module, and
what that is to be told."""

import sys

PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> None:
    """Have this process killed when its parent is no more. A fork does not inherit that."""
    import ctypes
    import os
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def main(socket_fd: int, title: str, program: str, args: list[str]) -> None:
    """Run `program.main(socket, *args)`. Ends when the other end of the socket is closed."""
    import importlib
    import os
    import signal
    import socket

    import setproctitle

    # Our maker alone decides when we end: it closes its socket, or is no more.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with(os.getppid())
    setproctitle.setproctitle(title)

    from pipeline.grammars.worker import Gone

    try:
        importlib.import_module(program).main(socket.socket(fileno=socket_fd), *args)
    except Gone:
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    # We were started by our path, so nothing beside it is to be imported by a bare name.
    import importlib.util
    from pathlib import Path

    _path = Path(__file__).resolve().parent.parent / "runtime" / "entry.py"
    _spec = importlib.util.spec_from_file_location("_entry", _path)
    assert _spec is not None and _spec.loader is not None
    _entry = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_entry)
    _entry.adopt_package()
    from pipeline.grammars.entry import main as _main

    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
