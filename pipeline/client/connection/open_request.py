"""One open request of an `AsyncLLM`: waiting for a slot, retries, collected output, and its end."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import NamedTuple

from pipeline.client.client import AsyncClient
from pipeline.client.connection.slots import Slots
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import ConnectionLost, RequestError, RequestTooLarge, is_busy
from pipeline.client.inputs.prompts import CheckedPrompt
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.logprobs import Logprob, num_logprobs
from pipeline.client.outputs import CompletionOutput, OutputKind, RequestOutput, RequestStateStats
from pipeline.client.request_metrics import metrics_of
from pipeline.errors import PromptError, ServerFailed, UserError

TIMED_OUT = "timeout"
"""The error code of a request that timed out without output."""
BUSY_FIRST_S, BUSY_MAX_S = 0.02, 1.0
"""The first pause between attempts, unless the server suggests one, and the longest. The server's suggestion is only an
estimate."""
BUSY_TIMEOUT_S = 600.0
"""Maximum time of attempts at a server that is busy with other clients."""


class RequestParts(NamedTuple):
    """What a request is made of, besides its prompt."""

    name: str
    caller_id: str | None
    """The name, if the caller chose it; it is then sent to the server."""
    client: AsyncClient
    slots: Slots


class OpenRequest:
    """One request. The owner must call `close` in any case.

    open() ──► more(), output(), more(), output() … ──► close()
       waits for slots, then for the server                aborts open sequences
    """

    def __init__(
        self,
        name: str,
        caller_id: str | None,
        client: AsyncClient,
        slots: Slots,
        prompt: CheckedPrompt,
        params: SamplingParams,
        loss_error: Callable[[ConnectionLost], Awaitable[UserError]],
        options: RequestOptions,
        *,
        has_metrics: bool = False,
    ) -> None:
        """The first four are `RequestParts`. `loss_error` returns the error to raise for a lost connection. With
        `has_metrics`, the last output has the request's metrics."""
        self.name = name
        self.prompt_ids: list[int] = []
        self._client = client
        self._slots = slots
        self._has_metrics = has_metrics
        self._prompt = prompt
        self._params = params
        # A prompt's own salt has precedence over the batch's.
        self._options = options._replace(cache_salt=prompt.cache_salt or options.cache_salt)
        self._caller_id = caller_id
        self._loss_error = loss_error
        self._num_slots = 0
        self._stream: Stream | None = None
        self._outputs = [self._empty_output(index) for index in range(params.n)]
        self._deltas: list[CompletionOutput] = []
        self._is_aborted = False
        self._has_reported_abort = False
        """Whether `more` has reported the end of a request without output."""
        self._num_cached: int | None = None
        self._metrics: RequestStateStats | None = None
        self._waiting: asyncio.Timeout | None = None

    async def open(self) -> None:
        """Wait until the server accepts the request or it is aborted. Raises PromptError or ServerFailed."""
        async with self._as_user_errors():
            try:
                async with self._abortable():
                    await self._slots.take(self._params.num_sequences)
                    self._num_slots = self._params.num_sequences
                await self._send_until_accepted()
            except _Aborted:
                pass

    async def more(self) -> int | None:
        """Wait for new output, which `output` then returns. Returns the number of new ids, or None at the end.

        Raises PromptError or ServerFailed.
        """
        if self._stream is None:
            return self._end_without_output()
        async with self._as_user_errors():
            try:
                outputs = await self._stream.take()
            except RequestError as error:
                if error.code != TIMED_OUT:
                    raise
                self._stream = None
                return self._end_without_output()
        if not outputs:
            return None
        self._add(outputs)
        if all(one.finished() for one in self._outputs):
            with suppress(RequestError, ConnectionLost):  # the output is complete anyway
                await self._stream.closed()  # the next message has num_cached_tokens
            self._num_cached = self._stream.num_cached_tokens
            if self._stream.timings is not None:
                self._metrics = metrics_of(self._stream.timings)
        return sum(len(output.token_ids) for output in outputs)

    def output(self, kind: OutputKind) -> RequestOutput:
        """The output of the last `more` if `kind` is delta, otherwise all output so far."""
        sequences = self._deltas if kind == "delta" else self._outputs
        outputs = [
            CompletionOutput(
                one.index,
                one.text,
                list(one.token_ids),
                one.finish_reason,
                one.stop_reason,
                None if one.logprobs is None else list(one.logprobs),
                self._outputs[one.index].cumulative_logprob,
            )
            for one in sequences
        ]
        finished = all(one.finished() for one in self._outputs)
        return RequestOutput(
            self.name,
            self._prompt.text,
            list(self.prompt_ids),
            outputs,
            finished,
            self._num_cached if finished else None,
            self._prompt_logprobs(),
            self._metrics if finished else None,
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The prompt's log probabilities, if all are known."""
        known = None if self._stream is None else self._stream.prompt_logprobs
        return list(known) if known is not None and len(known) == len(self.prompt_ids) else None

    def abort(self) -> None:
        """Abort the request. Its last output has `finish_reason="abort"`."""
        self._is_aborted = True
        if self._stream is not None:
            self._stream.abort()
        elif self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Abort the request if it is open, and release its slots."""
        if self._stream is not None:
            self._stream.abort()
        if self._num_slots:
            self._slots.give(self._num_slots)
            self._num_slots = 0

    async def _send_until_accepted(self) -> None:
        """Send the request, and retry while the server is busy."""
        loop = asyncio.get_running_loop()
        end, pause_s = loop.time() + BUSY_TIMEOUT_S, BUSY_FIRST_S
        while True:
            stream = self._send()
            try:
                async with self._abortable():
                    await stream.accepted()
                break
            except RequestError as error:
                if error.code == TIMED_OUT:
                    raise _Aborted from error
                if not is_busy(error.code, error.retry_after_s) or loop.time() + pause_s > end:
                    raise
                if error.retry_after_s is not None:
                    pause_s = min(error.retry_after_s, BUSY_MAX_S)
            except BaseException:
                stream.abort()
                raise
            async with self._abortable():
                # Random pauses spread the retries of waiting requests.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, BUSY_MAX_S)
        self._stream = stream
        self.prompt_ids = stream.prompt_token_ids or []

    def _send(self) -> Stream:
        try:
            return self._opened()
        except RequestTooLarge as error:
            raise PromptError(str(error), status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="body_too_large") from error
        except (TypeError, ValueError) as error:  # such as a lone surrogate in an unchecked field
            raise PromptError(str(error)) from error

    def _opened(self) -> Stream:
        options = self._options._asdict()
        return self._client.generate(
            self._prompt.prompt, self._params, name=self._caller_id, timings=self._has_metrics, **options
        )

    @asynccontextmanager
    async def _abortable(self) -> AsyncIterator[None]:
        """Run the body, and raise _Aborted if `abort` is called."""
        try:
            async with asyncio.timeout(0 if self._is_aborted else None) as self._waiting:
                yield
        except TimeoutError:
            raise _Aborted from None
        finally:
            self._waiting = None
        if self._is_aborted:
            raise _Aborted

    @asynccontextmanager
    async def _as_user_errors(self) -> AsyncIterator[None]:
        """Convert errors of the connection to PromptError and ServerFailed."""
        try:
            yield
        except RequestError as error:
            if error.status >= 500:
                raise ServerFailed(error.message) from error
            raise PromptError(error.message, status=error.status, code=error.code) from error
        except ConnectionLost as error:
            raise await self._loss_error(error) from error

    def _end_without_output(self) -> int | None:
        """Report, once, the end of a request that was aborted before it was sent, or that timed out without output."""
        if self._has_reported_abort:
            return None
        self._has_reported_abort = True
        for one in self._outputs:
            one.finish_reason = "abort"
        self._deltas = self._outputs
        return 0

    def _empty_output(self, index: int) -> CompletionOutput:
        if num_logprobs(self._params) is None:
            return CompletionOutput(index, "", [])
        return CompletionOutput(index, "", [], logprobs=[], cumulative_logprob=0.0)

    def _add(self, outputs: list[OutputDelta]) -> None:
        deltas: dict[int, CompletionOutput] = {}
        for output in outputs:
            for one in (
                self._outputs[output.index],
                deltas.setdefault(output.index, self._empty_output(output.index)),
            ):
                one.text += output.text
                one.token_ids += output.token_ids
                if one.logprobs is not None and one.cumulative_logprob is not None and output.logprobs:
                    one.logprobs += output.logprobs
                    own = zip(output.logprobs, output.token_ids, strict=False)
                    one.cumulative_logprob += sum(each[token_id].logprob for each, token_id in own)
                one.finish_reason = output.finish_reason
                one.stop_reason = output.stop_reason
        self._deltas = list(deltas.values())


class _Aborted(Exception):
    """A request was aborted before it was accepted, or it timed out without output."""
