"""One request over ZeroMQ, from its acceptance to its end.

Output without credit, or that a full connection does not take, stays in the request and is merged, bounded by the
longest sequence. Other requests do not wait. A client that does not take its output for too long loses the request.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.gateway.admission.admission import ID_BYTES
from pipeline.stages.gateway.apis.embeddings.reply import vector_of
from pipeline.stages.gateway.apis.openai.reply import FINISH_REASONS
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.open_requests.timings import json_of
from pipeline.stages.gateway.zmq.errors import on_the_wire

STALL_S = 60.0
"""Longest time that output may wait for a client."""


class ClientChannel(Protocol):
    """Sends messages to a client."""

    @property
    def is_full(self) -> bool:
        """Whether the connection takes nothing now. Streams are woken when this becomes false."""

    def send(self, message: p.ServerMessage) -> bool:
        """Send it, or return False if the connection is full."""

    def post(self, message: p.ServerMessage) -> None:
        """Send it now or later, in order. What waits is not counted by admission, so it must be small."""


class ZmqStream:
    """Writes the messages of one request."""

    def __init__(self, request_id: int, num_credits: int, request: Request, requests: RequestTable) -> None:
        self.request_id = request_id
        self._num_credits = min(num_credits, p.MAX_CREDITS)
        self.request = request
        self.error: ApiError | None = None
        """Why it failed."""
        self.has_ended = False
        """Its end was sent, or why it failed."""
        self._requests = requests
        self._unfinished: list[UnsentOutput] = []
        """Sequences whose end has not been sent. With best_of, none until all have finished."""
        self._num_sent_prompt_logprobs = 0
        """Prompt logprobs that have been sent."""
        self._is_choosing = request.parsed.is_best_of
        if not self._is_choosing and request.parsed.embedding is None:
            self._take(request.sequences)
        self._is_aborted = False
        self._failure: ApiError | None = None
        self._stalled_s: float | None = None
        """Since when output waits for the client."""

    def _take(self, sequences: list[SequenceOutput]) -> None:
        """Send these sequences."""
        has_token_outputs = self.request.parsed.details.num_top is not None
        self._unfinished = [
            UnsentOutput(index, sequence, has_token_outputs) for index, sequence in enumerate(sequences)
        ]

    def _choose(self) -> None:
        """With best_of: choose the best sequences, unless that was done before."""
        if self._is_choosing:
            self._is_choosing = False
            self._take(self.request.choices)

    def grant(self, num_deltas: int) -> None:
        self._num_credits = min(self._num_credits + num_deltas, p.MAX_CREDITS)
        self.request.wake()

    def abort(self) -> None:
        """The client has aborted the request: send what there is, and the end."""
        self._is_aborted = True
        self.request.wake()

    def fail(self, error: ApiError) -> None:
        """Fail it now, even if it only waits for the client's credit."""
        self._failure = self._failure or error
        self.request.wake()

    def release(self) -> None:
        """The client has disconnected: abort what is open. `run` may be cancelled after that."""
        self._requests.release(self.request)

    def wake(self) -> None:
        """The connection may take more."""
        self.request.wake()

    async def run(self, channel: ClientChannel) -> None:
        """Write until the request has ended. If cancelled, no end is sent: the client has disconnected."""
        request = self.request
        try:
            await request.until(
                lambda: request.is_accepted or request.is_finished or self._is_aborted or self._failure is not None
            )
            if request.is_accepted:
                await self._send(channel, self._accepted)
            await self._write(channel)
            if self._is_aborted:
                self._choose()
                if request.parsed.embedding is None:
                    await self._send(channel, self._last)
            await self._send(channel, self._finished)
            self.has_ended = True
        except ApiError as error:
            self.error, self.has_ended = error, True
            self._send_due(channel)
            channel.post(p.Failed(self.request_id, on_the_wire(error)))
        finally:
            self._requests.release(request)

    async def _send(self, channel: ClientChannel, message: Callable[[], p.ServerMessage]) -> None:
        """Send a message when the connection takes it. Until then the request has what the message is made of, so that
        admission counts it. Raises ApiError as `_write`."""
        while channel.is_full or not channel.send(message()):
            if self._failure is not None:
                raise self._failure
            if self._is_aborted:
                self._requests.stop(self.request)
            await self._change(is_due=True)
        self._stalled_s = None

    async def _write(self, channel: ClientChannel) -> None:
        """Send output as credits allow, until all has been sent or the client has aborted. Raises ApiError if the
        request fails."""
        request = self.request
        while not self._is_aborted:
            if self._failure is not None:
                raise self._failure
            if request.is_finished:
                self._choose()
            if not self._send_due(channel):
                if request.is_finished and not self._is_due:
                    return
                await self._change(is_due=self._is_due)

    def _send_due(self, channel: ClientChannel) -> bool:
        """Send all output that is due in one delta. Returns whether a delta was sent."""
        if not self._is_due or not self._num_credits or channel.is_full:
            return False
        due = [one for one in self._unfinished if one.is_due]
        if not channel.send(self._delta([one.output() for one in due])):
            return False
        for one in due:
            one.sent()
        self._num_sent_prompt_logprobs = self._num_known_prompt_logprobs
        self._unfinished = [one for one in self._unfinished if not one.is_over]
        self._num_credits -= 1
        self._stalled_s = None
        return True

    async def _change(self, *, is_due: bool) -> None:
        """Wait for a change; `is_due`: output waits. Raises ApiError if the request fails, or if the client takes
        nothing for too long."""
        now_s = asyncio.get_running_loop().time()
        if not is_due:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = now_s
        due_s = None if self._stalled_s is None else self._stalled_s + STALL_S
        try:
            async with asyncio.timeout_at(due_s):
                await self.request.change()
        except TimeoutError:
            if due_s is not None and suspension.missed(due_s):
                self._stalled_s = None  # it counts from now
                return
            message = f"the client granted no credit, or read nothing, for {STALL_S:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="stalled") from None

    @property
    def _is_due(self) -> bool:
        return self._num_known_prompt_logprobs > self._num_sent_prompt_logprobs or any(
            one.is_due for one in self._unfinished
        )

    @property
    def _num_known_prompt_logprobs(self) -> int:
        """Prompt logprobs that have arrived, if the client asked for them."""
        (prompt_request,) = self.request.prompt_requests
        return 0 if self.request.parsed.details.prompt_num_top is None else prompt_request.num_known_prompt_logprobs

    def _delta(self, outputs: list[p.Output]) -> p.Delta:
        """A delta of these outputs and the new prompt logprobs."""
        begin, end = self._num_sent_prompt_logprobs, self._num_known_prompt_logprobs
        if begin == end:
            return p.Delta(self.request_id, outputs)
        (prompt_request,) = self.request.prompt_requests
        num_top = prompt_request.submit.options.num_prompt_logprobs
        width = logprob_bytes(num_top)
        token_outputs = bytes(prompt_request.prompt_logprobs[begin * width : end * width])
        pieces = prompt_request.prompt_pieces[begin * num_top : end * num_top]
        return p.Delta(self.request_id, outputs, token_outputs, begin, pieces)

    def _last(self) -> p.Delta:
        """All unsent output of a request that the client has aborted."""
        return self._delta([one.output(is_last=True) for one in self._unfinished])

    def _accepted(self) -> p.Accepted:
        (prompt_request,) = self.request.prompt_requests
        assert prompt_request.prompt_ids is not None
        ids = prompt_request.prompt_ids.astype("<i4").tobytes()
        return p.Accepted(
            self.request_id, ids, prompt_request.submit.options.seed, self.request.id, prompt_request.pieces or []
        )

    def _finished(self) -> p.Finished:
        """Raises ApiError if an embedding was requested, and there is none."""
        request = self.request
        timings = json_of(request) if request.parsed.timings and not self._is_aborted else None
        embedding = request.parsed.embedding
        return p.Finished(
            self.request_id,
            request.num_prompt_tokens,
            request.num_output_tokens,
            timings,
            request.prompt_requests[0].nums_cached,
            b"" if embedding is None else vector_of(request.sequences[0], embedding).tobytes(),
        )


class UnsentOutput:
    """Output of one sequence that was not sent to the client yet."""

    __slots__ = ("_has_token_outputs", "_index", "_num_ids", "_sequence", "is_over")

    def __init__(self, index: int, sequence: SequenceOutput, has_token_outputs: bool) -> None:
        """With `has_token_outputs` deltas include the token outputs, and the sequence keeps the unsent ones."""
        self._index = index
        self._sequence = sequence
        self._has_token_outputs = has_token_outputs
        self._num_ids = sequence.num_received
        """Output ids that were sent."""
        self.is_over = False
        """Its end has been sent."""

    @property
    def is_due(self) -> bool:
        sequence = self._sequence
        return bool(
            sequence.pending
            or sequence.num_ids > self._num_ids
            or (sequence.finish in FINISH_REASONS and not self.is_over)
        )

    def output(self, *, is_last: bool = False) -> p.Output:
        """All unsent output. With `is_last`, an unfinished sequence gets finish_reason `abort`."""
        sequence = self._sequence
        text = "".join(sequence.pending)  # taken when it was sent, so that admission counts it until then
        return p.Output(
            index=self._index,
            text=text,
            token_ids=bytes(sequence.ids[self._num_ids * ID_BYTES :]),
            text_offset=sequence.num_chars - len(text),
            token_offset=self._num_ids,
            finish_reason=FINISH_REASONS.get(m.Finish(sequence.finish), "abort" if is_last else None),
            stop_reason=sequence.stop_reason,
            records=bytes(sequence.token_outputs) if self._has_token_outputs else b"",
            pieces=sequence.pieces if self._has_token_outputs else [],
        )

    def sent(self) -> None:
        """The result of `output` was sent."""
        self._sequence.pending.clear()
        self._num_ids = self._sequence.num_ids
        self._sequence.token_outputs.clear()
        self._sequence.pieces = []
        self.is_over = self._sequence.finish != m.Finish.NONE
