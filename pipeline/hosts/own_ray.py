"""A Ray cluster of our own, on this machine: it listens on loopback, and asks for a token that only this user can read.

Everyone who can connect to a Ray cluster can run code in it. By default it listens on all addresses, at about 15 ports.
Ray reads these variables when it is imported, and its processes inherit them.

Ray Serve opens one port of each replica at all addresses whatever is set. It asks for the token too.
"""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN_BYTES = 32
VARIABLES = {
    "RAY_AUTH_MODE": "token",
    # Its processes then listen on 127.0.0.1. `ray.init(_node_ip_address="127.0.0.1")` would take another address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
OTHER_CLUSTER = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Variables by which a user reaches another cluster; the second one would be used instead of the file."""
OPTIONS = {"address": "local", "include_dashboard": False}
"""Of `ray.init`."""


@contextmanager
def environment() -> Iterator[None]:
    """Set up the environment in which `ray.init(**OPTIONS)` starts the cluster. Leave it after `ray.shutdown()`: then
    the token is deleted. Ray must not be imported before."""
    assert "ray" not in sys.modules, "ray has read its environment already"
    folder = Path(tempfile.mkdtemp(prefix="pipeline-ray-"))  # only this user can enter it
    before = {name: os.environ.get(name) for name in (*VARIABLES, TOKEN_PATH, *OTHER_CLUSTER)}
    try:
        token = folder / "token"
        fd = os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        for name in OTHER_CLUSTER:
            os.environ.pop(name, None)
        os.environ.update(VARIABLES | {TOKEN_PATH: str(token)})
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
