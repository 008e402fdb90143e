"""One request that came over ZeroMQ, from its acceptance to its closing.

What the client has granted no credit for, or what its connection does not take, stays in the call and is merged: each
sequence's text and ids grow there, bounded by the longest sequence, and nobody else waits. A client that leaves it
there for too long loses the request.
"""

import asyncio
from http import HTTPStatus
from typing import Protocol

from pipeline.client import protocol as p
from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import logprob_bytes
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.replies.responses import FINISH_REASONS
from pipeline.stages.gateway.requests import ID_BYTES, Call, Requests, Sequence
from pipeline.stages.gateway.timings import json_of
from pipeline.stages.gateway.zmq.errors import on_the_wire

STALL_S = 60.0
"""Longest that a client may leave what is there for it."""


class Way(Protocol):
    """The way to a client."""

    @property
    def takes_deltas(self) -> bool:
        """Whether it is worth while to make one. Who waits for that is woken."""

    def send_delta(self, delta: p.Delta) -> bool:
        """Send it, or refuse it for now."""

    def post(self, letter: p.ServerMessage) -> None:
        """Send it now or later, in order."""


class DoorStream:
    """Writes one request's messages."""

    def __init__(self, request_id: int, num_credits: int, call: Call, requests: Requests) -> None:
        self.request_id = request_id
        self._num_credits = min(num_credits, p.MAX_CREDITS)
        self._call = call
        self._requests = requests
        self._unfinished: list[_Unsent] = []
        """Sequences whose end has not been sent. Where the best are to be chosen, none before all have ended."""
        self._num_prompt_records = 0
        """Those that have been sent."""
        self._is_choosing = call.ask.best_of is not None
        if not self._is_choosing:
            self._take(call.sequences)
        self._is_aborted = False
        self._failure: ApiError | None = None
        self._stalled_s: float | None = None
        """Since when something is there that the client does not take."""

    def _take(self, sequences: list[Sequence]) -> None:
        """These are sent."""
        has_records = self._call.ask.details.num_top is not None
        self._unfinished = [_Unsent(index, sequence, has_records) for index, sequence in enumerate(sequences)]

    def _choose(self) -> None:
        """The best of what there is are sent, if none were chosen before."""
        if self._is_choosing:
            self._is_choosing = False
            self._take(self._call.choices)

    def grant(self, num_deltas: int) -> None:
        self._num_credits = min(self._num_credits + num_deltas, p.MAX_CREDITS)
        self._call.wake()

    def abort(self) -> None:
        """The client wants no more of it: what is there goes out with the closing."""
        self._is_aborted = True
        self._call.wake()

    def fail(self, error: ApiError) -> None:
        """End it now, though all that is missing may be the client's credit."""
        self._failure = self._failure or error
        self._call.wake()

    def leave(self) -> None:
        """Nobody reads any more: what is open is aborted. `run` may be cancelled then, begun or not."""
        self._requests.leave(self._call)

    def wake(self) -> None:
        """The connection may take something again."""
        self._call.wake()

    async def run(self, way: Way) -> None:
        """Write until the request is closed. A cancellation leaves it unclosed: nobody reads."""
        call = self._call
        try:
            await call.until(
                lambda: call.is_accepted or call.is_finished or self._is_aborted or self._failure is not None
            )
            if call.is_accepted:
                way.post(self._accepted())
            await self._write(way)
            if self._is_aborted:
                self._choose()
                self._requests.leave(call)
                way.post(self._delta([one.output(is_last=True) for one in self._unfinished]))
            way.post(self._finished())
        except ApiError as error:
            self._send_due(way)
            way.post(p.Failed(self.request_id, on_the_wire(error)))
        finally:
            self._requests.leave(call)

    async def _write(self, way: Way) -> None:
        """Send what comes, as credits allow, until all has been sent or the client wants no more. Raises ApiError where
        the request fails."""
        call = self._call
        while not self._is_aborted:
            if self._failure is not None:
                raise self._failure
            if call.is_finished:
                self._choose()
            if not self._send_due(way):
                if call.is_finished and not self._is_due:
                    return
                await self._change()

    def _send_due(self, way: Way) -> bool:
        """Send all that is due in one delta. Returns whether that was something, and was taken."""
        if not self._is_due or not self._num_credits or not way.takes_deltas:
            return False
        due = [one for one in self._unfinished if one.is_due]
        if not way.send_delta(self._delta([one.output() for one in due])):
            return False
        for one in due:
            one.sent()
        self._num_prompt_records = self._num_known_prompt_records
        self._unfinished = [one for one in self._unfinished if not one.is_over]
        self._num_credits -= 1
        self._stalled_s = None
        return True

    async def _change(self) -> None:
        """Wait for news. Raises ApiError where the request fails, and where the client takes nothing for too long."""
        now_s = asyncio.get_running_loop().time()
        if not self._is_due:
            self._stalled_s = None
        elif self._stalled_s is None:
            self._stalled_s = now_s
        try:
            async with asyncio.timeout_at(None if self._stalled_s is None else self._stalled_s + STALL_S):
                await self._call.change()
        except TimeoutError:
            message = f"for {STALL_S:g} s the client granted no credit, or read nothing"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="stalled") from None

    @property
    def _is_due(self) -> bool:
        return self._num_known_prompt_records > self._num_prompt_records or any(one.is_due for one in self._unfinished)

    @property
    def _num_known_prompt_records(self) -> int:
        """Of those that the client asked for."""
        (request,) = self._call.requests
        return 0 if self._call.ask.details.prompt_num_top is None else request.num_prompt_records

    def _delta(self, outputs: list[p.Output]) -> p.Delta:
        """These outputs, with the records of the prompt that are new."""
        begin, end = self._num_prompt_records, self._num_known_prompt_records
        if begin == end:
            return p.Delta(self.request_id, outputs)
        (request,) = self._call.requests
        num_top = request.submit.text.prompt_num_top
        width = logprob_bytes(num_top)
        records = bytes(request.prompt_records[begin * width : end * width])
        pieces = request.prompt_pieces[begin * num_top : end * num_top]
        return p.Delta(self.request_id, outputs, records, begin, pieces)

    def _accepted(self) -> p.Accepted:
        (request,) = self._call.requests
        assert request.prompt_ids is not None
        ids = request.prompt_ids.astype("<i4").tobytes()
        return p.Accepted(self.request_id, ids, request.submit.sampling.seed, self._call.id, request.pieces or [])

    def _finished(self) -> p.Finished:
        call = self._call
        timings = json_of(call) if call.ask.timings and not self._is_aborted else None
        return p.Finished(
            self.request_id,
            call.num_prompt_tokens,
            call.num_output_tokens,
            timings,
            call.requests[0].nums_cached,
        )


class _Unsent:
    """What the client has not been sent of one sequence."""

    __slots__ = ("_has_records", "_index", "_num_ids", "_sequence", "_text", "is_over")

    def __init__(self, index: int, sequence: Sequence, has_records: bool) -> None:
        """With `has_records` the client is told those of the ids. The sequence then keeps the ones that are not sent
        yet."""
        self._index = index
        self._sequence = sequence
        self._has_records = has_records
        self._text = ""
        """Taken from the sequence, and refused by the connection."""
        self._num_ids = sequence.num_received
        """Output ids that the client has."""
        self.is_over = False
        """Its end has been sent."""

    @property
    def is_due(self) -> bool:
        sequence = self._sequence
        return bool(
            self._text
            or sequence.pending
            or sequence.num_ids > self._num_ids
            or (sequence.finish in FINISH_REASONS and not self.is_over)
        )

    def output(self, *, is_last: bool = False) -> p.Output:
        """All that is there. With `is_last` a sequence that goes on is said to be aborted."""
        sequence = self._sequence
        self._text += sequence.take_text()
        return p.Output(
            index=self._index,
            text=self._text,
            token_ids=bytes(sequence.ids[self._num_ids * ID_BYTES :]),
            text_offset=sequence.num_chars - len(self._text),
            token_offset=self._num_ids,
            finish_reason=FINISH_REASONS.get(m.Finish(sequence.finish), "abort" if is_last else None),
            stop_reason=sequence.stop_reason,
            records=bytes(sequence.records) if self._has_records else b"",
            pieces=sequence.pieces if self._has_records else [],
        )

    def sent(self) -> None:
        """What `output` gave has been sent."""
        self._text = ""
        self._num_ids = self._sequence.num_ids
        self._sequence.records.clear()
        self._sequence.pieces = []
        self.is_over = self._sequence.finish != m.Finish.NONE
