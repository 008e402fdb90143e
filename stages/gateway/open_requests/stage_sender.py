"""Sends the messages of open requests to ingest and schedule, in order, also those that full sockets refuse."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest

MOST_QUIET = 16
"""Closed requests that schedule may not know of, until the next heartbeat: it holds their ids as long."""
MAX_REPEATED = 128
"""How many `Closed` are sent again after a restart of schedule: more than are sent until a gateway learns of it, and so
few that they don't fill the queue to schedule, which would refuse new requests for a moment."""


class StageSender:
    """Owns the messages that wait for a socket."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        self._ingests = stage.outboxes_of("ingest")
        """Those that get new requests."""
        self._schedule = stage.outbox("schedule")
        self._unsent: deque[tuple[Any, m.Abort | m.Closed | m.Submit]] = deque()
        """Messages that full sockets refused. `flush` sends them; nothing is opened before it has."""
        self._closed: deque[m.Closed] = deque(maxlen=MAX_REPEATED)
        """The last ones that were sent to schedule."""
        self._num_quiet = 0
        """Closed requests that schedule was not woken for."""
        self._closing: list[m.Closed] | None = None
        """Those of a `together` block."""
        self._is_wake_due = False
        """Whether ingest is woken at the end of this turn of the loop."""

    @property
    def is_full(self) -> bool:
        return bool(self._unsent)

    def ingest_of(self, request_id: int) -> int:
        """The replica of ingest for a new request."""
        return topology.shard(request_id, len(self._ingests))

    def submit(self, submits: Sequence[m.Submit]) -> list[int | None]:
        """Send new requests, those of one ingest together. Returns the replica of ingest that each was sent to, or None
        if its queue is full. Requests that begin in one turn of the loop wake ingest once."""
        to: dict[int, list[m.Submit]] = {}
        for submit in submits:
            to.setdefault(self.ingest_of(submit.request_id), []).append(submit)
        is_sent = {ingest: self._ingests[ingest].send_all(each, wakes=False) for ingest, each in to.items()}
        if not self._is_wake_due:
            self._is_wake_due = True
            self._wake_soon()
        ingests = (self.ingest_of(submit.request_id) for submit in submits)
        return [ingest if is_sent[ingest] else None for ingest in ingests]

    def _wake_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._wake_ingests)

    def _wake_ingests(self) -> None:
        """For the requests of this turn."""
        self._is_wake_due = False
        for outbox in self._ingests:
            outbox.notify()

    def submit_again(self, prompt_request: PromptRequest) -> None:
        """Send a request, which a stage has lost, again, now or when there is room."""
        prompt_request.ingest = self.ingest_of(prompt_request.id)
        self._send(self._ingests[prompt_request.ingest], prompt_request.submit)

    def abort(self, prompt_request: PromptRequest) -> None:
        """Abort it in the stages that may hold it. Its sequences still get their closing messages."""
        abort = m.Abort(prompt_request.id, prompt_request.submit.attempt)
        self._send(self._stage.outbox("ingest", prompt_request.ingest), abort)
        if prompt_request.generates:
            self._send(self._schedule, abort)

    def withdraw(self, prompt_request: PromptRequest) -> None:
        """Have the stages forget this attempt."""
        if prompt_request.is_confirmed:
            self.close(prompt_request.id, prompt_request.submit.attempt)
        else:  # submitted again after the death of a stage: schedule refuses it when it comes
            self.abort(prompt_request)
        prompt_request.is_confirmed = False

    def abort_anywhere(self, request_id: int, attempt: int) -> None:
        """Abort a request that may be anywhere."""
        abort = m.Abort(request_id, attempt)
        for ingest in self._ingests:
            self._send(ingest, abort)
        self._send(self._schedule, abort)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is closed inside of it at its end, as one message of the transport."""
        self._closing = []
        try:
            yield
        finally:
            closing, self._closing = self._closing, None
            self._send_closed(closing)

    def close(self, request_id: int, attempt: int) -> None:
        """Have schedule forget a request, soon."""
        self._closed.append(closed := m.Closed(request_id, attempt))
        if self._closing is not None:
            self._closing.append(closed)
        else:
            self._send_closed([closed])

    def _send_closed(self, closing: list[m.Closed]) -> None:
        """Schedule has nothing to do for a single client's next request but this, so it is not woken for each."""
        if self._unsent or not self._schedule.send_all(closing, wakes=False):
            self._unsent.extend((self._schedule, closed) for closed in closing)
        self._num_quiet += len(closing)
        if self._num_quiet >= MOST_QUIET:
            self.notify()

    def notify(self) -> None:
        """Wake schedule for those that were closed since the last time. Call it once per heartbeat."""
        self._num_quiet = 0
        self._schedule.notify()

    def repeat_closed(self) -> None:
        """Schedule has died. Its successor may have got requests, and even finished them, before this gateway learned
        of it: then their `Closed` was lost. It ignores those of requests that it does not have."""
        for closed in self._closed:
            self._send(self._schedule, closed)

    def drop_unsent(self, name: str) -> None:
        """A stage's process has died: drop what waits for it."""
        lost = self._stage.outboxes.get(name)
        self._unsent = deque((outbox, message) for outbox, message in self._unsent if outbox is not lost)

    def clear(self) -> None:
        """No stage takes anything any more."""
        self._unsent.clear()

    def rescaled(self) -> None:
        """The number of ingests in the stage's settings has changed."""
        self._wake_ingests()  # one of them may not be among the others
        self._ingests = self._stage.outboxes_of("ingest")

    def flush(self) -> None:
        """Send what full sockets refused. Call it once per wake."""
        while self._unsent:
            outbox, message = self._unsent[0]
            if not outbox.send(message):
                return
            self._unsent.popleft()

    def _send(self, outbox: Any, message: m.Abort | m.Closed | m.Submit) -> None:
        if self._unsent or not outbox.send(message):  # in order: a Closed must not overtake its Abort
            self._unsent.append((outbox, message))
