"""Accepts connections. Each begins, and makes its TLS handshake, in turns that are fair to addresses.

    kernel ──accept──► Arrival ──has sent something, its turn──► HttpConnection
                                                      └─TLS────► Handshake ──each of its reads: a turn──┘

A connection costs more than a request, and a handshake up to 10 ms of asymmetric cryptography for a few hundred bytes,
which a client can copy. Without turns, hundreds that come at once would have all of it before anybody else.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from pipeline.http_server.sockets.connections import HttpConnections
from pipeline.http_server.sockets.read_steps import STEP_BYTES, read_in_steps
from pipeline.http_server.sockets.receive_turns import ReceiveTurns
from pipeline.http_server.sockets.wrong_scheme import WrongScheme
from pipeline.runtime.security.client_address import address_of

ACCEPT_S = 0.002
"""No connection is accepted after this time of a turn of the loop: about 100 are."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MOST_EARLY_BYTES = 64 * 1024
MAX_UNTAKEN_BYTES = 256 * 1024
"""Bytes besides data that a client over TLS may send while it takes nothing. Each update of the keys may ask for one of
the server's, which memory keeps until then."""


class Accepted(Protocol):
    """What a connection becomes: an asyncio.Protocol."""

    raw: asyncio.Transport | None
    """The transport whose reading takes turns, if it is not its own."""
    receive: Callable[[], None] | None
    """Reads from it, if it has to be asked."""
    num_read: int
    """As of Receiver; that of its own data is set by `data_received`."""

    @property
    def is_paused(self) -> bool:
        """Whether it wants no more data now."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def wait_turn(self) -> None:
        """It was read: wait for the next turn."""


class Arrivals:
    """Accepts the connections of one listener. It owns the listening socket, and connections until they begin."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Accepted],
        connections: HttpConnections,
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        """Start to accept. A connection has `timeout_s` to send something, and as long for its handshake."""
        self._loop = asyncio.get_running_loop()
        self._listener, self._make, self._tls = listener, make, tls
        self._connections = connections
        self._timeout_s = timeout_s
        self._wrong_scheme = WrongScheme(tls is not None)
        self._waiting: set[Arrival] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Connections that begin: until they have a transport, and their handshake is over."""
        self._handshakes: set[Handshake] = set()
        self._has_ended = False
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        """Makes room to close a connection, when no descriptor is left. -1 if it could not be opened again."""
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    @property
    def _turns(self) -> ReceiveTurns:
        return self._connections.turns if self._tls is None else self._connections.handshake_turns

    def close(self) -> None:
        """Accept no more. What was accepted goes on. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._close_spare()

    async def end(self) -> None:
        """Close, and end what has not begun."""
        self.close()
        for arrival in list(self._waiting):
            arrival.end()
        self._has_ended = True
        for handshake in self._handshakes:
            handshake.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> None:
        end_s = time.monotonic() + ACCEPT_S
        while not self._is_closed and time.monotonic() < end_s:
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._shed()
                    return
                continue  # the client has left, or its network is down
            if not self._connections.has_room():
                connection.close()
                continue
            connection.setblocking(False)
            self._waiting.add(arrival := Arrival(self, connection, address_of(peer)))
            self._connections.add(arrival)
            self._turns.wait(arrival)

    def _shed(self) -> None:
        """Close connections that wait for a descriptor, else the loop would spin."""
        self._close_spare()
        with contextlib.suppress(OSError):
            for _ in range(64):
                self._listener.accept()[0].close()
        with contextlib.suppress(OSError):  # a thread, or another process, took it: there is none until the next time
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def late(self, arrival: "Arrival") -> asyncio.TimerHandle:
        return self._loop.call_later(self._timeout_s, arrival.end)

    def begin(self, arrival: "Arrival") -> None:
        self.forget(arrival)
        if self._wrong_scheme.is_refused(arrival.socket):
            arrival.socket.close()
            return
        task = self._loop.create_task(self._begin(arrival.socket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, arrival: "Arrival") -> None:
        self._waiting.discard(arrival)
        self._turns.remove(arrival)
        self._connections.remove(arrival)

    async def _begin(self, connection: socket.socket) -> None:
        handshake = None if self._tls is None else Handshake(self._make, self._connections, self._tls, self._timeout_s)
        try:
            protocol: Any = handshake or self._make()
            await self._loop.connect_accepted_socket(lambda: protocol, connection)
        except OSError:  # the client has left
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        if handshake is not None:
            self._handshakes.add(handshake)
            if self._has_ended:
                handshake.end()
            await handshake.wait()
            self._handshakes.discard(handshake)


class Arrival:
    """An accepted connection that has sent nothing yet, or waits for its turn."""

    is_idle = True
    is_kept_alive = False
    num_read = 0

    def __init__(self, owner: Arrivals, connection: socket.socket, address: str) -> None:
        self._owner = owner
        self.socket = connection
        self.descriptor = connection.fileno()
        self.address = address
        self._timer = owner.late(self)

    def go_on(self) -> None:
        self._timer.cancel()
        self._owner.begin(self)

    def end(self) -> None:
        self._timer.cancel()
        self._owner.forget(self)
        self.socket.close()


class _First(asyncio.Protocol):
    """Keeps what comes together with the last part of a handshake: one read at most."""

    def __init__(self) -> None:
        self.data = bytearray()

    def data_received(self, data: bytes) -> None:
        self.data += data


class Handshake(asyncio.BufferedProtocol):
    """Stands between the transport of a connection and its TLS protocol, so that its reads take turns: those of the
    handshake among handshakes, later ones as those of every connection. It reads the socket itself, in steps."""

    is_idle = True
    """As long as it lasts."""
    is_kept_alive = False
    num_read = 0

    def __init__(
        self, make: Callable[[], Accepted], connections: HttpConnections, tls: ssl.SSLContext, timeout_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._make, self._connections, self._tls, self._timeout_s = make, connections, tls, timeout_s
        self._protocol: Accepted | None = None
        """When the handshake has succeeded."""
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.BufferedProtocol | None = None
        """The TLS protocol of asyncio or uvloop, when it has begun."""
        self._early = bytearray(_MOST_EARLY_BYTES)
        self._num_early = 0
        """Bytes that arrived before it."""
        self._is_over = False
        self._is_full = False
        """The client does not take what is sent to it."""
        self._num_untaken = 0
        """Bytes besides data that have arrived since."""
        self._task: asyncio.Task[None] | None = None
        self.address = ""
        self.descriptor = -1

    async def wait(self) -> None:
        """Until the handshake has succeeded or failed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "pause_reading")
        self._transport = transport  # type: ignore[assignment] # uvloop's has another base class
        self.address = address_of(transport.get_extra_info("peername"))
        self.descriptor = transport.get_extra_info("socket").fileno()
        self._connections.add(self)
        self._task = self._loop.create_task(self._shake())
        self._loop.call_soon(self._stand_between)  # between `start_tls` and what it schedules

    async def _shake(self) -> None:
        transport, first = self._transport, _First()
        if transport is None:
            return
        try:
            wrapped = await self._loop.start_tls(
                transport, first, self._tls, server_side=True, ssl_handshake_timeout=self._timeout_s
            )
        except OSError:  # not TLS, no common version, or too late
            transport.abort()
            return
        except BaseException:
            transport.abort()
            raise
        finally:
            self._is_over = True
            self._forget()
        if wrapped is None or self._transport is None or wrapped.is_closing():
            transport.abort()
            return
        self._protocol = self._make()
        self._protocol.raw, self._protocol.receive = transport, self._receive
        wrapped.set_protocol(self._protocol)  # type: ignore[arg-type]
        self._protocol.connection_made(wrapped)
        if first.data:
            self._protocol.data_received(bytes(first.data))
        self._protocol.wait_turn()

    def _stand_between(self) -> None:
        if self._transport is None or (inner := self._transport.get_protocol()) is self:
            return
        assert isinstance(inner, asyncio.BufferedProtocol) or hasattr(inner, "get_buffer")
        self._transport.set_protocol(self)
        self._inner = inner  # type: ignore[assignment]
        self._loop.call_soon(self._feed_early)  # when the TLS protocol has its transport

    def _feed_early(self) -> None:
        early = memoryview(self._early)[: self._num_early]
        while early and self._inner is not None and self._transport is not None:
            buffer = memoryview(self._inner.get_buffer(len(early)))
            num = min(len(early), len(buffer))
            buffer[:num] = early[:num]
            early = early[num:]
            self._inner.buffer_updated(num)
        self._early = bytearray()
        self._wait_turn()

    def _wait_turn(self) -> None:
        if self._protocol is not None:
            self._protocol.wait_turn()
        elif not self._is_over and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._connections.handshake_turns.wait(self)

    def go_on(self) -> None:
        self._receive()

    def _receive(self) -> None:
        if self._transport is None or self._inner is None:
            return
        num_read = read_in_steps(
            self._transport, self._step, lambda: self._protocol is None or self._protocol.is_paused
        )
        if num_read < 0:
            return
        if self._protocol is not None:
            self._protocol.num_read = num_read
        self._wait_turn()

    def _step(self) -> int:
        if num := os.readv(self.descriptor, [self.get_buffer(STEP_BYTES)]):
            self.buffer_updated(num)
        return num

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _forget(self) -> None:
        self._connections.handshake_turns.remove(self)
        self._connections.remove(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._inner is not None:
            return memoryview(self._inner.get_buffer(STEP_BYTES))[:STEP_BYTES]
        return memoryview(self._early)[self._num_early :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._inner is not None:
            if self._protocol is not None:
                self._protocol.num_read = 0
            self._inner.buffer_updated(nbytes)
            self._count_untaken(nbytes)
            self._wait_turn()
        else:
            self._num_early += nbytes
            if self._transport is not None:
                self._transport.pause_reading()

    def _count_untaken(self, num: int) -> None:
        """End the connection if too much has arrived that is no data, and nothing was taken meanwhile."""
        if self._is_full and self._protocol is not None:
            self._num_untaken += max(0, num - self._protocol.num_read)
            if self._num_untaken > MAX_UNTAKEN_BYTES:
                self.end()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else False

    def pause_writing(self) -> None:
        self._is_full = True
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._is_full, self._num_untaken = False, 0
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._forget()
        if self._inner is not None:
            self._inner.connection_lost(exc)
        elif self._task is not None:
            self._task.cancel()
