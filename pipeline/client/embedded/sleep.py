"""Puts an embedded server to sleep and wakes it, through its admin socket, which only its user can reach.

The server of an `LLM` needs no `gateway.enable_sleep_mode` for that: who started it may do with it as they like.
"""

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.client.embedded.server import EmbeddedServer
from pipeline.errors import ServerFailed, UserError

if TYPE_CHECKING:
    from pipeline.client.embedded.entry import Admin

TIMEOUT_S = 600.0
"""How long the executor may take to leave or to come back."""
LEVEL = 1
MODE = "keep"


def sleep(server: EmbeddedServer | None, level: int, mode: str, *, wake_on_request: bool) -> None:
    """Put the server to sleep. Returns when the executor has ended. Blocks. Raises UserError with the reason if it does
    not do that, ServerFailed if it has ended."""
    if isinstance(level, bool) or level != LEVEL:
        why = "the weights are read again from their file, and open requests keep their KV cache"
        raise UserError(f"level must be {LEVEL} ({why}), got {reprlib.repr(level)}")
    if mode != MODE:
        raise UserError(
            f"mode must be {MODE!r} (open requests go on when the server is awake), got {reprlib.repr(mode)}"
        )
    if not isinstance(wake_on_request, bool):
        raise UserError(f"wake_on_request must be True or False, got {reprlib.repr(wake_on_request)}")
    with _admin(server) as admin:
        admin.change_sleep(sleeps=True, wakes_on_request=wake_on_request, timeout_s=TIMEOUT_S)


def wake_up(server: EmbeddedServer | None, tags: Sequence[str] | None) -> None:
    """Wake the server. Returns when steps go on. Blocks, and raises as `sleep`."""
    if tags is not None:
        raise UserError(f"tags must be None, because all is loaded at once, got {reprlib.repr(tags)}")
    with _admin(server) as admin:
        admin.change_sleep(sleeps=False, timeout_s=TIMEOUT_S)


def is_sleeping(server: EmbeddedServer | None) -> bool:
    """Whether the executor is away. Blocks, and raises as `sleep`."""
    with _admin(server) as admin:
        return admin.stats().sleep.is_asleep


def _admin(server: EmbeddedServer | None) -> "Admin":
    """A connection to the admin socket. Raises UserError."""
    from pipeline.client.embedded.entry import admin_of

    if server is None:
        how = "POST /sleep and POST /wake_up, or `pipeline sleep` and `pipeline wake` on its machine"
        raise UserError(f"only a server that this object has started can sleep by this call; for a running one: {how}")
    if admin := admin_of(server.pid):
        return admin
    raise ServerFailed(f"the server has ended: {server.reason()}" if not server.is_alive else "the server is closed")
