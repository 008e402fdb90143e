"""One request over ZeroMQ, from its acceptance to its end.

Output without credit, or that a full connection does not take, stays in the request and is merged, bounded by the
longest sequence. Other requests do not wait. A client that does not take its output for too long loses the request, and
one that takes it too slowly while others need its room, too (stages/gateway/admission/unread.py).
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from pipeline.client import protocol as p
from pipeline.http_server.sockets.deliveries import MIN_BYTES_PER_S, Client, Delivery
from pipeline.runtime import messages as m
from pipeline.runtime.process import suspension
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.gateway.admission.admission import ID_BYTES
from pipeline.stages.gateway.apis.openai.reply import FINISH_REASONS
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.response_writer import pooled_result
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.open_requests.timings import json_of
from pipeline.stages.gateway.replies.part_turns import StreamTurns
from pipeline.stages.gateway.replies.token_details import MAX_ENTRIES_AT_ONCE
from pipeline.stages.gateway.zmq.errors import on_the_wire

STALL_S = 60.0
"""Longest time that output may wait for a client."""


class ClientChannel(Protocol):
    """Sends messages to a client."""

    @property
    def is_full(self) -> bool:
        """Whether the connection takes nothing now. Streams are woken when this becomes false."""

    @property
    def client(self) -> Client:
        """The receiver."""

    def send(self, message: p.ServerMessage) -> int:
        """Send it. Returns the bytes that it has, or 0 if the connection is full."""

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
        self._num_in_delta: list[tuple[UnsentOutput, int | None]] = []
        """Sequences in the last delta that was made, with the number of their ids that it has; None: all."""
        self._num_prompt_in_delta = 0
        """Prompt logprobs in it."""
        self._is_choosing = request.parsed.is_best_of
        if not self._is_choosing and not request.parsed.is_pooled:
            self._take(request.sequences)
        self._is_aborted = False
        self._failure: ApiError | None = None
        self._stalled_s: float | None = None
        """Since when output waits for the client."""
        self._num_sent = 0
        """Bytes of all its messages."""
        self._client: Client = False, ""
        self._turns = StreamTurns(request.parsed)
        self._delivery: Delivery | None = None
        """From the first output on that waited, until all of it was sent."""

    def _take(self, sequences: list[SequenceOutput]) -> None:
        """Send these sequences."""
        parsed = self.request.parsed
        num_top = None if parsed.details.num_top is None else parsed.options.num_logprobs
        self._unfinished = [UnsentOutput(index, sequence, num_top) for index, sequence in enumerate(sequences)]

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
        request, self._client = self.request, channel.client
        self._turns = StreamTurns(request.parsed, self._client[1])
        try:
            await request.until(
                lambda: request.is_accepted or request.is_finished or self._is_aborted or self._failure is not None
            )
            if request.is_accepted:
                await self._send(channel, self._accepted)
            await self._write(channel)
            if self._is_aborted:
                self._choose()
                while sum(one.num_entries for one in self._unfinished) > MAX_ENTRIES_AT_ONCE:
                    await self._send(channel, self._next)
                    self._sent()
                    await asyncio.sleep(0)
                    await self._turns.take()
                if not request.parsed.is_pooled:
                    await self._send(channel, self._last)
            result = await pooled_result(request)
            await self._send(channel, lambda: self._finished(result))
            self.has_ended = True
        except ApiError as error:
            self.error, self.has_ended = error, True
            if not request.is_released:
                self._send_due(channel)
            channel.post(p.Failed(self.request_id, on_the_wire(error)))
        finally:
            self._delivered()
            self._requests.release(request)

    async def _send(self, channel: ClientChannel, message: Callable[[], p.ServerMessage]) -> None:
        """Send a message when the connection takes it. Until then the request has what the message is made of, so that
        admission counts it. Raises ApiError as `_write`."""
        while channel.is_full or not self._sends(channel, message()):
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
            elif self._is_due:
                await asyncio.sleep(0)  # many log probabilities take several turns of the loop
            await self._turns.take()

    def _send_due(self, channel: ClientChannel) -> bool:
        """Send the output that is due in one delta, as far as it has no more than MAX_ENTRIES_AT_ONCE log
        probabilities. Returns whether a delta was sent."""
        if not self._is_due or not self._num_credits or channel.is_full:
            return False
        if not self._sends(channel, self._turns.run(self._next)):
            return False
        self._sent()
        self._num_credits -= 1
        self._stalled_s = None
        return True

    def _sends(self, channel: ClientChannel, message: p.ServerMessage) -> bool:
        num_bytes = channel.send(message)
        self._num_sent += num_bytes
        return num_bytes > 0

    def _next(self) -> p.Delta:
        """The next delta."""
        found: list[tuple[UnsentOutput, int | None]] = []
        num_left = MAX_ENTRIES_AT_ONCE
        for one in self._unfinished:
            if not one.is_due:
                continue
            if one.num_entries > num_left:
                found = found or [(one, max(1, num_left // one.num_each))]
                break
            num_left -= one.num_entries
            found.append((one, None))
        self._num_in_delta = found
        return self._delta([one.output(num_ids) for one, num_ids in found])

    def _sent(self) -> None:
        """The result of `_next` was sent."""
        for one, num_ids in self._num_in_delta:
            one.sent(num_ids)
        self._num_sent_prompt_logprobs += self._num_prompt_in_delta
        self._unfinished = [one for one in self._unfinished if not one.is_over]

    async def _change(self, *, is_due: bool) -> None:
        """Wait for a change; `is_due`: output waits. Raises ApiError if the request fails, or if the client takes
        nothing for too long."""
        now_s = asyncio.get_running_loop().time()
        if not is_due:
            self._stalled_s = None
            self._delivered()
        elif self._stalled_s is None:
            self._stalled_s = now_s
        if is_due and self._delivery is None:
            self._delivery = self._requests.unread_output.add(
                self._client, lambda: self._num_sent, self.request, self._lose
            )
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

    def _delivered(self) -> None:
        if self._delivery is not None:
            self._requests.unread_output.remove(self._delivery)
            self._delivery = None

    def _lose(self) -> None:
        """Others need the room of what waits for the client."""
        message = f"the client took output slower than {MIN_BYTES_PER_S} bytes/s while others needed its room"
        self.fail(ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="stalled"))

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
        """A delta of these outputs and new prompt logprobs, MAX_ENTRIES_AT_ONCE at most."""
        begin = self._num_sent_prompt_logprobs
        self._num_prompt_in_delta = self._num_known_prompt_logprobs - begin
        if not self._num_prompt_in_delta:
            return p.Delta(self.request_id, outputs)
        (prompt_request,) = self.request.prompt_requests
        num_top = prompt_request.submit.options.num_prompt_logprobs
        end = begin + min(self._num_prompt_in_delta, max(1, MAX_ENTRIES_AT_ONCE // (1 + num_top)))
        self._num_prompt_in_delta = end - begin
        width = logprob_bytes(num_top)
        token_outputs = bytes(prompt_request.prompt_logprobs[begin * width : end * width])
        pieces = prompt_request.prompt_pieces[begin * num_top : end * num_top]
        return p.Delta(self.request_id, outputs, token_outputs, begin, pieces)

    def _last(self) -> p.Delta:
        """All unsent output of a request that the client has aborted."""
        return self._delta([one.output(None, is_last=True) for one in self._unfinished])

    def _accepted(self) -> p.Accepted:
        (prompt_request,) = self.request.prompt_requests
        assert prompt_request.prompt_ids is not None
        ids = prompt_request.prompt_ids.astype("<i4").tobytes()
        return p.Accepted(
            self.request_id, ids, prompt_request.submit.options.seed, self.request.id, prompt_request.pieces or []
        )

    def _finished(self, result: bytes) -> p.Finished:
        request = self.request
        timings = json_of(request) if request.parsed.timings and not self._is_aborted else None
        return p.Finished(
            self.request_id,
            request.num_prompt_tokens,
            request.num_output_tokens,
            timings,
            request.prompt_requests[0].nums_cached,
            result,
        )


class UnsentOutput:
    """Output of one sequence that was not sent to the client yet."""

    __slots__ = ("_index", "_num_ids", "_num_top", "_sequence", "is_over")

    def __init__(self, index: int, sequence: SequenceOutput, num_top: int | None) -> None:
        """With `num_top`, deltas include log probabilities with this many top ids, and the sequence keeps the unsent
        ones."""
        self._index = index
        self._sequence = sequence
        self._num_top = num_top
        self._num_ids = sequence.num_received
        """Output ids that were sent."""
        self.is_over = False
        """Its end has been sent."""

    @property
    def num_each(self) -> int:
        """Log probabilities of one id."""
        return 0 if self._num_top is None else 1 + self._num_top

    @property
    def num_entries(self) -> int:
        """Log probabilities that were not sent."""
        return self.num_each * (self._sequence.num_ids - self._num_ids)

    @property
    def is_due(self) -> bool:
        sequence = self._sequence
        return bool(
            sequence.pending
            or sequence.num_ids > self._num_ids
            or (sequence.finish in FINISH_REASONS and not self.is_over)
        )

    def output(self, num_ids: int | None, *, is_last: bool = False) -> p.Output:
        """All unsent output; with `num_ids`, only so many ids, and the text comes later. With `is_last`, an unfinished
        sequence gets finish_reason `abort`."""
        sequence, is_all = self._sequence, num_ids is None
        begin, end = self._num_ids, sequence.num_ids if num_ids is None else self._num_ids + num_ids
        text = "".join(sequence.pending)  # taken when it was sent, so that admission counts it until then
        records, pieces = self._sizes(end - begin)
        return p.Output(
            index=self._index,
            text=text if is_all else "",
            token_ids=bytes(sequence.ids[begin * ID_BYTES : end * ID_BYTES]),
            text_offset=sequence.num_chars - len(text),
            token_offset=begin,
            finish_reason=FINISH_REASONS.get(m.Finish(sequence.finish), "abort" if is_last else None)
            if is_all
            else None,
            stop_reason=sequence.stop_reason if is_all else None,
            records=bytes(sequence.token_outputs[:records]),
            pieces=sequence.pieces[:pieces],
        )

    def sent(self, num_ids: int | None) -> None:
        """The result of `output` was sent."""
        sequence = self._sequence
        if num_ids is not None:
            records, pieces = self._sizes(num_ids)
            del sequence.token_outputs[:records], sequence.pieces[:pieces]
            self._num_ids += num_ids
            return
        sequence.pending.clear()
        sequence.token_outputs.clear()
        sequence.pieces = []
        self._num_ids = sequence.num_ids
        self.is_over = sequence.finish != m.Finish.NONE

    def _sizes(self, num_ids: int) -> tuple[int, int]:
        """Bytes of the records of so many ids, and the number of their pieces."""
        return 0 if self._num_top is None else num_ids * logprob_bytes(self._num_top), num_ids * self.num_each
