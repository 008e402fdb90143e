"""The connection of an `AsyncClient`, and its open requests, which outlive it: on the next connection, each request is
sent again behind what was received.

    connected ──lost──► reconnecting ──welcome──► connected, requests repeated      to this gateway, or to another one
        │                   └── deadline, refusal ──► ended: all requests fail
        └── `failed` by a server that ends: the request waits for the next connection
"""

import asyncio
import itertools
import random
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from pipeline.client import protocol as p
from pipeline.client.connection.connection import FINAL_STATUS, Connection
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import error_of
from pipeline.client.connection.zmq_address import others_of
from pipeline.client.errors import ConnectionLost, ForeignServer, RequestError, RequestTooLarge, is_busy

ATTEMPT_FIRST_S, ATTEMPT_MAX_S = 2.0, 30.0
"""The first and the longest time for an answer to `hello`. A new attempt uses a new socket."""
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 1.0
"""The first and the longest pause after an attempt, and before a request is repeated at a full server."""
ENDING_CODES = ("draining", "shutting_down", "failed", "stage_died")
"""Codes of `failed` from a server that ends."""
ENDING_S = 5.0
"""After `stage_died`, the connection ends within this time if the server does. Else only the request has failed."""


class Session:
    """For one event loop. The owner must call `close` in any case."""

    def __init__(
        self,
        address: str,
        api_key: str | None,
        reconnect_timeout_s: float,
        on_welcome: Callable[[p.Welcome], None],
        model: str | None = None,
    ) -> None:
        """`model` is the one of several that requests are for. `on_welcome` is called at each connection; it may raise
        ConnectionLost."""
        self.address = address
        self._api_key, self._model = api_key, model
        self._reconnect_timeout_s = reconnect_timeout_s
        self._on_welcome = on_welcome
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._encoder = msgspec.msgpack.Encoder()
        self._connection: Connection | None = None
        """None while it is being made."""
        self._welcome: p.Welcome | None = None
        """Of the last connection."""
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        """Requests whose stream is garbage; any thread may append them."""
        self._others: list[str] = []
        """Addresses of the server's other gateways, in case that this one is gone for good."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        """Open requests that no server works on, and what is done next if no connection is made before."""
        self._reconnecting: asyncio.Task[None] | None = None
        self._reconnect_end_s = 0.0
        """Until when requests wait; time.monotonic()."""
        self._lost: Exception | None = None
        self._is_closed = False
        self._asked: dict[int, asyncio.Future[p.SleepState]] = {}
        """Questions about sleep without an answer, by nonce."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, so that requests fail."""
        return self._lost is not None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def open(self, timeout_s: float) -> None:
        """Connect for the first time. Raises as `Connection.open`."""
        await self._connect(timeout_s)

    def next_id(self) -> int:
        return next(self._ids)

    def open_stream(self, request: p.Generate) -> Stream:
        """Send a request, or keep it until the next connection. Raises ConnectionLost or RequestTooLarge."""
        if self._lost is not None:
            raise self._lost
        data = self._encoded(request)
        stream = Stream(self._send, request, partial(self._dropped.append, request.request_id))
        self._streams[request.request_id] = stream
        if self._connection is None:
            self._wait(stream, None)
        else:
            self._connection.send_bytes(data)
        return stream

    async def ask_sleep(self, message: p.SetSleep | p.AskSleep) -> bool:
        """Put the server to sleep, wake it, or ask whether it sleeps; the nonce is set here. Returns whether it sleeps.
        Raises RequestError with the server's reason, ConnectionLost if it does not answer, ValueError if it is too
        old."""
        if self._lost is not None:
            raise self._lost
        if self._connection is None or self._welcome is None:
            raise ConnectionLost(f"there is no connection to {self.address} now")
        if not self._welcome.takes_sleep:
            raise ValueError(f"the server {self._welcome.server} can't be put to sleep over ZeroMQ: it is too old")
        nonce = self.next_id()
        future: asyncio.Future[p.SleepState] = self._loop.create_future()
        self._asked[nonce] = future
        self._connection.send(msgspec.structs.replace(message, nonce=nonce))
        try:
            state = await future
        finally:
            del self._asked[nonce]
        if state.failure is not None:
            raise error_of(state.failure)
        return state.is_sleeping

    def _lose_asked(self, error: ConnectionLost) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)

    def end(self, error: ConnectionLost) -> None:
        """Fail all requests, and make no more connections."""
        if self._lost is not None:
            return
        self._lost = error
        self._lose_asked(error)
        self._stop_waiting()
        for stream in list(self._streams.values()):
            if not stream.is_closed:
                stream.fail(error)

    async def close(self) -> None:
        """End and release everything. The server aborts open requests."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end(ConnectionLost("the client was closed"))
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait((self._reconnecting,))
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        try:
            await asyncio.to_thread(self._context.term)  # waits until the last messages have left
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            self._context.term()

    # -------------------------------------------------------------------------------------------------- connections

    async def _connect(self, timeout_s: float, address: str = "") -> None:
        """Make a connection and use it, to another gateway if an address is given. Raises as `Connection.open`."""
        connection = Connection(
            self._context,
            address or self.address,
            self._api_key,
            self._model,
            on_message=self._handle,
            on_turn=self._abort_dropped,
            on_lost=self._lose,
        )
        try:
            welcome = await connection.open(timeout_s)
            if address in ("", self.address):
                self._others = [other for _, other in others_of(self.address, welcome.addresses, welcome.gateway)]
            self._connected(connection, welcome)
        except BaseException:
            connection.close()
            raise

    def _connected(self, connection: Connection, welcome: p.Welcome) -> None:
        """Use a new connection. Raises ConnectionLost if it has ended already, or for an invalid `welcome`."""
        if connection.is_lost:
            raise ConnectionLost(f"the server at {self.address} closed the connection")
        self._on_welcome(welcome)
        before, self._welcome = self._welcome, welcome
        self._connection = connection
        self._reconnect_end_s = time.monotonic() + self._reconnect_timeout_s
        self._stop_waiting()
        for stream in list(self._streams.values()):
            if stream.is_closed:
                continue
            if before is not None and (before.model, before.vocab_size) != (welcome.model, welcome.vocab_size):
                stream.fail(ConnectionLost(f"the server at {self.address} now serves another model: {welcome.model}"))
            else:
                self._repeat(stream)

    def _lose(self, connection: Connection, error: ConnectionLost, may_return: bool) -> None:
        """A connection has ended."""
        if connection is not self._connection:
            return  # not in use yet: `open` or `_connected` fails
        self._connection = None
        connection.close()
        self._lose_asked(error)
        if not may_return or self._reconnect_timeout_s == 0:
            self.end(error)
            return
        self._stop_waiting()
        self._reconnect_end_s = time.monotonic() + self._reconnect_timeout_s
        for stream in list(self._streams.values()):
            if not stream.is_closed:
                stream.lost(error)
                self._wait(stream, None)
        self._reconnecting = self._loop.create_task(self._reconnect(error))

    async def _reconnect(self, loss: ConnectionLost) -> None:
        """Connect again, or end."""
        attempt_s, pause_s = ATTEMPT_FIRST_S, PAUSE_FIRST_S
        addresses = itertools.cycle([self.address, *self._others])
        while self._lost is None:
            left_s = self._reconnect_end_s - time.monotonic()
            if left_s <= 0:
                self.end(ConnectionLost(f"{loss}, and none answered within {self._reconnect_timeout_s:g} s"))
                return
            try:
                await self._connect(min(attempt_s, left_s), address := next(addresses))
                return
            except ForeignServer as error:
                if address == self.address:
                    self.end(error)
            except RequestError as error:  # a server that starts or ends may accept this client later
                if error.status < FINAL_STATUS and address == self.address:
                    self.end(ConnectionLost(f"{loss}; now it refuses this client: {error.message}"))
            except (ConnectionLost, zmq.ZMQError):  # such as too many open files
                pass
            attempt_s = min(2 * attempt_s, ATTEMPT_MAX_S)
            # Random pauses spread the clients of one server.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    # ----------------------------------------------------------------------------------------------------- requests

    def _encoded(self, request: p.Generate) -> bytes:
        """Raises RequestTooLarge."""
        assert self._welcome is not None
        data, most = self._encoder.encode(request), self._welcome.max_message_bytes
        if len(data) > most:
            raise RequestTooLarge(f"the request has {len(data)} bytes; this server accepts at most {most}")
        return data

    def _repeat(self, stream: Stream) -> None:
        """Send a request again, behind what was received."""
        deadline_s = stream.deadline_s
        if deadline_s is not None and time.monotonic() >= deadline_s:
            stream.expire()
            return
        try:
            data = self._encoded(stream.again())
        except RequestTooLarge as error:  # by the ids that were received
            stream.fail(ConnectionLost(f"the request can't be continued: {error}"))
            return
        assert self._connection is not None
        self._connection.send_bytes(data)

    def _send(self, message: p.Abort | p.Credit) -> bool:
        """Send a message of a stream. Returns False if no server works on its request now."""
        if self._connection is None or message.request_id in self._waiting:
            if isinstance(message, p.Abort):
                self._stop_waiting(message.request_id)
            return False
        self._connection.send(message)
        return True

    def _abort_dropped(self) -> None:
        """Abort requests whose stream is garbage."""
        while self._dropped:
            request_id = self._dropped.popleft()
            self._stop_waiting(request_id)
            if self._connection is not None:
                self._connection.send(p.Abort(request_id))

    def _handle(self, message: p.ServerMessage) -> None:
        if isinstance(message, p.SleepState):
            if (future := self._asked.get(message.nonce)) is not None and not future.done():
                future.set_result(message)
            return
        assert isinstance(message, p.Accepted | p.Delta | p.Finished | p.Failed)
        stream = self._streams.get(message.request_id)
        if stream is None or stream.is_closed:
            return
        if isinstance(message, p.Failed) and self._is_kept(stream, message.failure):
            return
        try:
            stream.handle(message)
        except ConnectionLost as error:
            self._send(p.Abort(message.request_id))
            stream.fail(error)

    def _is_kept(self, stream: Stream, failure: p.Failure) -> bool:
        """Whether a request that failed is repeated: on the next connection if this server ends, or on this one if it
        had been accepted before, and there is no room for it now."""
        now_s = time.monotonic()
        if self._reconnect_timeout_s and failure.code in ENDING_CODES:
            if not stream.settle():
                wait_s = self._reconnect_timeout_s if failure.code != "stage_died" else ENDING_S
                self._wait(stream, error_of(failure), min(wait_s, self._reconnect_timeout_s))
            return True
        if stream.is_repeated and is_busy(failure.code, failure.retry_after_s) and now_s < self._reconnect_end_s:
            if not stream.settle():
                pause_s = min(failure.retry_after_s or PAUSE_FIRST_S, PAUSE_MAX_S) * random.uniform(0.5, 1.0)
                handle = self._loop.call_later(pause_s, self._repeat_waiting, stream.request_id)
                self._waiting[stream.request_id] = handle
            return True
        return False

    def _wait(self, stream: Stream, error: Exception | None, timeout_s: float = 0.0) -> None:
        """Keep a request until the next connection, at most to its deadline. With an error, it fails with this error
        after `timeout_s`."""
        now_s = time.monotonic()
        left_s = None if stream.deadline_s is None else stream.deadline_s - now_s
        if stream.is_closed or (left_s is None and error is None):
            return
        if error is not None and (left_s is None or timeout_s < left_s):
            handle = self._loop.call_later(timeout_s, self._fail_waiting, stream.request_id, error)
        else:
            assert left_s is not None
            handle = self._loop.call_later(max(left_s, 0.0), self._expire_waiting, stream.request_id)
        self._waiting[stream.request_id] = handle

    def _stop_waiting(self, *request_ids: int) -> None:
        """Cancel the timers of these requests, or of all."""
        for request_id in request_ids or list(self._waiting):
            if (handle := self._waiting.pop(request_id, None)) is not None:
                handle.cancel()

    def _repeat_waiting(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if (stream := self._streams.get(request_id)) is not None and not stream.is_closed:
            self._repeat(stream)

    def _fail_waiting(self, request_id: int, error: Exception) -> None:
        self._waiting.pop(request_id, None)
        if (stream := self._streams.get(request_id)) is not None and not stream.is_closed:
            stream.fail(error)

    def _expire_waiting(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)
        if (stream := self._streams.get(request_id)) is not None and not stream.is_closed:
            stream.expire()
