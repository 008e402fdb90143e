"""The connections to one server: one to each of its gateways. A request goes to the gateway with the least load."""

import asyncio
import os
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from pipeline.client.client import AsyncClient, ServerInfo
from pipeline.client.connection.slots import Slots
from pipeline.client.connection.zmq_address import others_of
from pipeline.client.embedded.server import EmbeddedServer
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.errors import ServerFailed, StartError, UserError

STARTING_S = 0.02
"""Pause between attempts to connect to a server that is still starting."""
EXIT_S = 2.0
"""Maximum time to wait for the exit of an embedded server that closed its connection, so that the error says why."""
OTHERS_S = 1.0
"""How long the first request waits for the connections to the other gateways. Later ones are used when they are
there."""


class Gateway(NamedTuple):
    """A connection, and the sequences that this process may have open there."""

    client: AsyncClient
    slots: Slots


class Gateways:
    """Connects when a request needs it, and again if a connection was lost. For one event loop."""

    def __init__(
        self,
        address: str,
        server: EmbeddedServer | None,
        timeout_s: float,
        api_key: str | None,
        reconnect_timeout_s: float,
        caller: str,
    ) -> None:
        """`address` is one gateway's. `server` is the embedded server, if it is one. A running one must answer within
        `timeout_s`, and a gateway that is gone within `reconnect_timeout_s`. `caller` is the class name in error
        messages."""
        self._address = address
        self._server = server
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._reconnect_timeout_s = reconnect_timeout_s
        self._caller = caller
        self._closed = False
        self._found: dict[str, Gateway] = {}
        """By address, the given one first."""
        self._connecting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        """Waits for the end of the embedded server."""
        self._others: dict[str, asyncio.Task[None]] = {}
        """Connections that are being made, by address."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner_pid = os.getpid()

    @property
    def is_forked_copy(self) -> bool:
        """Whether this is a copy in a forked process, which can't be used."""
        return os.getpid() != self._owner_pid

    @property
    def info(self) -> ServerInfo:
        """Facts from the given gateway. Raises UserError before it was connected."""
        if self._address not in self._found:
            raise UserError("the server is not ready yet: await `llm.ready()` first")
        return self._found[self._address].client.info

    @property
    def addresses(self) -> list[str]:
        """The gateways that are connected, or connecting again."""
        return [address for address, one in self._found.items() if not one.client.is_lost]

    @property
    def max_open(self) -> int:
        """Maximum number of open sequences of all clients at the gateways that were found. A lost connection counts:
        the next request makes it again."""
        return sum(one.client.info.max_open_requests for one in self._found.values())

    async def pick(self) -> Gateway:
        """The gateway with the least load of this process, first those that are connected now. Connects if there is
        none."""
        await self.connected()
        alive = [one for one in self._found.values() if not one.client.is_lost]
        return min(alive, key=lambda one: (not one.client.is_connected, one.slots.load))

    async def connected(self) -> None:
        """Wait until there is a connection. Raises StartError if the embedded server can't start, ServerFailed if it
        has ended or a running one does not answer."""
        self._check_usable()
        if alive := self.addresses:
            if len(alive) < len(self._found):
                self._connect_others(alive[0])
            return
        if self._connecting is None:
            assert self._loop is not None
            self._connecting = self._loop.create_task(self._connect_all())
            self._connecting.add_done_callback(self._on_connected)
        await asyncio.shield(self._connecting)  # cancelling one waiter must not cancel the others

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for task in (self._connecting, self._watching, *self._others.values()):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, UserError):
                    await task
        for one in self._found.values():
            await one.client.close()

    async def loss_error(self, error: ConnectionLost) -> UserError:
        """The error for requests of a lost connection."""
        if self._closed:
            return ServerFailed(f"this {self._caller} was closed")
        if self._server is not None and await asyncio.to_thread(self._server.wait, EXIT_S):
            return ServerFailed(f"the server has ended: {self._server.reason()}")
        errors = self._server.errors() if self._server is not None else ""
        return ServerFailed(errors or str(error))

    def _check_usable(self) -> None:
        if self._closed:
            raise UserError(f"this {self._caller} is closed")
        if self.is_forked_copy:
            raise UserError(f"this {self._caller} belongs to the parent process and can't be used after a fork")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise UserError("an AsyncLLM works in one event loop: create one for each loop, or use LLM")

    def _on_connected(self, task: "asyncio.Task[None]") -> None:
        self._connecting = None

    async def _connect_all(self) -> None:
        for one in self._found.values():
            await one.client.close()
        client = await (self._attach() if self._server is None else self._connect_to(self._server))
        self._add(self._address, client)
        if self._server is not None and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(self._server))
        self._connect_others(self._address)
        if self._others:
            await asyncio.wait(set(self._others.values()), timeout=OTHERS_S)

    async def _watch(self, server: EmbeddedServer) -> None:
        """Fail all requests when the embedded server has ended: nothing returns at its address."""
        await server.ended()
        for one in self._found.values():
            one.client.give_up(ConnectionLost("the server has ended"))

    def _connect_others(self, address: str) -> None:
        """Begin to connect to the gateways besides the one at `address` that have no connection."""
        info = self._found[address].client.info
        for gateway, other in others_of(address, info.addresses, info.gateway):
            if other in self._others or other in self.addresses:
                continue
            task = asyncio.get_running_loop().create_task(self._connect_other(other, gateway, info))
            self._others[other] = task
            task.add_done_callback(partial(self._end_other, other))

    def _end_other(self, address: str, task: "asyncio.Task[None]") -> None:
        del self._others[address]

    def _add(self, address: str, client: AsyncClient) -> None:
        # All of an embedded server's; half of a shared one's, so that other clients are not refused.
        num = client.info.max_open_requests
        before = self._found.get(address)  # open requests of a lost connection give their slots back
        slots = before.slots if before else Slots(num if self._server is not None else max(1, num // 2))
        self._found[address] = Gateway(client, slots)

    async def _connect_other(self, address: str, gateway: int, info: ServerInfo) -> None:
        """Connect to another gateway of the server. Without it the others do its work."""
        try:
            client = await self._connected_once_started(address, self._timeout_s)
        except (ConnectionLost, RequestError, ValueError):
            return
        if (client.info.addresses, client.info.gateway) != (info.addresses, gateway):  # another server's
            await client.close()
            return
        self._add(address, client)

    async def _attach(self) -> AsyncClient:
        try:
            return await self._client(self._address, self._timeout_s)
        except (ConnectionLost, RequestError) as error:
            raise ServerFailed(f"can't attach: {error}") from error
        except ValueError as error:
            raise UserError(f"address: {error}") from error

    async def _connect_to(self, server: EmbeddedServer) -> AsyncClient:
        """Connect to the embedded server, which may be starting. Raises StartError, or ServerFailed if it had started
        before."""
        limits = server.settings.supervisor
        timeout_s = limits.prepare_timeout_s + 2 * limits.start_timeout_s
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(self._connected_once_started(self._address, timeout_s))
        ended = loop.create_task(server.ended())
        try:
            await asyncio.wait((connecting, ended), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            connecting.cancel()
            await asyncio.wait((connecting,))
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close()
            raise
        finally:
            ended.cancel()
            await asyncio.wait((ended,))
        if connecting.done() and connecting.exception() is None:
            return connecting.result()
        connecting.cancel()
        await asyncio.wait((connecting,))
        if self._found:
            raise ServerFailed(f"the server has ended: {server.reason()}")
        reason = connecting.exception() if server.is_alive else server.reason()
        raise StartError(f"the server can't start: {reason}")

    async def _connected_once_started(self, address: str, timeout_s: float) -> AsyncClient:
        """Connect to a server that may be starting. Raises ConnectionLost or RequestError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while True:
            try:
                return await self._client(address, max(0.0, end - loop.time()))
            except RequestError as error:
                if error.code != "starting" or loop.time() >= end:
                    raise
            await asyncio.sleep(STARTING_S)

    async def _client(self, address: str, timeout_s: float) -> AsyncClient:
        """Connect to one gateway. Raises as `AsyncClient.connect`."""
        return await AsyncClient.connect(
            address, timeout_s=timeout_s, api_key=self._api_key, reconnect_timeout_s=self._reconnect_timeout_s
        )
