"""`AsyncClient`: a client of a running server, over ZeroMQ.

    async with await AsyncClient.connect("ipc://@pipeline/8000/zmq") as client:
        async for output in client.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.text, end="")

The wire is pipeline.client.protocol.
"""

from collections.abc import Mapping
from types import TracebackType

import msgspec

from pipeline.client import protocol as p
from pipeline.client.connection.session import Session
from pipeline.client.connection.stream import WINDOW, Stream
from pipeline.client.connection.wire import (
    Prompt,
    Received,
    default_params,
    params_fields,
    pooling_fields,
    prompt_fields,
    received_message,
)
from pipeline.client.errors import ConnectionLost
from pipeline.client.inputs.checks import checked_reconnect_timeout
from pipeline.client.inputs.pooling_params import EMBED, PoolingParams
from pipeline.client.inputs.request_options import checked
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime.security import api_keys

RECONNECT_S = 60.0
"""Default time in which a server that is gone must return."""


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
    tasks: list[str] = []
    """What the model can be asked for, in vLLM's words; empty if the server does not say."""


class AsyncClient:
    """A client of a running server. Created by `connect`; close it when done. For one event loop.

    If the connection is lost, the client connects again and repeats its open requests behind what they have received,
    also at a server that was started again at this address with the same model. Their streams just continue.
    """

    info: ServerInfo
    """Of the last connection."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
        model: str | None = None,
    ) -> None:
        """Use `connect`."""
        self.address = address
        timeout_s = checked_reconnect_timeout(reconnect_timeout_s)
        self._session = Session(address, api_key, timeout_s, self._take_info, model)

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float = 5.0,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
        model: str | None = None,
    ) -> "AsyncClient":
        """Connect to the server whose ZeroMQ address is `address`, such as `ipc://@pipeline/8000/zmq` or
        `tcp://host:port`. At `tcp://` a server may require an API key; the default is PIPELINE_API_KEY in the
        environment. `model` is the one of several models that requests of this client are for, by name or alias; by
        default the server's first one. If it is not loaded, it is, which `timeout_s` must allow.

        If the connection is lost later, the server must answer again within `reconnect_timeout_s`; then all open
        streams raise ConnectionLost. With 0 they do so at once.

        Raises ConnectionLost if no server answers within `timeout_s`, ForeignServer if a process of another user
        listens on a Unix socket, RequestError if the server refuses this client, TypeError or ValueError for an invalid
        address or reconnect_timeout_s.
        """
        key = api_keys.of_client(api_key) if address.startswith("tcp://") else None
        client = cls(address, key, reconnect_timeout_s, model)
        try:
            await client._session.open(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    def _take_info(self, welcome: p.Welcome) -> None:
        """Raises ConnectionLost."""
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
            tasks=welcome.tasks,
        )

    def _default_params(self, defaults: Mapping[str, int | float]) -> SamplingParams:
        """Raises ConnectionLost if they are invalid."""
        try:
            return default_params(defaults)
        except (TypeError, ValueError) as error:
            raise ConnectionLost(f"the server at {self.address} has invalid sampling defaults: {error}") from error

    @property
    def is_lost(self) -> bool:
        """Whether the server is gone for good, or the client is closed; requests then fail."""
        return self._session.is_lost

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now. While there is none, requests wait for the next one."""
        return self._session.is_connected

    def give_up(self, error: ConnectionLost) -> None:
        """Make no more connections: all open streams, and further requests, raise this error."""
        self._session.end(error)

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
        adapter: str | None = None,
    ) -> Stream:
        """Generate from a text, token ids or the messages of a chat.

        With `received`, the request continues after output ids that the caller has already: the same prompt,
        parameters and `Stream.seed` give the output of the uninterrupted stream.

        `name` is the caller's own id, 1 to 256 visible ASCII characters without spaces: it is the end of `Stream.id`,
        appears in the server's log, and works with POST /abort_requests. With `timings`, `Stream.timings` is set at
        the end.

        `priority` (lower goes first) is for servers whose policy is `priority`. Only prompts with the same `cache_salt`
        share cached prefixes. `timeout_s` limits the time from the arrival at the server to the end: open sequences
        then end with `abort`, and a request without output fails with status 504, `timeout`. `adapter` is the name of a
        LoRA adapter of the server.

        Raises ConnectionLost, TypeError or ValueError for an invalid prompt, and RequestTooLarge, which is a
        ValueError. The stream raises RequestError if the server refuses the request.
        """
        params = params or self.info.default_params
        return self._session.open_stream(
            p.Generate(
                request_id=self._session.next_id(),
                request=p.Request(
                    **prompt_fields(prompt),
                    **params_fields(params),
                    timings=bool(timings) or None,
                    **checked(priority, cache_salt, timeout_s, adapter).wire_fields(),
                ),
                credits=WINDOW,
                received=received_message(received, params.n),
                name=_checked_name(name),
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
        adapter: str | None = None,
    ) -> Stream:
        """Compute what the model's pooler makes of a text or token ids: an embedding, unless `params.task` says
        otherwise. The stream has no outputs: await `Stream.embedded()`.

        Raises as `generate` does, and ValueError if the server can't do it over ZeroMQ.
        """
        params = self._pooling_of(params or PoolingParams())
        return self._session.open_stream(
            p.Generate(
                request_id=self._session.next_id(),
                request=p.Request(
                    **prompt_fields(prompt),
                    **pooling_fields(params),
                    **checked(priority, cache_salt, timeout_s, adapter).wire_fields(),
                ),
                credits=0,
                name=_checked_name(name),
            )
        )

    def _pooling_of(self, params: PoolingParams) -> PoolingParams:
        """The parameters as this server understands them. Raises ValueError if it can't do what they ask for."""
        info, task = self.info, params.task or EMBED
        if not info.tasks:  # an older server, which has embeddings of models that generate text
            if task != EMBED or not info.poolings:
                raise ValueError(f"the server {info.server} has no task {task} over ZeroMQ")
            params = msgspec.structs.replace(params, pooling=params.pooling or "last")
        elif task not in info.tasks:
            raise ValueError(f"the model has no task {task}: its tasks are {', '.join(info.tasks)}")
        if params.pooling is not None and params.pooling not in info.poolings:
            known = " or ".join(info.poolings)
            raise ValueError(f"the server {info.server} can't compute this embedding: pooling must be {known}")
        return msgspec.structs.replace(params, task=task if info.tasks else None)

    # ------------------------------------------------------------------------------------------------------------ sleep

    async def sleep(self, *, wake_on_request: bool = False) -> None:
        """Put the server to sleep, if gateway.enable_sleep_mode is set: its executor ends and frees its memory. Open
        requests wait, and go on after `wake_up`. With `wake_on_request`, the next request wakes it.

        Raises RequestError with the reason if it does not sleep, ConnectionLost if the connection ends before the
        answer, and ValueError if the server can't do it over ZeroMQ.
        """
        await self._session.ask_sleep(p.SetSleep(0, True, bool(wake_on_request)))

    async def wake_up(self) -> None:
        """Wake the server. Returns when open requests go on. Raises as `sleep`."""
        await self._session.ask_sleep(p.SetSleep(0, False))

    async def is_sleeping(self) -> bool:
        """Whether the server's executor is away, or about to leave or to come back. Raises as `sleep`."""
        return await self._session.ask_sleep(p.AskSleep(0))

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. The server aborts open requests; their streams raise ConnectionLost."""
        await self._session.close()


def _checked_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    return name
