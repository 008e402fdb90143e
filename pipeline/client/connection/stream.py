"""One request of an `AsyncClient`: its outputs as an async iterator.

A stream grants the server `WINDOW` deltas, and more as they are read: the server keeps unread output, and it does not
pile up in this process. A stream that is garbage-collected aborts its request.

If the connection is lost, the stream stays open. `again` is the request that continues it on the next connection.
"""

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np

from pipeline.client import protocol as p
from pipeline.client.connection.received import ReceivedOutput
from pipeline.client.connection.wire import OutputDelta, error_of, output_of, packed, unpacked
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.logprobs import Logprob, logprobs_of, num_logprobs
from pipeline.client.pooling_outputs import Floats
from pipeline.client.protocol.conversation import Conversation
from pipeline.client.protocol.generation import GenerationFields
from pipeline.client.protocol.sampling import SamplingFields

WINDOW = 32
"""Maximum number of unread deltas of a stream; more are granted when half of them have been read."""
MAX_LOSSES = 5
"""Connections lost in a row without output from the request, which may be the cause."""
NO_CALLS = tuple(map(p.json_text, ("auto", "none")))
"""Values of tool_choice that require no call. For others, the server derives a grammar from the tools, so that a
repeated request must have them."""
NO_PROMPT = {name: getattr(p.Request(), name) for name in ("prompt", "messages", *Conversation.__annotations__)}
"""What a request has instead if its prompt is ids."""
CONSTRAINTS = tuple(name for name in GenerationFields.__struct_fields__ if name not in SamplingFields.__struct_fields__)
"""Fields that constrain the output."""


class Stream:
    """One request: an async iterator of `OutputDelta`s. Raises RequestError if the server refuses it or fails, and
    ConnectionLost if the server is gone. Created by `AsyncClient.generate`."""

    def __init__(
        self, send: Callable[[p.Abort | p.Credit], bool], request: p.Generate, drop: Callable[[], None]
    ) -> None:
        """`send` is the client's; it returns False if no server works on the request now. `drop` is called when the
        stream is garbage and its request is still open."""
        self.request_id = request.request_id
        self.prompt_token_ids: list[int] | None = None
        """None until the request is accepted; set before the first output."""
        self.seed: int | None = None
        """The request's seed, given or drawn by the server; None until accepted. A resumed request needs it."""
        self.num_prompt_tokens: int | None = None
        """Set at the end; also the next two."""
        self.num_output_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        """Prompt ids that were found in the prefix cache and not computed; None if no sequence got an id."""
        self.id: str | None = None
        """The server's id of the request, as in its log and for POST /abort_requests; None until accepted."""
        self.timings: dict[str, Any] | None = None
        """How long each hop took, as in the field `timings` of an HTTP reply; set at the end, if requested."""
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        """For each of the prompt's ids, as `OutputDelta.logprobs`, and None for the first. Grows as deltas are read, if
        requested; complete at the end."""
        self.embedding: bytes = b""
        """Of a request of `AsyncClient.embed`: float32, little-endian; set at the end."""
        asked = request.request
        self._num_top, self._prompt_num_top = num_logprobs(asked), asked.prompt_logprobs
        self._is_ranked = not asked.logprob_token_ids
        self._prompt_pieces: list[bytes] = []
        self._send = send
        self._deltas: deque[p.Delta] = deque()
        self._outputs: deque[OutputDelta] = deque()
        self._num_read = 0
        """Deltas read since the last credits were sent."""
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._is_closed = False
        self._message, self._request = request, asked
        self._sent_s = time.monotonic()
        self._received = ReceivedOutput(request, self._num_top)
        self._is_aborted = False
        self.is_repeated = False
        """Whether it has been sent again; for the client."""
        self._num_losses = 0
        """Lost connections since the last output."""
        self._finalizer = weakref.finalize(self, drop)
        self._finalizer.atexit = False

    @property
    def is_closed(self) -> bool:
        """Whether the server has sent everything. Outputs may be left to read."""
        return self._is_closed

    def abort(self) -> None:
        """Abort the request. Its last outputs then have `finish_reason="abort"`. Does nothing if it has ended."""
        if not self._is_closed:
            self._is_aborted = True
            if not self._send(p.Abort(self.request_id)):
                self._end_here()

    async def accepted(self) -> None:
        """Wait until the server has accepted the request: `prompt_token_ids`, `seed` and `id` are set. They stay None
        if it was aborted before."""
        while self.prompt_token_ids is None:
            if self._is_closed and self._error is None:
                return
            await self._change()

    async def closed(self) -> None:
        """Wait until the server has sent everything. Raises the error of a request that failed."""
        while not self._is_closed:
            await self._change()
        if self._error is not None:
            raise self._error

    async def embedded(self) -> Floats:
        """Wait for the result: float32, flat, as in `Finished.embedding`. Raises the error of a request that failed."""
        await self.closed()
        return np.frombuffer(self.embedding, "<f4").astype(np.float32)

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._outputs:
            if not await self._read():
                raise StopAsyncIteration
        return self._outputs.popleft()

    async def take(self) -> list[OutputDelta]:
        """Wait for at least one output and return all that are there; an empty list at the end."""
        while not self._outputs and await self._read():
            pass
        while self._deltas:
            await self._read()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    async def _read(self) -> bool:
        """Wait for the next delta and take its outputs. Returns False at the end."""
        while not self._deltas:
            if self._is_closed and self._error is None:
                return False
            await self._change()
        delta = self._deltas.popleft()
        self._take_prompt(delta)
        self._outputs.extend(output_of(output, self._num_top, is_ranked=self._is_ranked) for output in delta.outputs)
        self._num_read += 1
        if self._num_read >= WINDOW // 2 and not self._is_closed:
            self._send(p.Credit(self.request_id, self._num_read))
            self._num_read = 0
        return True

    def _take_prompt(self, delta: p.Delta) -> None:
        """Append the log probabilities of further prompt ids. A repeated request gets all of them again."""
        if self.prompt_logprobs is None or self._prompt_num_top is None or not delta.prompt_records:
            return
        begin, num_top, named = 1 + delta.prompt_record_offset, self._prompt_num_top, delta.prompt_record_pieces
        pieces: list[bytes] = []
        for index, own in enumerate(self._prompt_pieces[begin:]):
            pieces += [own, *named[index * num_top : (index + 1) * num_top]]
        ids = (self.prompt_token_ids or [])[begin:]
        num_known = max(len(self.prompt_logprobs) - begin, 0)
        self.prompt_logprobs += logprobs_of(ids, delta.prompt_records, pieces, num_top)[num_known:]

    async def _change(self) -> None:
        """Wait for the next message. The client's heartbeat ends the wait if the server is gone."""
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def handle(self, message: p.Accepted | p.Delta | p.Finished | p.Failed) -> None:
        """Take a message of the server; for the client. Raises ConnectionLost if the request can't be continued after a
        lost connection; the caller then aborts it."""
        match message:
            case p.Accepted():
                self._accept(message)
            case p.Delta():
                self._num_losses = 0
                self._deltas.append(self._received.new(message))
            case p.Finished():
                self.num_prompt_tokens = message.num_prompt_tokens
                self.num_output_tokens = message.num_output_tokens
                self.num_cached_tokens = min(message.num_cached_tokens, default=None)
                self.embedding = message.embedding
                if message.timings is not None:
                    self.timings = msgspec.json.decode(message.timings, type=dict[str, Any])
                self._close()
            case p.Failed(_, failure):
                self.fail(error_of(failure))
        self._changed.set()

    def _accept(self, message: p.Accepted) -> None:
        """Raises ConnectionLost if a chat's prompt has changed."""
        ids = unpacked(message.prompt_token_ids)
        if self.prompt_token_ids is not None and ids != self.prompt_token_ids:
            raise ConnectionLost(
                f"the request can't be continued: its prompt had {len(self.prompt_token_ids)} ids, and the server now "
                f"makes {len(ids)} other ids of it, for example because the chat template writes the date"
            )
        self.seed = message.seed
        self.id = message.id or None
        if self.prompt_token_ids is None:
            self.prompt_token_ids = ids
            self._prompt_pieces = message.prompt_pieces
            self.prompt_logprobs = None if self._prompt_num_top is None else [None]

    # ----------------------------------------------------------------------------------------- after a lost connection

    @property
    def deadline_s(self) -> float | None:
        """When `timeout_s` is over, counted from the first submission; time.monotonic(). None without."""
        return None if self._request.timeout_s is None else self._sent_s + self._request.timeout_s

    def lost(self, error: ConnectionLost) -> None:
        """The connection is lost, and another will be made; for the client. The request may be the cause: it fails if
        this happens too often."""
        self._num_losses += 1
        if not self.settle() and self._num_losses >= MAX_LOSSES:
            times = f"{self._num_losses} connections were lost without output of this request"
            self.fail(ConnectionLost(f"{error}; {times}, which may be the cause"))

    def settle(self) -> bool:
        """End the stream if it was aborted, or if nothing is missing; for the client. Returns whether it has ended."""
        if not self._is_closed and (self._is_aborted or self._received.is_whole(self._num_prompt_ids)):
            self._end_here()
        return self._is_closed

    def expire(self) -> None:
        """Its time is up while no server works on it; for the client. Ends as the server would end it."""
        if not self._is_pooled and not self._received.num_ids:
            timeout_s = self._request.timeout_s
            self.fail(RequestError(504, f"the request timed out after {timeout_s:g} s", None, "timeout"))
        else:
            self._end_here()

    def again(self) -> p.Generate:
        """The request that continues this one after everything that was received; for the client."""
        self.is_repeated = True
        deadline_s = self.deadline_s
        timeout_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 1e-3)
        request = msgspec.structs.replace(self._request, timeout_s=timeout_s)
        if self._is_pooled:
            return msgspec.structs.replace(self._message, request=request)
        if self.prompt_token_ids is not None:
            request.seed = self.seed
            if not _has_grammar(request):  # it depends on the chat: on its tools, and on whether the model reasons
                request = msgspec.structs.replace(request, **NO_PROMPT, prompt_token_ids=packed(self.prompt_token_ids))
        self._num_read = 0
        return msgspec.structs.replace(
            self._message,
            request=request,
            credits=WINDOW - len(self._deltas),
            received=self._received.on_the_wire(self._num_prompt_ids),
        )

    @property
    def _is_pooled(self) -> bool:
        """Whether it is a request for what the model's pooler makes, which has no outputs."""
        return self._request.task is not None or self._request.pooling is not None

    @property
    def _num_prompt_ids(self) -> int:
        return len(self.prompt_token_ids or ())

    def _end_here(self) -> None:
        """End without the server: sequences that are open end with `abort`."""
        if self._is_pooled:
            self.fail(RequestError(503, "the request was aborted before its embedding was computed", None, "ended"))
            return
        if not self._received.has_all_ends:
            self._deltas.append(self._received.new(self._received.aborted(self.request_id)))
        is_best_of = self._request.best_of not in (None, self._request.n or 1)
        self.num_prompt_tokens = self._num_prompt_ids
        self.num_output_tokens = None if is_best_of else self._received.num_ids
        self._close()
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End with an error; for the client."""
        self._error = self._error or error
        self._close()
        self._changed.set()

    def _close(self) -> None:
        self._is_closed = True
        self._finalizer.detach()


def _has_grammar(request: p.Request) -> bool:
    """Whether the output of a chat is constrained."""
    if request.messages is None:
        return False
    if request.tool_choice and request.tool_choice not in NO_CALLS:
        return True
    return b"strict" in bytes(request.tools) or any(getattr(request, name) for name in CONSTRAINTS)
