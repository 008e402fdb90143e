"""One open request of an `AsyncLLM`: how it is let in, what has come of it, and how it ends."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from pipeline.client.client import AsyncClient
from pipeline.client.connection.slots import Slots
from pipeline.client.connection.stream import Stream
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import ConnectionLost, RequestError, RequestTooLarge
from pipeline.client.inputs.prompts import CheckedPrompt
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.logprobs import Logprob
from pipeline.client.outputs import CompletionOutput, OutputKind, RequestOutput
from pipeline.errors import PromptError, ServerFailed, UserError

BUSY_CODES = ("overloaded", "starting")
"""What a server says that will take the same request a little later."""
TIMED_OUT = "timeout"
"""What it says of a request whose time is up before it has any output."""
BUSY_FIRST_S, BUSY_MOST_S = 0.02, 1.0
"""Pauses between tries to be let in: the first where the server says nothing, and the longest whatever it says, for
that is an estimate."""
BUSY_TIMEOUT_S = 600.0
"""How long a server may take no request of ours, because others use it up."""


class OpenRequest:
    """A request from its beginning to its end, which is `close`, whatever happens before.

    open() ──► more(), output(), more(), output() … ──► close()
       waits for slots, then to be let in                  aborts what is still open
    """

    def __init__(
        self,
        name: str,
        client: AsyncClient,
        slots: Slots,
        ready: CheckedPrompt,
        params: SamplingParams,
        lost: Callable[[ConnectionLost], Awaitable[UserError]],
        options: RequestOptions,
        *,
        is_own_name: bool = False,
    ) -> None:
        """`lost` finds the user's words for a connection that is lost. `is_own_name` says that the caller chose the
        name, so that the server is to know it too."""
        self.name = name
        self.prompt_ids: list[int] = []
        self._client = client
        self._slots = slots
        self._ready = ready
        self._params = params
        # A prompt's own salt wins over one that is for all of a batch.
        self._options = options._replace(cache_salt=ready.cache_salt or options.cache_salt)
        self._own_name = name if is_own_name else None
        self._lost = lost
        self._num_slots = 0
        self._stream: Stream | None = None
        self._whole = [self._nothing(index) for index in range(params.n)]
        self._news: list[CompletionOutput] = []
        self._is_aborted = False
        self._is_told = False
        """Whether `more` has said that it was ended before any output came."""
        self._num_cached: int | None = None
        self._waiting: asyncio.Timeout | None = None

    async def open(self) -> None:
        """Wait until the server has accepted it, or until it is aborted. Raises PromptError or ServerFailed."""
        async with self._in_words():
            try:
                async with self._abortable():
                    await self._slots.take(self._params.num_sequences)
                    self._num_slots = self._params.num_sequences
                await self._let_in()
            except _Aborted:
                pass

    async def more(self) -> int | None:
        """Wait for news, which `output` then tells. Returns how many ids came, or None where all has been told.

        Raises PromptError or ServerFailed.
        """
        if self._stream is None:
            return self._end_without_output()
        async with self._in_words():
            try:
                outputs = await self._stream.take()
            except RequestError as error:
                if error.code != TIMED_OUT:
                    raise
                self._stream = None
                return self._end_without_output()
        if not outputs:
            return None
        self._take_in(outputs)
        if all(one.finished() for one in self._whole):
            with suppress(RequestError, ConnectionLost):  # all of the output is here
                await self._stream.closed()  # the next message
            self._num_cached = self._stream.num_cached_tokens
        return sum(len(output.token_ids) for output in outputs)

    def output(self, kind: OutputKind) -> RequestOutput:
        """What has come: since the last `more` where `kind` is delta, else all of it."""
        news = self._news if kind == "delta" else self._whole
        outputs = [
            CompletionOutput(
                one.index,
                one.text,
                list(one.token_ids),
                one.finish_reason,
                one.stop_reason,
                None if one.logprobs is None else list(one.logprobs),
                self._whole[one.index].cumulative_logprob,
            )
            for one in news
        ]
        finished = all(one.finished() for one in self._whole)
        return RequestOutput(
            self.name,
            self._ready.text,
            list(self.prompt_ids),
            outputs,
            finished,
            self._num_cached if finished else None,
            self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Those of the prompt, once they are all there."""
        known = None if self._stream is None else self._stream.prompt_logprobs
        return list(known) if known is not None and len(known) == len(self.prompt_ids) else None

    def abort(self) -> None:
        """Have it ended. What comes last then says `finish_reason="abort"`."""
        self._is_aborted = True
        if self._stream is not None:
            self._stream.abort()
        elif self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Abort it if it is open, and give back its slots."""
        if self._stream is not None:
            self._stream.abort()
        if self._num_slots:
            self._slots.give(self._num_slots)
            self._num_slots = 0

    async def _let_in(self) -> None:
        """Have it accepted. A server that others use up is asked again, for a while."""
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
                if error.code not in BUSY_CODES or loop.time() + pause_s > end:
                    raise
                if error.retry_after_s is not None:
                    pause_s = min(error.retry_after_s, BUSY_MOST_S)
            except BaseException:
                stream.abort()
                raise
            async with self._abortable():
                # Of different length, so that those who wait don't all come at once.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, BUSY_MOST_S)
        self._stream = stream
        self.prompt_ids = stream.prompt_token_ids or []

    def _send(self) -> Stream:
        try:
            options = self._options._asdict()
            return self._client.generate(self._ready.prompt, self._params, name=self._own_name, **options)
        except RequestTooLarge as error:
            raise PromptError(str(error), status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE, code="body_too_large") from error
        except (TypeError, ValueError) as error:  # such as a lone surrogate where nobody looked for one
            raise PromptError(str(error)) from error

    @asynccontextmanager
    async def _abortable(self) -> AsyncIterator[None]:
        """A wait that `abort` ends, by raising _Aborted."""
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
    async def _in_words(self) -> AsyncIterator[None]:
        """What the door says is raised as our own errors."""
        try:
            yield
        except RequestError as error:
            if error.status >= 500:
                raise ServerFailed(error.message) from error
            raise PromptError(error.message, status=error.status, code=error.code) from error
        except ConnectionLost as error:
            raise await self._lost(error) from error

    def _end_without_output(self) -> int | None:
        """It was aborted before the server had it, or its time was up before there was any output: that is told
        once."""
        if self._is_told:
            return None
        self._is_told = True
        for one in self._whole:
            one.finish_reason = "abort"
        self._news = self._whole
        return 0

    def _nothing(self, index: int) -> CompletionOutput:
        """What has come of a sequence before anything has."""
        if self._params.logprobs is None:
            return CompletionOutput(index, "", [])
        return CompletionOutput(index, "", [], logprobs=[], cumulative_logprob=0.0)

    def _take_in(self, outputs: list[OutputDelta]) -> None:
        news: dict[int, CompletionOutput] = {}
        for output in outputs:
            for one in (
                self._whole[output.index],
                news.setdefault(output.index, self._nothing(output.index)),
            ):
                one.text += output.text
                one.token_ids += output.token_ids
                if one.logprobs is not None and one.cumulative_logprob is not None and output.logprobs:
                    one.logprobs += output.logprobs
                    own = zip(output.logprobs, output.token_ids, strict=False)
                    one.cumulative_logprob += sum(each[token_id].logprob for each, token_id in own)
                one.finish_reason = output.finish_reason
                one.stop_reason = output.stop_reason
        self._news = list(news.values())


class _Aborted(Exception):
    """A request was aborted before the server had it, or its time was up."""
