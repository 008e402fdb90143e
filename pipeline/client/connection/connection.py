"""One ZeroMQ connection to a gateway, from `hello` to its end. pipeline.client.connection.session makes the next one.

open() ──hello──► welcome ──► messages, heartbeats ──► on_lost, once
   └── RequestError, ForeignServer, ConnectionLost
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
import zmq

from pipeline.client import protocol as p
from pipeline.client.connection.wire import error_of
from pipeline.client.errors import ConnectionLost, ForeignServer
from pipeline.runtime.security.peer_credentials import NEVER_MS, Monitor, connect_again, problem_of
from pipeline.version import VERSION

LINGER_MS = 200
"""Maximum time for the last messages to leave."""
RETRY_S = 0.05
"""Pause before another try, if no server listens on a Unix socket yet."""
SUSPENDED_S = 3.0
"""A heartbeat that is so late shows that this process was suspended, and perhaps the server too. Its silence counts
from then."""
MAX_TURN_MESSAGES = 256
"""Messages handled in one turn of the event loop, so that other tasks get theirs."""
MIN_HEARTBEAT_S, MAX_SILENCE_S = 0.01, 86_400.0
"""What a server may ask for. A shorter heartbeat would keep a core busy, and a longer silence would never end."""
FINAL_STATUS = 500
"""An `error` below this status, except `silent`, would come again on the next connection."""


class Connection:
    """For one event loop. The owner must call `close` in any case."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        api_key: str | None,
        model: str | None = None,
        *,
        on_message: Callable[[p.ServerMessage], None],
        on_turn: Callable[[], None],
        on_lost: Callable[["Connection", ConnectionLost, bool], None],
    ) -> None:
        """`on_message` gets the messages about requests. `on_turn` is called after messages were handled, and at each
        heartbeat. `on_lost` is called once if the connection ends after `welcome` and before `close`, with the reason
        and whether another connection may be better."""
        self._address = address
        self._api_key, self._model = api_key, model
        self._on_message, self._on_turn, self._on_lost = on_message, on_turn, on_lost
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # The queue is bounded by the number of requests that the caller has opened.
        self._socket.set_hwm(0)
        self._is_ipc = address.startswith("ipc://")
        if self._is_ipc:  # the server's user is checked at each connection, before it gets anything
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._monitor = Monitor(context, self._socket)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[p.ServerMessage] = msgspec.msgpack.Decoder(p.ServerMessage)
        self._welcome: asyncio.Future[p.Welcome] = self._loop.create_future()
        self._heard_s = self._said_s = time.monotonic()
        self._heartbeat: asyncio.Task[None] | None = None
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        return self._is_lost or self._socket.closed

    async def open(self, timeout_s: float) -> p.Welcome:
        """Connect. Raises ConnectionLost if no server answers within `timeout_s`, ForeignServer if a process of another
        user listens on a Unix socket, RequestError if the server refuses this client, ValueError for an invalid
        address."""
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise ValueError(
                f"{self._address!r} is not a ZeroMQ address: {error.strerror}; the server's log has it, as zmq=…"
            ) from error
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._wake)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()  # the descriptor is edge-triggered: earlier events do not make it readable
        if not self._is_ipc:
            self._say_hello()
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._welcome
        except TimeoutError:
            raise ConnectionLost(f"no server answered at {self._address} within {timeout_s:g} s") from None
        self._heartbeat = self._loop.create_task(self._beat(welcome.heartbeat_s, welcome.silence_s))
        return welcome

    def send(self, message: p.ClientMessage) -> None:
        """Queue a message, unless the connection is lost."""
        self.send_bytes(self._encoder.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue an encoded message, unless the connection is lost."""
        if not self.is_lost:
            self._said_s = time.monotonic()
            self._socket.send(data, zmq.NOBLOCK)
            self._loop.call_soon(self._wake)  # a send consumes the descriptor's event for received messages

    def close(self) -> None:
        """Release everything. May be called again."""
        if self._socket.closed:
            return
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self.send(p.Bye())
        self._is_lost = True
        self._welcome.cancel()
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._loop.remove_reader(self._monitor.fileno())
        self._monitor.close()
        self._socket.close()

    def _say_hello(self) -> None:
        version = p.PROTOCOL_VERSION
        self.send(p.Hello(version, version, f"pipeline-python/{VERSION}", self._api_key, self._model))

    def _wake(self) -> None:
        """Handle received messages, a bounded number of them."""
        if self._receive(MAX_TURN_MESSAGES) and not self._socket.closed:
            self._loop.call_soon(self._wake)
        self._on_turn()

    def _receive(self, most: int) -> bool:
        """Handle at most this many messages. Returns whether there may be more."""
        for _ in range(most):
            if self.is_lost:
                return False
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._heard_s = time.monotonic()
            try:
                message = self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._lose(ConnectionLost(f"the server at {self._address} does not use this protocol: {error}"), False)
                return False
            self._handle(message)
        return True

    def _handle(self, message: p.ServerMessage) -> None:
        match message:
            case p.Accepted() | p.Delta() | p.Finished() | p.Failed() | p.SleepState():
                self._on_message(message)
            case p.Welcome(heartbeat_s=heartbeat_s, silence_s=silence_s):
                if self._welcome.done():
                    return
                if MIN_HEARTBEAT_S <= heartbeat_s <= silence_s <= MAX_SILENCE_S:
                    self._welcome.set_result(message)
                    return
                error = ConnectionLost(
                    f"the server at {self._address} wants heartbeat_s {heartbeat_s:g} and silence_s {silence_s:g}: "
                    f"they must be {MIN_HEARTBEAT_S:g} to {MAX_SILENCE_S:g}, and the second no shorter"
                )
                self._welcome.set_exception(error)
                self._lose(error, False)
            case p.Error(failure):
                if not self._welcome.done():
                    self._welcome.set_exception(error_of(failure))
                may_return = failure.code == "silent" or failure.status >= FINAL_STATUS
                self._lose(ConnectionLost(f"the server ended the connection: {failure.message}"), may_return)
            case p.Pong():
                pass

    def _watch(self) -> None:
        """See at once that the connection ends. libzmq would reconnect, to a server that does not know our requests."""
        for event, fd in list(self._monitor.take()):
            if event == zmq.EVENT_CONNECTED:
                if self._is_ipc and not self._welcome.done():
                    self._check_user(fd)
            elif self._welcome.done():
                if event == zmq.EVENT_DISCONNECTED:
                    while self._receive(MAX_TURN_MESSAGES):  # earlier messages
                        pass
                    self._lose(ConnectionLost(f"the server at {self._address} closed the connection"))
            elif self._is_ipc:
                self._loop.call_later(RETRY_S, self._connect_again)

    def _check_user(self, fd: int) -> None:
        """Send `Hello` to a server of our own user, and nothing to any other."""
        try:
            problem = problem_of(fd, self._address)
        except OSError:
            return  # it has ended: the next event
        if not problem:
            self._say_hello()
            return
        error = ForeignServer(problem)
        self._welcome.set_exception(error)
        self._lose(error, False)

    def _connect_again(self) -> None:
        if not self._socket.closed and not self._welcome.done():
            connect_again(self._socket, self._address)
            self._loop.call_soon(self._watch)

    async def _beat(self, heartbeat_s: float, silence_s: float) -> None:
        """Send pings, and check that the server is alive."""
        now = time.monotonic()
        while not self._is_lost:
            due_s = now + heartbeat_s / 2
            await asyncio.sleep(heartbeat_s / 2)
            asked_s = self._said_s
            self._wake()
            now = time.monotonic()
            if now - due_s > SUSPENDED_S:
                self._heard_s = now
            if now - min(self._said_s, self._heard_s) >= heartbeat_s / 2:
                self.send(p.Ping())
            if now - self._heard_s > silence_s and asked_s - self._heard_s > heartbeat_s:
                self._lose(ConnectionLost(f"the server at {self._address} has sent nothing for {silence_s:g} s"))

    def _lose(self, error: ConnectionLost, may_return: bool = True) -> None:
        """The server is gone: stop libzmq from reconnecting, and report it."""
        if self.is_lost:
            return
        self._is_lost = True
        with contextlib.suppress(zmq.ZMQError):  # it has stopped by itself
            self._socket.disconnect(self._address)
        self._on_lost(self, error, may_return)
