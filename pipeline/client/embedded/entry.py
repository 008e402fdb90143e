"""The entry point of an embedded server. `server.py` runs it as a script with the number of an inherited descriptor
that holds an `EmbeddedLaunch`.

It runs the same supervisor as `pipeline serve`. In addition it watches its owner process, and ends when the owner ends,
for any reason.
"""

import os
import select
import sys
import threading
from typing import TYPE_CHECKING

from pipeline.cli.complain import complain

if TYPE_CHECKING:
    from pipeline.supervisor.admin.admin_client import Admin as Admin

EXIT_USAGE = 2
EXIT_ORPHANED = 4


def admin_of(pid: int) -> "Admin | None":
    """A connection to the admin socket of the embedded server with this pid; None if it has none any more. It is here
    because this file knows the supervisor."""
    from pipeline.supervisor.admin.admin_client import Admin, find_servers

    return next((Admin(name) for name in find_servers() if name.partition("-")[0] == str(pid)), None)


def main(launch_fd: int) -> int:
    """Serve until a stop signal. Returns the exit code of `pipeline serve`."""
    import msgspec
    import setproctitle

    from pipeline.client.embedded.server import EmbeddedLaunch

    with open(launch_fd, "rb") as file:
        launch = msgspec.msgpack.decode(file.read(), type=EmbeddedLaunch)
    _die_with_owner(launch.owner_fd, launch.death_fd)
    setproctitle.setproctitle("pipeline: supervisor.0")

    from pipeline.config.load import ConfigError
    from pipeline.runtime.security.api_keys import Keys
    from pipeline.supervisor.serve import serve

    try:
        return serve(launch.settings, keys=Keys.unpacked(launch.keys) if launch.keys else None)
    except (ConfigError, OSError) as error:  # the message is for the user
        complain("pipeline", error)
        return EXIT_USAGE


def _die_with_owner(owner_fd: int, death_fd: int) -> None:
    """End at once when the owner ends.

    `owner_fd` is its pidfd. `death_fd` is the read end of a pipe whose write end it holds; forked children of the owner
    may keep that open. A parent-death signal would come too early: the kernel sends it when the *thread* that started
    this process ends.
    """
    poll = select.poll()
    for fd in (owner_fd, death_fd):
        poll.register(fd, select.POLLIN)

    def watch() -> None:
        poll.poll()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="owner", daemon=True).start()


if __name__ == "__main__":
    # This script was started by its path: keep the files beside it from being imported by a bare name.
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
