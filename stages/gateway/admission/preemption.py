"""Makes room when open requests keep too many bytes, and lets those that gave way run again.

    open ──it is the largest, and not the oldest──► preempted ──there is room, or it is the oldest──► open
                                                        └──────aborted, or its client has left──────► closed

Admission checks what a request keeps at its start; output may grow beyond the limit. Then slow clients lose what waits
for them (unread.py), and if that is not enough, the request with the most output is preempted, of the API key whose
requests have the most together: schedule forgets it. With several keys that is an eighth before the limit (shares.py).
Its client waits and loses nothing. Of a stream the gateway keeps the ids, and of a reply that is sent as a whole only
those of complete sequences: the others are generated again, with the same seed. It is submitted again with the next
attempt, as after the death of a stage.

The oldest request that generates is not preempted, unless complete replies that wait for their clients take its room,
and no request that exceeds the limit alone is admitted. So each becomes the oldest and ends. A small request is seldom
the largest: it does not notice what large ones do.

What is counted depends on when clients read and on what the code behind HTTP keeps, which no recording has. So the
decisions are recorded as events, and a replay repeats them and makes none. They are made in a callback of their own:
an event must not come amid what the stage does for a message or for another event.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admission.open_bytes import keeps_output, output_bytes
from pipeline.stages.gateway.admission.shares import max_grown_bytes
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput, next_attempt
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable

PREEMPT, RESUME, TOO_LARGE = "preempt", "resume", "too large"
"""Events of recordings: keyed by the request's number, with the place of its prompt, or with the error's message."""


class Preemption:
    """Preempts and resumes requests of a table."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", table: RequestTable) -> None:
        self._stage = stage
        self._table = table
        table.on_room = table.unread.deliveries.on_sample = self.update_soon
        self._waiting: dict[int, int] = {}
        """Preempted prompt requests, the oldest attempt first, with the bytes that each had given back."""
        self._returning: dict[int, int] = {}
        """Resumed prompt requests, with the bytes that each had before: it will need them again."""
        self._is_due = False
        """`_update` will be called."""

    def update_soon(self) -> None:
        """Preempt requests until the rest fits, or resume some, before the messages of the next turn and after the
        tasks that are ready now: replies that they send have returned their bytes by then. Call it at the end of each
        wake, in the event loop."""
        admission = self._table.admission
        is_needed = self._waiting or admission.num_bytes > self._max_bytes
        if is_needed and not self._is_due and not self._stage.replay_context.is_replaying:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._is_due = False
        admission, unread = self._table.admission, self._table.unread_output
        unread.free(lambda: admission.num_bytes + self._num_wanted <= self._max_bytes)
        if admission.num_bytes > self._max_bytes:
            self._make_room()
        elif self._waiting:
            self._resume()

    @property
    def _max_bytes(self) -> int:
        return max_grown_bytes(self._table.admission, self._table.accounts.keys)

    @property
    def _num_wanted(self) -> int:
        """Bytes that the first of those that wait needs, besides the ones that have come back."""
        num_bytes = next(iter(self._waiting.values()), 0)
        return num_bytes + 1 + self._num_returning() if num_bytes else 0

    # ----------------------------------------------------------------------------------------------------- make room

    def _make_room(self) -> None:
        admission, oldest = self._table.admission, self._oldest()
        of_scope: Counter[str] = Counter()
        for one in self._table.newest():
            of_scope[one.request.parsed.scope] += one.num_output_bytes
        running = sorted(
            self._running(),
            key=lambda one: (one.request is oldest, -of_scope[one.request.parsed.scope], -one.num_output_bytes),
        )
        for one in running:
            if admission.num_bytes <= self._max_bytes:
                return
            if one.request is oldest and not self._has_held:
                break
            if one.num_output_bytes:
                self.preempt(one)
        if admission.num_bytes > self._max_bytes and oldest is not None:
            self._end_if_too_large(oldest)

    @property
    def _has_held(self) -> bool:
        """Whether complete replies wait for their clients. Then even the oldest request gives way: else each could
        become complete in its turn, and all of them would be kept. A reply is complete when all prompts of its request
        are: as long as one is not, the oldest request must go on, because nothing else returns their room."""
        return any(one.request.is_finished and one.num_output_bytes for one in self._table.newest())

    def _end_if_too_large(self, oldest: Request) -> None:
        """The others gave way. If it exceeds the limit alone, its ids have more text than `most_bytes` expects."""
        num_bytes = oldest.num_bytes + sum(one.num_bytes for one in oldest.prompt_requests)
        if num_bytes > (most := self._table.admission.max_request_bytes):
            message = (
                f"this request keeps {num_bytes} bytes in memory with its output, and the limit is {most}, three "
                "quarters of gateway.max_open_bytes"
            )
            self.fail(oldest, message)

    def fail(self, request: Request, message: str) -> None:
        """Fail a request whose output is too large."""
        self._stage.replay_context.event(TOO_LARGE, request.number, message.encode())
        request.fail(ApiError(HTTPStatus.INSUFFICIENT_STORAGE, message, code="output_too_large"))

    def preempt(self, prompt_request: PromptRequest) -> None:
        """Have the stages forget a prompt request, and keep what its client has."""
        self._note(PREEMPT, prompt_request)
        num_before = prompt_request.num_bytes
        self._withdraw(prompt_request)
        parsed, cost = prompt_request.request.parsed, prompt_request.request.output_cost
        is_kept = keeps_output(parsed)
        if is_kept:
            for sequence, received in zip(
                prompt_request.sequences, parsed.outputs or [b""] * len(prompt_request.sequences), strict=True
            ):
                if sequence.finish == m.Finish.NONE:
                    prompt_request.request.has_dropped_output |= bool(sequence.num_generated)
                    _start_again(sequence, received, is_resumed=bool(received) and not parsed.options.repeats_received)
                    if prompt_request.echoed:
                        sequence.pending.append(prompt_request.echoed)
            if prompt_request.sequences[0].finish == m.Finish.NONE:  # it computes them again
                prompt_request.prompt_logprobs.clear()
                prompt_request.prompt_pieces = []
            prompt_request.submit = msgspec.structs.replace(prompt_request.submit, outputs=[])
        prompt_request.submit = next_attempt(prompt_request)
        for sequence in prompt_request.sequences:
            # Schedule has nothing of it now; in the gateway are its ids, and what a slow client has not taken.
            size = output_bytes(cost, sequence)
            sequence.num_bytes = size if is_kept else size - (cost.id_bytes - KEPT_ID_BYTES) * sequence.num_ids
        num_more = prompt_request.base_bytes + prompt_request.num_output_bytes - num_before
        self._table.admission.count_output(prompt_request, num_more)
        self._table.admission.num_preempted += 1
        self._table.metrics.num_preemptions += 1
        self._waiting[prompt_request.id] = -num_more
        self._table.limited_log.info(
            "preempted: open requests keep too many bytes", request=prompt_request.name, given_back_bytes=-num_more
        )

    def _withdraw(self, prompt_request: PromptRequest) -> None:
        """Have the stages forget it. It keeps its place in the table."""
        self._table.sender.withdraw(prompt_request)
        prompt_request.is_preempted = True

    # -------------------------------------------------------------------------------------------------------- resume

    def _resume(self) -> None:
        admission = self._table.admission
        oldest = None if self._has_held else self._oldest()
        num_free = self._max_bytes - admission.num_bytes - self._num_returning()
        for request_id, num_bytes in list(self._waiting.items()):
            prompt_request = self._table.get(request_id)
            if prompt_request is None or prompt_request.is_closed or not prompt_request.is_preempted:
                self._forget(request_id)  # it has been closed
                continue
            if prompt_request.request is oldest or num_bytes < num_free:
                num_free -= num_bytes
                self._returning[request_id] = prompt_request.num_bytes + num_bytes
                self.resume(prompt_request)

    def _num_returning(self) -> int:
        """Bytes that resumed requests lack of what they had: else others would take them, and give way again."""
        num_bytes = 0
        for request_id, num_before in list(self._returning.items()):
            one = self._table.get(request_id)
            if one is None or _is_over(one) or one.is_preempted or one.num_bytes >= num_before:
                del self._returning[request_id]
            else:
                num_bytes += num_before - one.num_bytes
        return num_bytes

    def resume(self, prompt_request: PromptRequest) -> None:
        """Submit a preempted prompt request with its next attempt."""
        self._note(RESUME, prompt_request)
        self._forget(prompt_request.id)
        prompt_request.is_preempted = False
        self._table.submit_again(prompt_request)

    def _note(self, what: str, prompt_request: PromptRequest) -> None:
        """Token output a decision."""
        request = prompt_request.request
        index = request.prompt_requests.index(prompt_request)
        self._stage.replay_context.event(what, request.number, b"%d" % index)

    def _forget(self, request_id: int) -> None:
        del self._waiting[request_id]
        self._table.admission.num_preempted -= 1

    def _running(self) -> Iterator[PromptRequest]:
        """Those whose output grows, or will: schedule has them, or will get them after the death of a stage."""
        for one in self._table.open_prompts():
            if one.generates and one.prompt_ids is not None and not (_is_over(one) or one.is_preempted):
                yield one

    def _oldest(self) -> Request | None:
        """The oldest request that is not complete."""
        each = (one.request for one in self._table.open_prompts() if one.generates and not _is_over(one))
        return next(each, None)


def _is_over(one: PromptRequest) -> bool:
    """Whether it only waits for its closing messages, or for nothing."""
    return one.is_finished or one.is_aborted or one.is_released


KEPT_ID_BYTES = 8
"""An output id of a preempted stream: in the gateway, and in what is submitted again."""


def _start_again(sequence: SequenceOutput, received: bytes, *, is_resumed: bool) -> None:
    """Drop the output of a sequence that its client has not got."""
    sequence.pending.clear()
    sequence.special_spans.clear()
    sequence.special_end = 0
    sequence.ids[:] = received
    sequence.token_outputs.clear()
    sequence.pieces = []
    sequence.num_chars = 0
    sequence.is_resumed = is_resumed
    sequence.drafts = None
