"""Puts a server to sleep and wakes it: an embedded one through its admin socket, which only its user can reach, another
one over the protocol.

The server of an `LLM` needs no `gateway.enable_sleep_mode` for that: who started it may do with it as they like.
"""

import asyncio
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.client.connection.gateways import Gateways
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.errors import ServerFailed, UserError

if TYPE_CHECKING:
    from pipeline.client.embedded.entry import Admin

TIMEOUT_S = 600.0
"""How long the executor may take to leave or to come back."""
LEVEL = 1
MODE = "keep"


async def sleep(
    gateways: Gateways, server: EmbeddedServer | None, level: int, mode: str, *, wake_on_request: bool
) -> None:
    """Put the server to sleep. Returns when the executor has ended. Raises UserError with the reason if it does not do
    that, ServerFailed if it has ended."""
    if isinstance(level, bool) or level != LEVEL:
        why = "the weights are read again from their file, and open requests keep their KV cache"
        raise UserError(f"level must be {LEVEL} ({why}), got {reprlib.repr(level)}")
    if mode != MODE:
        raise UserError(
            f"mode must be {MODE!r} (open requests go on when the server is awake), got {reprlib.repr(mode)}"
        )
    if not isinstance(wake_on_request, bool):
        raise UserError(f"wake_on_request must be True or False, got {reprlib.repr(wake_on_request)}")
    await _set(gateways, server, sleeps=True, wake_on_request=wake_on_request)


async def wake_up(gateways: Gateways, server: EmbeddedServer | None, tags: Sequence[str] | None) -> None:
    """Wake the server. Returns when steps go on. Raises as `sleep`."""
    if tags is not None:
        raise UserError(f"tags must be None, because all is loaded at once, got {reprlib.repr(tags)}")
    await _set(gateways, server, sleeps=False)


async def is_sleeping(gateways: Gateways, server: EmbeddedServer | None) -> bool:
    """Whether the executor is away. Raises as `sleep`."""
    gateway = await gateways.pick()
    if server is not None:
        return await asyncio.to_thread(_is_asleep, server)
    try:
        return await gateway.client.is_sleeping()
    except (ConnectionLost, RequestError, ValueError) as error:
        raise UserError(str(error)) from error


async def _set(
    gateways: Gateways, server: EmbeddedServer | None, *, sleeps: bool, wake_on_request: bool = False
) -> None:
    gateway = await gateways.pick()
    if server is not None:
        await asyncio.to_thread(_set_embedded, server, sleeps, wake_on_request)
        return
    try:
        await (gateway.client.sleep(wake_on_request=wake_on_request) if sleeps else gateway.client.wake_up())
    except (ConnectionLost, RequestError, ValueError) as error:
        raise UserError(str(error)) from error


def _set_embedded(server: EmbeddedServer, sleeps: bool, wake_on_request: bool) -> None:
    with _admin(server) as admin:
        admin.change_sleep(sleeps=sleeps, wakes_on_request=wake_on_request, timeout_s=TIMEOUT_S)


def _is_asleep(server: EmbeddedServer) -> bool:
    with _admin(server) as admin:
        return admin.stats().sleep.is_asleep


def _admin(server: EmbeddedServer) -> "Admin":
    """A connection to the admin socket. Raises UserError."""
    from pipeline.client.embedded.entry import admin_of

    if admin := admin_of(server.pid):
        return admin
    raise ServerFailed(f"the server has ended: {server.reason()}" if not server.is_alive else "the server is closed")
