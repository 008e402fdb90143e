"""The entry point of every stage process, and of the fork server, which forks most of them.

The supervisor runs it as a script with the number of an inherited descriptor: of a pipe with the `Launch`, or, after
`--fork-server`, of a socket for orders."""

import gc
import os
import signal
import sys


def adopt_package() -> None:
    """Make `pipeline` importable from the folder above this file's, without adding a folder to `sys.path`.

    Children run with `python -P`, so neither the current folder, which may have a `config.py`, nor the project's root
    is searched. In the root, `kernels` would shadow the package of that name that transformers imports.
    """
    import importlib.util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "pipeline",
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    # A service manager sends SIGTERM to every process, and a terminal the others. Only the supervisor handles them; it
    # sends `Stop`.
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    # Until the stage runs: what it imports lives as long as the process, so collections would find nothing.
    gc.disable()
    adopt_package()
    from pipeline.runtime import child

    if sys.argv[1] == "--fork-server":
        import socket

        from pipeline.runtime.process import fork_server

        _launch_fd, *_fds = fork_server.serve(socket.socket(fileno=int(sys.argv[2])))
        child.main(_launch_fd, _fds)
    child.main(int(sys.argv[1]))
