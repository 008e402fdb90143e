"""`AsyncClient`: a client of a running server, over ZeroMQ.

    async with await AsyncClient.connect("ipc://@pipeline/8000/door") as client:
        async for output in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.text, end="")

The wire is pipeline.client.protocol.
"""

import asyncio
import contextlib
import itertools
import time
import weakref
from collections import deque
from functools import partial
from types import TracebackType

import msgspec
import zmq

from pipeline.client import protocol as p
from pipeline.client.connection.stream import WINDOW, Stream
from pipeline.client.connection.wire import (
    Prompt,
    Received,
    default_params,
    error_of,
    params_message,
    prompt_message,
    received_message,
)
from pipeline.client.errors import ConnectionLost, ForeignServer, RequestTooLarge
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.request_options import checked
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import api_keys
from pipeline.runtime.peer_credentials import NEVER_MS, Monitor, connect_again, problem_of
from pipeline.version import VERSION

LINGER_MS = 200
"""Maximum time for the last messages to leave."""
RETRY_S = 0.05
"""Pause before another try, if no server listens on a Unix socket yet."""
MAX_WAKE_MESSAGES = 256
"""Messages handled in one turn of the event loop, so that other tasks get theirs."""


class ServerInfo(msgspec.Struct, frozen=True):
    """Facts that a server sends to its clients."""

    model: str
    max_model_len: int
    """Maximum number of tokens in prompt plus output."""
    max_open_requests: int
    """Maximum number of open sequences of all clients."""
    vocab_size: int
    protocol_version: int
    credits: int
    """Maximum number of deltas that a client can grant ahead."""
    server: str
    """Name and version."""
    max_message_bytes: int
    default_params: SamplingParams = SamplingParams()
    """The parameters of a request that gives none: those that the model recommends. `max_tokens` is 16, or None if the
    model recommends a maximum, which the server then applies."""
    addresses: list[str] = []
    """ZeroMQ addresses of all gateways of the server, as they are bound; empty if the server does not send them."""
    gateway: int = 0
    """Index in `addresses` of the gateway that this client is connected to. `max_open_requests` is its own."""
    poolings: list[str] = []
    """The values of `pooling` for embeddings; empty if the server has no embeddings over ZeroMQ."""


class AsyncClient:
    """A connection to a running server. Created by `connect`; close it when done. For one event loop."""

    info: ServerInfo

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """Use `connect`."""
        self.address = address
        self._api_key = api_key
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # The queue is bounded by the number of requests that the caller has opened.
        self._socket.set_hwm(0)
        self._is_ipc = address.startswith("ipc://")
        if self._is_ipc:  # the server's user is checked at each connection, before it gets anything
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._monitor = Monitor(self._context, self._socket)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[p.ServerMessage] = msgspec.msgpack.Decoder(p.ServerMessage)
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        """Requests whose stream is garbage; any thread may append them."""
        self._ids = itertools.count(1)
        self._welcome: asyncio.Future[p.Welcome] = self._loop.create_future()
        self._heard_s = self._said_s = time.monotonic()
        self._heartbeat: asyncio.Task[None] | None = None
        self._lost: Exception | None = None
        self._is_closed = False

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> "AsyncClient":
        """Connect to the server whose ZeroMQ address is `address`, such as `ipc://@pipeline/8000/door` or
        `tcp://host:port`. At `tcp://` a server may require an API key; the default is PIPELINE_API_KEY in the
        environment.

        Raises ConnectionLost if no server answers within `timeout_s`, ForeignServer if a process of another user
        listens on a Unix socket, RequestError if the server refuses this client, ValueError for an invalid address.
        """
        client = cls(address, api_keys.of_client(api_key) if address.startswith("tcp://") else None)
        try:
            await client._open(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def _open(self, timeout_s: float) -> None:
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ValueError(f"{self.address!r} is not a valid address: {error.strerror}") from error
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._wake)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()  # the descriptor is edge-triggered: earlier events do not make it readable
        if not self._is_ipc:
            self._say_hello()
        try:
            async with asyncio.timeout(timeout_s):
                welcome = await self._welcome
        except TimeoutError:
            raise ConnectionLost(f"no server answered at {self.address} within {timeout_s:g} s") from None
        self.info = ServerInfo(
            model=welcome.model,
            max_model_len=welcome.max_model_len,
            max_open_requests=welcome.max_open_requests,
            vocab_size=welcome.vocab_size,
            protocol_version=welcome.version,
            credits=welcome.max_credits,
            server=welcome.server,
            max_message_bytes=welcome.max_message_bytes,
            default_params=self._default_params(welcome.defaults),
            addresses=welcome.addresses,
            gateway=welcome.gateway,
            poolings=welcome.poolings,
        )
        self._heartbeat = self._loop.create_task(self._beat(welcome.heartbeat_s, welcome.silence_s))

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended; requests then fail."""
        return self._lost is not None or self._is_closed

    # ----------------------------------------------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        received: Received = None,
        name: str | None = None,
        timings: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Generate from a text, token ids or the messages of a chat.

        With `received`, the request continues after output ids that the caller has already: the same prompt,
        parameters and `Stream.seed` give the output of the uninterrupted stream.

        `name` is the caller's own id, 1 to 256 visible ASCII characters without spaces: it is the end of `Stream.id`,
        appears in the server's log, and works with POST /abort_requests. With `timings`, `Stream.timings` is set at
        the end.

        `priority` (lower goes first) is for servers whose policy is `priority`. Only prompts with the same `cache_salt`
        share cached prefixes. `timeout_s` limits the time from the arrival at the server to the end: open sequences
        then end with `abort`, and a request without output fails with status 504, `timeout`.

        Raises ConnectionLost, TypeError or ValueError for an invalid prompt, and RequestTooLarge, which is a
        ValueError. The stream raises RequestError if the server refuses the request.
        """
        params = params or self.info.default_params
        return self._open_stream(
            p.Generate(
                request_id=next(self._ids),
                model="",
                prompt=prompt_message(prompt),
                params=params_message(params),
                credits=WINDOW,
                received=received_message(received, params.n),
                name=_checked_name(name),
                timings=bool(timings),
                **checked(priority, cache_salt, timeout_s)._asdict(),
            )
        )

    def embed(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        *,
        name: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Compute the embedding of a text or token ids. The stream has no outputs: await `Stream.embedded()`.

        Raises as `generate` does, and ValueError if the server has no embeddings over ZeroMQ.
        """
        params = params or PoolingParams()
        if params.pooling not in self.info.poolings:
            known = " or ".join(self.info.poolings)
            why = f"pooling must be {known}" if known else "it has no embeddings over ZeroMQ; use POST /v1/embeddings"
            raise ValueError(f"the server {self.info.server} can't compute this embedding: {why}")
        return self._open_stream(
            p.Generate(
                request_id=next(self._ids),
                model="",
                prompt=prompt_message(prompt),
                params=p.Params(
                    truncate_prompt_tokens=params.truncate_prompt_tokens, truncation_side=params.truncation_side
                ),
                credits=0,
                name=_checked_name(name),
                pooling=params.pooling,
                dimensions=params.dimensions,
                **checked(priority, cache_salt, timeout_s)._asdict(),
            )
        )

    def _open_stream(self, message: p.Generate) -> Stream:
        """Send a request. Raises ConnectionLost or RequestTooLarge."""
        if self._lost is not None:
            raise self._lost
        if self._is_closed:
            raise ConnectionLost("the client is closed")
        data = self._encoder.encode(message)
        if len(data) > self.info.max_message_bytes:
            raise RequestTooLarge(
                f"the request has {len(data)} bytes; this server accepts at most {self.info.max_message_bytes}"
            )
        drop = partial(self._dropped.append, message.request_id)
        stream = Stream(self._send, message.request_id, message.params, drop)
        self._streams[message.request_id] = stream
        self._send_bytes(data)
        return stream

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. The server aborts open requests; their streams raise ConnectionLost."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._send(p.Bye())
        self._end(ConnectionLost("the client was closed"))
        self._welcome.cancel()
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._loop.remove_reader(self._monitor.fileno())
        self._monitor.close()
        self._socket.close()
        try:
            await asyncio.to_thread(self._context.term)  # waits until the last messages have left
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            self._context.term()

    # -------------------------------------------------------------------------------------------------- connection

    def _default_params(self, defaults: p.SamplingDefaults) -> SamplingParams:
        """Raises ConnectionLost if they are invalid."""
        try:
            return default_params(defaults)
        except (TypeError, ValueError) as error:
            raise ConnectionLost(f"the server at {self.address} has invalid sampling defaults: {error}") from error

    def _say_hello(self) -> None:
        self._send(p.Hello(p.PROTOCOL_VERSION, p.PROTOCOL_VERSION, f"pipeline-python/{VERSION}", self._api_key))

    def _send(self, message: p.ClientMessage) -> None:
        self._send_bytes(self._encoder.encode(message))

    def _send_bytes(self, data: bytes) -> None:
        """Queue a message, unless the connection is lost."""
        if self._lost is None and not self._socket.closed:
            self._said_s = time.monotonic()
            self._socket.send(data, zmq.NOBLOCK)
            self._loop.call_soon(self._wake)  # a send consumes the descriptor's event for received messages

    def _wake(self) -> None:
        """Handle received messages, a bounded number of them."""
        if self._socket.closed:
            return
        for _ in range(MAX_WAKE_MESSAGES):
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard_s = time.monotonic()
            try:
                self._handle(self._decoder.decode(data))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._lose(ConnectionLost(f"the server at {self.address} does not use this protocol: {error}"))
                return
        else:
            self._loop.call_soon(self._wake)
        while self._dropped:
            request_id = self._dropped.popleft()
            self._send(p.Abort(request_id))

    def _handle(self, message: p.ServerMessage) -> None:
        match message:
            case p.Accepted() | p.Delta() | p.Finished() | p.Failed():
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    stream.handle(message)
            case p.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case p.Error(failure):
                error = error_of(failure)
                if not self._welcome.done():
                    self._welcome.set_exception(error)
                self._lose(ConnectionLost(f"the server ended the connection: {failure.message}"))
            case p.Pong():
                pass

    def _watch(self) -> None:
        """See at once that a connection ends. libzmq would reconnect, to a server that does not know our requests."""
        for event, fd in list(self._monitor.take()):
            if event == zmq.EVENT_CONNECTED:
                if self._is_ipc and not self._welcome.done():
                    self._check_user(fd)
            elif self._welcome.done():
                if event == zmq.EVENT_DISCONNECTED:
                    self._wake()  # earlier messages
                    self._lose(ConnectionLost(f"the server at {self.address} closed the connection"))
            elif self._is_ipc:
                self._loop.call_later(RETRY_S, self._connect_again)

    def _check_user(self, fd: int) -> None:
        """Send `Hello` to a server of our own user, and nothing to any other."""
        try:
            problem = problem_of(fd, self.address)
        except OSError:
            return  # it has ended: the next event
        if not problem:
            self._say_hello()
            return
        error = ForeignServer(problem)
        self._welcome.set_exception(error)
        self._lose(error)

    def _connect_again(self) -> None:
        if not self._socket.closed and not self._welcome.done():
            connect_again(self._socket, self.address)
            self._loop.call_soon(self._watch)

    async def _beat(self, heartbeat_s: float, silence_s: float) -> None:
        """Send pings, and check that the server is alive."""
        while self._lost is None:
            await asyncio.sleep(heartbeat_s / 2)
            asked_s = self._said_s
            self._wake()
            now = time.monotonic()
            if now - min(self._said_s, self._heard_s) >= heartbeat_s / 2:
                self._send(p.Ping())
            if now - self._heard_s > silence_s and asked_s - self._heard_s > heartbeat_s:
                self._lose(ConnectionLost(f"the server at {self.address} has sent nothing for {silence_s:g} s"))

    def _lose(self, error: Exception) -> None:
        """The server is gone: stop libzmq from reconnecting, and end."""
        if self._lost is None and not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):  # it has stopped by itself
                self._socket.disconnect(self.address)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """The connection has ended: fail every stream."""
        if self._lost is None:
            self._lost = error
            for stream in list(self._streams.values()):
                if not stream.is_closed:
                    stream.fail(error)


def _checked_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    return name
