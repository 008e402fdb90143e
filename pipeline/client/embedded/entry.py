"""The first process of a server that belongs to another Python process. Run as a script by `server.py`, with the
number of an inherited descriptor that holds an `EmbeddedLaunch`.

From here on it is the supervisor that `pipeline serve` runs. Besides it watches its owner, and ends when that does:
however the owner ended, nothing is left of the server.
"""

import os
import select
import sys
import threading

EXIT_USAGE = 2
EXIT_ORPHANED = 4


def main(launch_fd: int) -> int:
    """Serve until told to stop. Returns the exit code, as `pipeline serve` does."""
    import msgspec
    import setproctitle

    from pipeline.client.embedded.server import EmbeddedLaunch

    with open(launch_fd, "rb") as file:
        launch = msgspec.msgpack.decode(file.read(), type=EmbeddedLaunch)
    _end_with(launch.owner_fd, launch.death_fd)
    setproctitle.setproctitle("pipeline: supervisor.0")

    from pipeline.config.load import ConfigError
    from pipeline.supervisor.serve import serve

    try:
        return serve(launch.settings)
    except (ConfigError, OSError) as error:  # no keys, or the address can't be listened on, in words for the user
        print(f"pipeline: error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _end_with(owner_fd: int, death_fd: int) -> None:
    """End at once when the owner is gone.

    `owner_fd` is its pidfd. `death_fd` is the reading end of a pipe that it holds the other end of: that is closed with
    it too, but only when nobody has it who was forked from it. A death signal would come too soon: the kernel sends it
    when the *thread* ends that started us.
    """
    poll = select.poll()
    for fd in (owner_fd, death_fd):
        poll.register(fd, select.POLLIN)

    def watch() -> None:
        poll.poll()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="owner", daemon=True).start()


if __name__ == "__main__":
    # We were started by our path; nothing else that lies beside it is to be imported by a bare name.
    import importlib.util

    _package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    _path = os.path.join(_package, "runtime", "entry.py")
    _spec = importlib.util.spec_from_file_location("entry", _path)
    assert _spec is not None and _spec.loader is not None
    _entry = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_entry)
    _entry.adopt_package()
    from pipeline.client.embedded.entry import main as _main

    sys.exit(_main(int(sys.argv[1])))
