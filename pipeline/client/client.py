"""Clients of a running server, over ZeroMQ: `AsyncClient`, and `Client`, the same for programs that block.

    async with await AsyncClient.connect("ipc://@pipeline/8000/door") as client:
        async for output in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.text, end="")

    with Client("tcp://127.0.0.1:8001") as client:
        for output in client.generate([{"role": "user", "content": "Hi"}]):
            print(output.text, end="")

The wire is pipeline.client.protocol. A stream grants the server a window of deltas and more as they are read, so what
nobody reads is held back by the server and not piled up here. A stream that nobody holds any more is aborted.
"""

import asyncio
import contextlib
import itertools
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from pipeline.client import protocol as p
from pipeline.client.chat_inputs import reasoning_of, tool_calls_of, unknown_keys
from pipeline.client.logprobs import Logprob, logprobs_of
from pipeline.client.loop_thread import LoopThread
from pipeline.client.request_options import checked
from pipeline.client.sampling_params import SamplingParams
from pipeline.runtime import api_keys
from pipeline.runtime.peer_credentials import NEVER_MS, Monitor, connect_again, problem_of
from pipeline.version import VERSION

T = TypeVar("T")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | p.Prompt
"""A text, token ids, or the messages of a chat: mappings with role, content and perhaps name, tool_calls, tool_call_id
and reasoning; or one as the wire has it."""
Received = Sequence[int] | Sequence[Sequence[int]] | None
"""Output ids that the caller has already: of the one sequence, or of each of n."""

WINDOW = 32
"""Deltas that a stream holds at most; more are granted when half of them have been read."""
LINGER_MS = 200
"""How long the last words of a client may take to leave."""
RETRY_S = 0.05
"""How soon a Unix socket at which no server listens yet is tried again."""
MAX_WAKE_MESSAGES = 256
"""Messages taken in one turn of the loop, so that others have theirs."""


class RequestError(Exception):
    """The server refuses a request, or could not finish it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """An HTTP status."""
        self.message = message
        self.param = param
        """The field to blame."""
        self.code = code
        self.retry_after_s = retry_after_s
        """At status 503: in how many seconds there may be room, as the server expects."""

    def __str__(self) -> str:
        return f"{self.message} (status {self.status})"


class RequestTooLarge(ValueError):
    """A request takes more bytes than the server reads; it was not sent."""


class ConnectionLost(ConnectionError):
    """The server is gone, or says nothing any more. What was open can be resumed elsewhere, with the ids received."""


class ForeignServer(ConnectionLost):
    """Another user's process serves at this Unix socket. It was sent nothing."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What a server says about itself."""

    model: str
    max_model_len: int
    """Longest prompt and output together, in tokens."""
    max_open_requests: int
    """Sequences that may be open at once, of all clients."""
    vocab_size: int
    protocol_version: int
    credits: int
    """Deltas that a request can be granted ahead."""
    server: str
    """Name and version."""
    max_message_bytes: int


class Output(msgspec.Struct, frozen=True):
    """What is new of one sequence."""

    index: int
    """Which of the request's n sequences."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length or abort with the sequence's last output, else None"""
    stop_reason: str | int | None = None
    """The stop string, or the id of stop_token_ids, that ended it."""
    text_offset: int = 0
    """Characters of the sequence's text before this one, those of a resumed request's `received` included."""
    token_offset: int = 0
    """Output ids of the sequence before these, `received` included."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids` its own and those of the likeliest in its place; None where they were not asked for."""


class Stream:
    """One request: an async iterator of `Output`s. Raises RequestError where the server refuses or fails it, and
    ConnectionLost where the server is gone. Made by `AsyncClient.generate`."""

    def __init__(self, client: "AsyncClient", request_id: int, params: p.Params) -> None:
        self.request_id = request_id
        self.prompt_token_ids: list[int] | None = None
        """None until the request is accepted; there before the first output."""
        self.seed: int | None = None
        """The seed that the server drew, or was given; None until accepted. A resumed request needs it."""
        self.num_prompt_tokens: int | None = None
        """Known at the end, as the two that follow."""
        self.num_output_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        """Of the prompt's ids, those that were found in the prefix cache, and not computed; None where no sequence got
        an id."""
        self.id: str | None = None
        """The server's name for it, as `cmpl-…`, in its log and for POST /abort_requests; None until accepted."""
        self.timings: dict[str, Any] | None = None
        """Where its time went, as the field `timings` of a reply over HTTP; known at the end, if it was asked for."""
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """For each of the prompt's ids, as `Output.logprobs`, and None for the first; those that have been read. Where
        they were asked for, all are there at the end."""
        self._num_top, self._prompt_num_top = params.logprobs, params.prompt_logprobs
        self._prompt_pieces: list[bytes] = []
        self._client = client
        self._deltas: deque[p.Delta] = deque()
        self._outputs: deque[Output] = deque()
        self._num_read = 0
        """Deltas read since the last grant."""
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._is_closed = False
        self._when_dropped: weakref.finalize[..., Stream] | None = None
        """Has the request aborted where nobody holds its stream any more."""

    @property
    def is_closed(self) -> bool:
        """Whether the server has nothing more to say; what it said before may still be here to be read."""
        return self._is_closed

    def abort(self) -> None:
        """Have it ended. The last outputs then say `finish_reason="abort"`. Harmless where it has ended already."""
        if not self._is_closed:
            self._client._send(p.Abort(self.request_id))

    async def accepted(self) -> None:
        """Wait until the server has accepted the request: `prompt_token_ids`, `seed` and `id` are there. They stay None
        where it was aborted before."""
        while self.prompt_token_ids is None:
            if self._is_closed and self._error is None:
                return
            await self._change()

    async def closed(self) -> None:
        """Wait until the server has nothing more to say. Raises what it failed with."""
        while not self._is_closed:
            await self._change()
        if self._error is not None:
            raise self._error

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if not await self._read():
                raise StopAsyncIteration
        return self._outputs.popleft()

    async def take(self) -> list[Output]:
        """All outputs that have come since the last time, at least one; an empty list at the end."""
        while not self._outputs and await self._read():
            pass
        while self._deltas:
            await self._read()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    async def _read(self) -> bool:
        """Take the next delta's outputs, waiting for it. Returns False at the end."""
        while not self._deltas:
            if self._is_closed and self._error is None:
                return False
            await self._change()
        delta = self._deltas.popleft()
        self._take_prompt(delta)
        self._outputs.extend(_output(output, self._num_top) for output in delta.outputs)
        self._num_read += 1
        if self._num_read >= WINDOW // 2 and not self._is_closed:
            self._client._send(p.Credit(self.request_id, self._num_read))
            self._num_read = 0
        return True

    def _take_prompt(self, delta: p.Delta) -> None:
        """Log probabilities of further ids of the prompt."""
        if self.prompt_logprobs is None or self._prompt_num_top is None or not delta.prompt_records:
            return
        begin, num_top, named = 1 + delta.prompt_record_offset, self._prompt_num_top, delta.prompt_record_pieces
        pieces: list[bytes] = []
        for place, own in enumerate(self._prompt_pieces[begin:]):
            pieces += [own, *named[place * num_top : (place + 1) * num_top]]
        ids = (self.prompt_token_ids or [])[begin:]
        self.prompt_logprobs += logprobs_of(ids, delta.prompt_records, pieces, num_top)

    async def _change(self) -> None:
        """Wait for news. The client's heartbeat ends the wait where the server is gone."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def _handle(self, message: "p.Accepted | p.Delta | p.Finished | p.Failed") -> None:
        match message:
            case p.Accepted():
                self.prompt_token_ids = unpacked(message.prompt_token_ids)
                self.seed = message.seed
                self.id = message.id or None
                self._prompt_pieces = message.prompt_pieces
                self.prompt_logprobs = None if self._prompt_num_top is None else [None]
            case p.Delta():
                self._deltas.append(message)
            case p.Finished():
                self.num_prompt_tokens = message.num_prompt_tokens
                self.num_output_tokens = message.num_output_tokens
                self.num_cached_tokens = min(message.num_cached_tokens, default=None)
                if message.timings is not None:
                    self.timings = msgspec.json.decode(message.timings, type=dict[str, Any])
                self._close()
            case p.Failed(_, failure):
                self._fail(_error(failure))
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._close()
        self._changed.set()

    def _close(self) -> None:
        self._is_closed = True
        if self._when_dropped is not None:
            self._when_dropped.detach()


class AsyncClient:
    """A connection to a running server; made by `connect`, and to be closed. For one event loop."""

    info: ServerInfo

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """Use `connect`."""
        self.address = address
        self._api_key = api_key
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        # What waits here is what the caller has opened, and bounded by that.
        self._socket.set_hwm(0)
        self._is_ipc = address.startswith("ipc://")
        if self._is_ipc:  # the server's user is looked at first, at each connection
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self._monitor = Monitor(self._context, self._socket)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[p.ServerMessage] = msgspec.msgpack.Decoder(p.ServerMessage)
        self._streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()
        """Requests whose stream nobody holds any more; they are put here by whichever thread collects garbage."""
        self._ids = itertools.count(1)
        self._welcome: asyncio.Future[p.Welcome] = self._loop.create_future()
        self._heard_s = self._said_s = time.monotonic()
        self._heartbeat: asyncio.Task[None] | None = None
        self._lost: Exception | None = None
        self._is_closed = False

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> "AsyncClient":
        """Connect to the server whose door is at `address`, as `ipc://@pipeline/8000/door` or `tcp://host:port`. At
        `tcp://` a server may ask for an API key: by default that of the environment, PIPELINE_API_KEY.

        Raises ConnectionLost where none answers within `timeout_s`, ForeignServer where one of another user listens at
        a Unix socket, RequestError where the server can't take this client, ValueError where `address` is none.
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
            raise ValueError(f"{self.address!r} is no address to connect to: {error.strerror}") from error
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._wake)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._watch()  # what came before is no news to a descriptor
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
        )
        self._heartbeat = self._loop.create_task(self._beat(welcome.heartbeat_s, welcome.silence_s))

    @property
    def is_lost(self) -> bool:
        """Whether the connection is over, so that nothing can be asked any more."""
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

        With `received`, the request goes on behind output ids that the caller has already: the same prompt and
        parameters and the seed that `Stream.seed` said give what the uninterrupted stream would have given.

        `name` is the caller's own for it, 1 to 256 visible ASCII characters without spaces: it ends `Stream.id`, stands
        in the server's log, and POST /abort_requests takes it. With `timings`, `Stream.timings` says at the end where
        the time went.

        `priority`, lower goes first, is for servers whose policy is `priority`. Only prompts with the same `cache_salt`
        share what is computed of them. `timeout_s` is how long it may take from its arrival at the server to its end:
        then what is open ends with `abort`, and a request without any id yet fails with status 504, `timeout`.

        Raises ConnectionLost, TypeError or ValueError for what is no prompt, and TooLarge, which is a ValueError; what
        the server refuses is raised by the stream.
        """
        if self._lost is not None:
            raise self._lost
        if self._is_closed:
            raise ConnectionLost("the client is closed")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string, not {type(name).__name__}")
        params = params or SamplingParams()
        message = p.Generate(
            request_id=next(self._ids),
            model="",
            prompt=_prompt(prompt),
            params=_params(params),
            credits=WINDOW,
            received=_received(received, params.n),
            name=name,
            timings=bool(timings),
            **checked(priority, cache_salt, timeout_s)._asdict(),
        )
        data = self._encoder.encode(message)
        if len(data) > self.info.max_message_bytes:
            raise RequestTooLarge(
                f"the request takes {len(data)} bytes, and this server reads at most {self.info.max_message_bytes}"
            )
        stream = Stream(self, message.request_id, message.params)
        stream._when_dropped = weakref.finalize(stream, self._dropped.append, message.request_id)
        stream._when_dropped.atexit = False
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
        """Close the connection; the server aborts what is open. Open streams raise ConnectionLost."""
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
            await asyncio.to_thread(self._context.term)  # waits for the last words to leave
        except RuntimeError:  # there are no threads to be had any more when the interpreter ends
            self._context.term()

    # ------------------------------------------------------------------------------------------------------ inside

    def _say_hello(self) -> None:
        self._send(p.Hello(p.PROTOCOL_VERSION, p.PROTOCOL_VERSION, f"pipeline-python/{VERSION}", self._api_key))

    def _send(self, message: p.ClientMessage) -> None:
        self._send_bytes(self._encoder.encode(message))

    def _send_bytes(self, data: bytes) -> None:
        """Queue a message. Nothing is said to a server that is gone."""
        if self._lost is None and not self._socket.closed:
            self._said_s = time.monotonic()
            self._socket.send(data, zmq.NOBLOCK)
            self._loop.call_soon(self._wake)  # a send uses up the descriptor's news of what can be received

    def _wake(self) -> None:
        """Take what has come, a while of it."""
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
                self._lose(ConnectionLost(f"the server at {self.address} does not speak this protocol: {error}"))
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
                    stream._handle(message)
            case p.Welcome():
                if not self._welcome.done():
                    self._welcome.set_result(message)
            case p.Error(failure):
                error = _error(failure)
                if not self._welcome.done():
                    self._welcome.set_exception(error)
                self._lose(ConnectionLost(f"the server ended the connection: {failure.message}"))
            case p.Pong():
                pass

    def _watch(self) -> None:
        """A connection that ends is seen at once; libzmq would connect again, to a server that knows nothing of us."""
        for event, fd in list(self._monitor.take()):
            if event == zmq.EVENT_CONNECTED:
                if self._is_ipc and not self._welcome.done():
                    self._check_user(fd)
            elif self._welcome.done():
                if event == zmq.EVENT_DISCONNECTED:
                    self._wake()  # what came before
                    self._lose(ConnectionLost(f"the server at {self.address} closed the connection"))
            elif self._is_ipc:
                self._loop.call_later(RETRY_S, self._connect_again)

    def _check_user(self, fd: int) -> None:
        """Say hello to a server of our own user, and nothing to any other."""
        try:
            problem = problem_of(fd, self.address)
        except OSError:
            return  # it has ended, which is the next event
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
        """Say often enough that this client lives, and see whether the server does."""
        while self._lost is None:
            await asyncio.sleep(heartbeat_s / 2)
            asked_s = self._said_s
            self._wake()
            now = time.monotonic()
            if now - min(self._said_s, self._heard_s) >= heartbeat_s / 2:
                self._send(p.Ping())
            if now - self._heard_s > silence_s and asked_s - self._heard_s > heartbeat_s:
                self._lose(ConnectionLost(f"the server at {self.address} has said nothing for {silence_s:g} s"))

    def _lose(self, error: Exception) -> None:
        """The server is gone; libzmq need not look for it any more."""
        if self._lost is None and not self._socket.closed:
            with contextlib.suppress(zmq.ZMQError):  # it has given up by itself
                self._socket.disconnect(self.address)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """The connection is over: tell every stream."""
        if self._lost is None:
            self._lost = error
            for stream in list(self._streams.values()):
                if not stream.is_closed:
                    stream._fail(error)


class Client:
    """The same for programs that block: a thread of its own holds the connection. Its streams are plain iterators."""

    def __init__(self, address: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> None:
        """Connect. Raises as `AsyncClient.connect`."""
        self._thread = LoopThread("pipeline-client")
        try:
            self._client = self._thread.run(AsyncClient.connect(address, timeout_s=timeout_s, api_key=api_key))
        except BaseException:
            self._thread.close()
            raise
        self._close = weakref.finalize(self, _close, os.getpid(), self._thread, self._client)
        self.info = self._client.info

    @classmethod
    def connect(cls, address: str, *, timeout_s: float = 5.0, api_key: str | None = None) -> "Client":
        """The same as the constructor."""
        return cls(address, timeout_s=timeout_s, api_key=api_key)

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
    ) -> "BlockingStream":
        """As `AsyncClient.generate`."""

        async def generate() -> Stream:
            return self._client.generate(
                prompt,
                params,
                received=received,
                name=name,
                timings=timings,
                priority=priority,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
            )

        return BlockingStream(self, self._do(generate()))

    def close(self) -> None:
        """Close the connection; the server aborts what is open. May be called again; where nobody holds the client and
        its streams any more, and at exit, it is called."""
        self._close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the client's thread and wait for it; an interrupt cancels it."""
        if self._thread.is_closed:
            work.close()
            raise ConnectionLost("the client is closed")
        return self._thread.run(work)


def _close(owner_pid: int, thread: LoopThread, client: AsyncClient) -> None:
    """Give a `Client`'s connection and thread back. In a process that was forked from the owner its thread is not."""
    if os.getpid() != owner_pid or thread.is_closed:
        return
    if thread.is_current:  # garbage is collected in any thread, and this one can't wait for itself
        threading.Thread(target=_close, args=(owner_pid, thread, client), name="pipeline-client-close").start()
        return
    try:
        thread.run(client.close())
    finally:
        thread.close()


class BlockingStream:
    """A `Stream` as an iterator that blocks."""

    def __init__(self, client: Client, stream: Stream) -> None:
        self._client = client
        self._stream = stream
        self._outputs: deque[Output] = deque()

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """None until the request is accepted; there before the first output."""
        return self._stream.prompt_token_ids

    @property
    def seed(self) -> int | None:
        return self._stream.seed

    @property
    def num_prompt_tokens(self) -> int | None:
        return self._stream.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int | None:
        return self._stream.num_output_tokens

    @property
    def num_cached_tokens(self) -> int | None:
        return self._stream.num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As `Stream.prompt_logprobs`."""
        return self._stream.prompt_logprobs

    @property
    def id(self) -> str | None:
        """As `Stream.id`."""
        return self._stream.id

    @property
    def timings(self) -> dict[str, Any] | None:
        """As `Stream.timings`."""
        return self._stream.timings

    def abort(self) -> None:
        """Have it ended. Harmless where it has ended already."""

        async def abort() -> None:
            self._stream.abort()

        self._client._do(abort())

    def accepted(self) -> None:
        """Wait until the server has accepted the request."""
        self._client._do(self._stream.accepted())

    def __iter__(self) -> Iterator[Output]:
        return self

    def __next__(self) -> Output:
        if not self._outputs:
            self._outputs.extend(self._client._do(self._stream.take()))
        if not self._outputs:
            raise StopIteration
        return self._outputs.popleft()


# ------------------------------------------------------------------------------------------------------- to the wire


def packed(ids: Sequence[int]) -> bytes:
    """Ids as the wire has them. Raises TypeError or ValueError for what is no id."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        if all(isinstance(one, int) for one in ids):
            raise ValueError(f"token ids must be from 0 to 2147483647: {error}") from None
        raise TypeError("token ids must be integers") from None


def unpacked(data: bytes) -> list[int]:
    """The ids of a packed array. Bytes behind the last whole id are left out."""
    return list(struct.unpack_from(f"<{len(data) // 4}i", data))


def _output(output: p.Output, num_top: int | None) -> Output:
    ids = unpacked(output.token_ids)
    return Output(
        output.index,
        output.text,
        ids,
        output.finish_reason,
        output.stop_reason,
        output.text_offset,
        output.token_offset,
        None if num_top is None else logprobs_of(ids, output.records, output.pieces, num_top),
    )


def _error(failure: p.Failure) -> RequestError:
    return RequestError(failure.status, failure.message, failure.param, failure.code, failure.retry_after_s)


def _prompt(prompt: Any) -> p.Prompt:
    if isinstance(prompt, p.Prompt):
        return prompt
    if isinstance(prompt, str):
        return p.TextPrompt(prompt)
    if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # a numpy array
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt is a text, token ids or chat messages, not {type(prompt).__name__}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    if all(isinstance(one, Mapping) for one in prompt):
        return p.ChatPrompt([_message(i, one) for i, one in enumerate(prompt)])
    return p.TokensPrompt(packed(prompt))


def _message(place: int, message: Mapping[str, Any]) -> p.ChatMessage:
    at, content, calls = f"messages[{place}]", message.get("content"), message.get("tool_calls")
    if unknown := unknown_keys(message):
        raise TypeError(f"{at} has keys that are not supported: {', '.join(unknown)}")
    fields = {name: message.get(name) for name in ("role", "name", "tool_call_id")}
    fields["reasoning"] = reasoning_of(message)
    for name in fields:
        if not isinstance(fields[name], str) and (name == "role" or fields[name] is not None):
            raise TypeError(f"{at}.{name} must be a string, not {type(fields[name]).__name__}")
    if isinstance(content, (list, tuple)):
        content = [_part(part, f"{at}.content[{j}]") for j, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or not calls):
        raise TypeError(f"{at}.content must be a string, not {type(content).__name__}")
    return p.ChatMessage(content=content, tool_calls=tool_calls_of(calls, f"{at}.tool_calls"), **fields)  # type: ignore[arg-type]


def _part(part: Any, at: str) -> str:
    match part:
        case str(text) | {"type": "text", "text": str(text)}:
            return text
    raise TypeError(f'{at} must be a string or {{"type": "text", "text": "…"}}')


def _params(params: SamplingParams) -> p.Params:
    fields = {name: getattr(params, name) for name in p.Params.__struct_fields__}
    fields["logit_bias"] = {str(token_id): value for token_id, value in (params.logit_bias or {}).items()}
    if params.structured_outputs is not None:
        fields["structured_outputs"] = params.structured_outputs.on_the_wire()
    return p.Params(**fields)


def _received(received: Any, n: int) -> list[bytes]:
    if received is None:
        return []
    each = [received] if n == 1 and not (received and isinstance(received[0], Sequence)) else received
    if len(each) != n:
        raise ValueError(f"received must hold the ids of each of n = {n} sequences, not of {len(each)}")
    return [packed(ids) for ids in each]
