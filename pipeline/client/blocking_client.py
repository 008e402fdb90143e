"""`Client`: a client of a running server for blocking programs.

with Client("tcp://127.0.0.1:8001") as client:
    for output in client.generate([{"role": "user", "content": "Hi"}]):
        print(output.text, end="")
"""

import inspect
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from pipeline.client.client import RECONNECT_S, AsyncClient, ServerInfo
from pipeline.client.connection.loop_thread import LoopThread
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import ConnectionLost
from pipeline.client.logprobs import Logprob
from pipeline.client.pooling_outputs import Floats

P = ParamSpec("P")
T = TypeVar("T")


def _parameters_of(
    method: Callable[Concatenate[AsyncClient, P], Stream],
) -> Callable[[Callable[..., T]], Callable[Concatenate["Client", P], T]]:
    """Give a method the parameters of `AsyncClient`'s, for type checkers and for `help`."""

    def decorate(function: Callable[..., T]) -> Callable[Concatenate["Client", P], T]:
        returned = inspect.signature(function).return_annotation
        shown = inspect.signature(method).replace(return_annotation=returned)
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


class Client:
    """`AsyncClient` for blocking programs: a thread holds the connection, and streams are plain iterators."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
        model: str | None = None,
    ) -> None:
        """Connect. The arguments and errors are those of `AsyncClient.connect`."""
        self._thread = LoopThread("pipeline-client")
        connect = AsyncClient.connect(
            address, timeout_s=timeout_s, api_key=api_key, reconnect_timeout_s=reconnect_timeout_s, model=model
        )
        try:
            self._client = self._thread.run(connect)
        except BaseException:
            self._thread.close()
            raise
        self._close = weakref.finalize(self, _close, os.getpid(), self._thread, self._client)

    @property
    def info(self) -> ServerInfo:
        """Facts from the server, of the last connection."""
        return self._client.info

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        timeout_s: float = 5.0,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
    ) -> "Client":
        """The same as the constructor."""
        return cls(address, timeout_s=timeout_s, api_key=api_key, reconnect_timeout_s=reconnect_timeout_s)

    @_parameters_of(AsyncClient.generate)
    def generate(self, *args: Any, **options: Any) -> "BlockingStream":
        """As `AsyncClient.generate`."""

        async def generate() -> Stream:
            return self._client.generate(*args, **options)

        return BlockingStream(self, self._do(generate()))

    @_parameters_of(AsyncClient.embed)
    def embed(self, *args: Any, **options: Any) -> Floats:
        """As `AsyncClient.embed`. Returns the vector: float32 [dimensions], of length 1 (L2)."""

        async def embed() -> Floats:
            return await self._client.embed(*args, **options).embedded()

        return self._do(embed())

    def sleep(self, *, wake_on_request: bool = False) -> None:
        """As `AsyncClient.sleep`."""
        self._do(self._client.sleep(wake_on_request=wake_on_request))

    def wake_up(self) -> None:
        """As `AsyncClient.wake_up`."""
        self._do(self._client.wake_up())

    def is_sleeping(self) -> bool:
        """As `AsyncClient.is_sleeping`."""
        return self._do(self._client.is_sleeping())

    def close(self) -> None:
        """Close the connection; the server aborts open requests. May be called again. Also called at exit, and when the
        client and its streams are garbage."""
        self._close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's thread and wait for it. An interrupt cancels it."""
        if self._thread.is_closed:
            work.close()
            raise ConnectionLost("the client is closed")
        return self._thread.run(work)


def _close(owner_pid: int, thread: LoopThread, client: AsyncClient) -> None:
    """End a `Client`'s connection and thread. A process that was forked from the owner has no such thread."""
    if os.getpid() != owner_pid or thread.is_closed:
        return
    if thread.is_current:  # any thread may collect garbage, and this one can't wait for itself
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
        self._outputs: deque[OutputDelta] = deque()

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """None until the request is accepted; set before the first output."""
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
        """Abort the request. Does nothing if it has ended."""

        async def abort() -> None:
            self._stream.abort()

        self._client._do(abort())

    def accepted(self) -> None:
        """Wait until the server has accepted the request."""
        self._client._do(self._stream.accepted())

    def __iter__(self) -> Iterator[OutputDelta]:
        return self

    def __next__(self) -> OutputDelta:
        if not self._outputs:
            self._outputs.extend(self._client._do(self._stream.take()))
        if not self._outputs:
            raise StopIteration
        return self._outputs.popleft()
