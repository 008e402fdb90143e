"""The table of open requests: opens, aborts and releases them, and owns the credits that bound them.

    open ──Submit──► (Accepted) ──► Deltas, Deltas, … ──► closed ──Closed──► settled
                         └────────────► Rejected ───────────┘

`open` creates one prompt request for each prompt. A prompt request is closed when all its sequences have finished and
its prompt's ids have arrived, if anything still needs them. It is settled when, besides, its response is over: then its
credits, one for each sequence, its prompt's tokens and the bytes that it keeps, are returned (see admission.py). If a
response ends early, `release` aborts its open prompt requests; they stay in the table until their closing messages have
arrived. A request that reaches its deadline is aborted like one aborted by id, or fails if it has no token yet.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from pipeline.http_server.key_accounts import REQUESTS, KeyAccounts
from pipeline.http_server.slow_clients import UnreadReplies, max_unread_bytes
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.api_keys import scope_id, scoped_salt
from pipeline.runtime.event_log import EventLog
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway import timings
from pipeline.stages.gateway.admission import Admission
from pipeline.stages.gateway.apis.responses.event_log import EventLog as ResponseLog
from pipeline.stages.gateway.deadlines import Deadlines
from pipeline.stages.gateway.errors import ApiError, Overloaded, overloaded, timeout_error
from pipeline.stages.gateway.late_stages import LateStages
from pipeline.stages.gateway.metrics import GatewayMetrics
from pipeline.stages.gateway.open_bytes import bounded, fixed_bytes, measured, output_cost, size_of, submitted_bytes
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.received import Received
from pipeline.stages.gateway.request import ID_BYTES, PromptRequest, Request, SequenceOutput
from pipeline.stages.gateway.timings import RecentRequests
from pipeline.stages.gateway.usage import RequestUsage
from pipeline.text.formats.chat_formats import ChatFormats

FIRST_ATTEMPT = 1
MAX_REPEATED = 128
"""How many `Closed` are sent again after a restart of schedule: more than are sent until a gateway learns of it, and so
few that they don't fill the queue to schedule, which would refuse new requests for a moment."""


class RequestTable:
    """Open requests, by the ids that the stages know them by."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        self._ingests = stage.outboxes_of("ingest")
        """Those that get new requests."""
        self._schedule = stage.outbox("schedule")
        self.formats = ChatFormats.load(stage.model_dir, stage.settings.chat)
        self.accounts = KeyAccounts.inherited(stage.launch.keys_fd, stage.launch.usage_fd, stage.replica)
        """Of API keys, which a replay has not: the effects of their limits are in the recording."""
        self.num_opened = 0
        """Calls of `open`, including those that were refused."""
        self._table: dict[int, PromptRequest] = {}
        self._by_abort_id: dict[tuple[str, str], list[Request]] = {}
        """Requests that can be aborted, by scope and id. Clients may give several requests one id."""
        self._shares_cache = stage.settings.gateway.share_prefix_cache
        self.num_requests = 0
        """Requests for output whose responses are not over."""
        self._unsent: deque[tuple[Any, m.Abort | m.Closed | m.Submit]] = deque()
        """Messages that full sockets refused. `flush` sends them; nothing is opened before it has."""
        self._closed: deque[m.Closed] = deque(maxlen=MAX_REPEATED)
        """The last ones that were sent to schedule."""
        self.admission = Admission(
            topology.max_open_of_one(stage.settings),
            topology.max_open_tokens_of_one(stage.settings),
            topology.max_open_bytes_of_one(stage.settings),
        )
        self.unread = UnreadReplies(
            lambda: max_unread_bytes(topology.max_open_bytes_of_one(stage.settings)),
            stage.settings.gateway.slow_client_timeout_s,
        )
        """Replies that clients have not taken, besides those of open requests."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when a request is settled while others wait for its bytes."""
        self.hidden_size: int | None = None
        """Length of an embedding; None until it is known."""
        self._by_number: dict[int, Request] = {}
        """Requests that have a deadline."""
        self._timeout_s = stage.settings.gateway.request_timeout_s
        self._deadlines = Deadlines(lambda number: self.expire(self._by_number[number]))
        # In a replay nothing is late: the effects are in the recording.
        late_s = 0.0 if stage.replay_context.is_replaying else stage.settings.gateway.late_stage_timeout_s
        self.late_stages = LateStages(late_s, self._fail_late)
        self._rejection_log = EventLog(stage.log, "refused requests with 503")
        self._num_rejected = 0
        self._left_out_log = EventLog(stage.log, "left out tools that only their provider runs")
        self._num_left_out = 0
        """Types of tools of requests, each counted once a request"""
        self._rejection: dict[str, object] = {}
        """Code and message of the newest."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._trace = stage.trace
        self.metrics = GatewayMetrics()
        self.recent = RecentRequests()
        stage.control_requests.own_counts = lambda: self.metrics.counts(
            self.num_open, self.admission, self.unread.num_bytes
        )
        stage.control_requests.find_request = self.recent.find

    @property
    def num_open(self) -> int:
        return len(self._table)

    @property
    def log(self) -> logging.Logger:
        return self._stage.log

    @property
    def replica(self) -> int:
        """Number of this gateway."""
        return self._stage.replica

    def get(self, request_id: int) -> PromptRequest | None:
        return self._table.get(request_id)

    def newest(self) -> Iterator[PromptRequest]:
        """Open prompt requests, the newest first. Don't await while iterating."""
        return reversed(self._table.values())

    def open_prompts(self) -> list[PromptRequest]:
        """Those whose closing messages have not all arrived, the oldest first."""
        return [one for one in self._table.values() if not one.is_closed]

    def submit_again(self, prompt_request: PromptRequest) -> None:
        """Send a request, which a stage has lost, again. It has its credits already."""
        submit = prompt_request.submit
        self._stage.log.debug("submitted again", extra=log_fields(prompt_request, attempt=submit.attempt))
        prompt_request.ingest = self._ingest_of(submit.request_id)
        self._send(self._ingests[prompt_request.ingest], submit)
        if prompt_request.is_aborted or prompt_request.is_released:
            self._send_abort(prompt_request)

    def withdraw(self, prompt_request: PromptRequest) -> None:
        """Have the stages forget a request, which keeps its place here until `submit_withdrawn`."""
        if prompt_request.is_confirmed:
            self.send_closed(prompt_request.id, prompt_request.submit.attempt)
        else:  # submitted again after the death of a stage: schedule refuses it when it comes
            self._send_abort(prompt_request)
        prompt_request.is_preempted, prompt_request.is_confirmed = True, False

    def submit_withdrawn(self, prompt_request: PromptRequest) -> None:
        """Submit a request that was withdrawn."""
        prompt_request.is_preempted = False
        self.submit_again(prompt_request)

    def give_up(self, prompt_request: PromptRequest) -> None:
        """Close a request that kills a stage: it is not submitted again."""
        if prompt_request.generates:
            self._send_abort(prompt_request)
            self.send_closed(prompt_request.id, prompt_request.submit.attempt)
        self._close(prompt_request)

    def drop_unsent(self, name: str) -> None:
        """A stage's process has died: drop what waits for it."""
        lost = self._stage.outboxes.get(name)
        self._unsent = deque((outbox, message) for outbox, message in self._unsent if outbox is not lost)

    def rescaled(self) -> None:
        """The number of ingests or gateways in the stage's settings has changed."""
        self._ingests = self._stage.outboxes_of("ingest")
        self.admission.max_sequences = topology.max_open_of_one(self._stage.settings)
        self.admission.max_tokens = topology.max_open_tokens_of_one(self._stage.settings)
        self.admission.max_bytes = topology.max_open_bytes_of_one(self._stage.settings)

    async def idle(self) -> None:
        """Wait until nothing is open. The caller sets the deadline."""
        await self._idle.wait()

    # ------------------------------------------------------------------------------------------------------------ open

    def check_room(self, body_bytes: int = 0) -> None:
        """Call it before the body is read. Raises ApiError, 503, if no request with a body of this size would be
        admitted."""
        self._check_late_stages(generates=False)
        try:
            self.admission.check_room(time.monotonic(), body_bytes)
        except ApiError as error:
            self.count_overloaded(error)
            raise

    def _check_late_stages(self, *, generates: bool) -> None:
        try:
            self.late_stages.check(generates=generates)
        except ApiError as error:
            self.log_rejected(error)
            raise

    def count_overloaded(self, error: ApiError) -> None:
        """Count a request that an admission limit refused."""
        self.metrics.num_overloaded += 1
        self.metrics.num_overloaded_by_size += isinstance(error, Overloaded) and error.by_size
        self.log_rejected(error)

    def log_rejected(self, error: ApiError | None = None) -> None:
        """Log requests that got 503, at most once a second. Call it without an error once per heartbeat."""
        if error is not None:
            self._num_rejected += 1
            self._rejection = {"code": error.code, "why": error.message}
        self._rejection_log.update(self._num_rejected, **self._rejection)

    def timed_out(self, timeout_s: float) -> ApiError:
        """Count a request that timed out before it was opened. Returns its error, 504."""
        self.metrics.num_timed_out += 1
        return timeout_error(timeout_s)

    def open(self, parsed: ParsedRequest, received: Received | None) -> Request:
        """Create a prompt request for each prompt and send them to ingest. `received` is for a recording, and None in a
        replay. Raises ApiError: 503 if too much is open or a stage is late, 504 if the deadline has passed already."""
        begin_s = time.monotonic()
        self._check_late_stages(generates=not parsed.is_prompt_only)
        timeout_s, after_s = self._time_of(parsed)
        if parsed.received_s and not self._stage.replay_context.is_replaying and begin_s >= parsed.received_s + after_s:
            raise self.timed_out(timeout_s)
        try:
            request = self._open(parsed, received)
        except ApiError as error:
            if error.code == "overloaded":
                self.count_overloaded(error)
            raise
        if parsed.left_out and not parsed.is_prompt_only and not self._stage.replay_context.is_replaying:
            self._num_left_out += len(parsed.left_out)
            self._left_out_log.update(self._num_left_out, types=", ".join(parsed.left_out))
        if self._trace.on:
            ids = [one.id for one in request.prompt_requests]
            self._trace.span("submit", begin_s, time.monotonic(), {"response_id": request.id}, ids)
        return request

    def _open(self, parsed: ParsedRequest, received: Received | None) -> Request:
        replay = self._stage.replay_context
        self.num_opened += 1
        if parsed.size is None:
            parsed = measured(parsed)
        sized, fixed = size_of(parsed), fixed_bytes(parsed.options)
        estimates = [self.admission.estimate(one, is_computed=not parsed.is_prompt_only) for one in sized.num_tokens]
        now_s = time.monotonic()
        reply_bytes, sizes = sized.reply_bytes, submitted_bytes(parsed, fixed)
        usage: RequestUsage | None = None
        if not replay.is_replaying:  # a recording has only what was admitted
            parsed, usage = self._admitted(parsed, sum(estimates), now_s, reply_bytes + sum(sizes))
        if replay.is_recording:
            replay.event("open", self.num_opened, msgspec.json.encode(received))
        cost = output_cost(parsed, self.hidden_size)
        request = Request(parsed, self._stage, self.num_opened, self.formats, cost, fixed)
        request.usage = usage
        self._register(request)
        self.keep(request, reply_bytes, reply_bytes)
        for prompt, estimate, size in zip(parsed.prompts, estimates, sizes, strict=True):
            submit = self._submit(parsed, prompt)
            ingest = self._ingest_of(submit.request_id)
            if not self._ingests[ingest].send(submit):
                self.release(request)
                raise overloaded("the queue to its stages is full")
            prompt_request = PromptRequest(submit, request, _sequences(parsed), estimate, size, size, ingest)
            request.prompt_requests.append(prompt_request)
            request.sequences += prompt_request.sequences
            request.num_open += 1
            self.admission.take(parsed.num_sequences, estimate, now_s, size)
            self._table[prompt_request.id] = prompt_request
            self._idle.clear()
            if prompt_request.generates:
                self.metrics.opened(parsed.num_sequences, parsed.n, self._max_tokens_of(parsed))
            self._stage.log.debug("opened", extra=log_fields(prompt_request, response_id=request.id))
        self._set_deadline(request)
        return request

    def _admitted(
        self, parsed: ParsedRequest, num_tokens: int, now_s: float, num_bytes: int
    ) -> tuple[ParsedRequest, RequestUsage | None]:
        """The request, with its bounds, and what counts it for its key. Raises ApiError: 503 if too much is open, 400
        if it would never fit, 429 if its key has used its limit. What is open depends on more than a recording has, so
        a refusal is recorded."""
        admission = self.admission
        try:
            if self._unsent:
                raise overloaded("the queue to its stages is full")
            parsed = bounded(parsed, admission.max_request_bytes, self.hidden_size, admission.max_prompt_tokens)
            admission.admit(len(parsed.prompts) * parsed.num_sequences, num_tokens, now_s, num_bytes)
            usage = self._usage_of(parsed, num_tokens)
        except ApiError as error:
            self._stage.replay_context.event("refused", self.num_opened, error.message.encode())
            raise
        return parsed, usage

    def _usage_of(self, parsed: ParsedRequest, num_tokens: int) -> RequestUsage | None:
        """Count the request for its API key. Raises RateLimited."""
        if (account := self.accounts.of_scope(parsed.scope)) is None:
            return None
        if parsed.is_prompt_only:
            account.count(REQUESTS)
            return None
        return RequestUsage(account, num_tokens)

    def count_usage(self) -> None:
        """Count what open requests have used. Call it once per heartbeat."""
        if self.accounts.keys is not None:
            for request in {id(one.request): one.request for one in self._table.values()}.values():
                if request.usage is not None and not request.is_released:
                    request.usage.update(request)

    def _max_tokens_of(self, parsed: ParsedRequest) -> int | None:
        """What the client asks for, for metrics: no more than the model can generate."""
        given, most = parsed.options.max_tokens, self.admission.max_prompt_tokens
        return given if given is None or most is None else min(given, most)

    def _submit(self, parsed: ParsedRequest, prompt: m.Prompt) -> m.Submit:
        replay = self._stage.replay_context
        # The client's seed is used for each prompt, so that a list gives what each prompt gives alone. Without one,
        # equal prompts get different outputs.
        seed = replay.randbits(64) if parsed.seed is None else parsed.seed
        cache_salt = parsed.options.cache_salt
        if not self._shares_cache:
            cache_salt = scoped_salt(parsed.scope, cache_salt)
        return m.Submit(
            request_id=replay.randbits(63),
            attempt=FIRST_ATTEMPT,
            gateway=self._stage.replica,
            arrival_s=replay.time(),
            prompt=prompt,
            options=msgspec.structs.replace(parsed.options, seed=seed, cache_salt=cache_salt),
            outputs=list(parsed.outputs),
            prompt_options=parsed.prompt_options,
            gateway_incarnation=self._stage.launch.incarnation,
            template_s=0.0 if parsed.resumption is None else parsed.resumption.arrival_s,
            scope_id=scope_id(parsed.scope),
        )

    def keep(self, request: Request, num_bytes: int, num_base_bytes: int | None = None) -> None:
        """Count what a request keeps until its response is over, besides its prompt requests, as `num_bytes`. If
        `num_base_bytes` is given, it is the part without output."""
        num_base_bytes = request.num_base_bytes if num_base_bytes is None else num_base_bytes
        self.admission.change_bytes(num_bytes - request.num_bytes, num_base_bytes - request.num_base_bytes)
        request.num_bytes, request.num_base_bytes = num_bytes, num_base_bytes

    def count_log(self, log: ResponseLog) -> None:
        """Count the events of a background response, once for all clients that read them: a client that reads slowly
        keeps them although the request is over, and its response perhaps not stored any more."""
        num_bytes = log.num_bytes if log.num_readers else 0
        self.admission.change_bytes(num_bytes - log.num_counted)
        log.num_counted = num_bytes

    def count_output(self, prompt_request: PromptRequest, num_more: int) -> None:
        """Count more or fewer bytes for the output of an open prompt request."""
        prompt_request.num_bytes += num_more
        self.admission.change_bytes(num_more)

    def count_base(self, prompt_request: PromptRequest, num_bytes: int) -> None:
        """Count this many bytes for an open prompt request without its output."""
        num_more = num_bytes - prompt_request.base_bytes
        prompt_request.base_bytes = num_bytes
        prompt_request.num_bytes += num_more
        self.admission.change_bytes(num_more, num_more)

    def _set_deadline(self, request: Request) -> None:
        request.timeout_s, after_s = self._time_of(request.parsed)
        if request.timeout_s and not self._stage.replay_context.is_replaying:
            self._by_number[request.number] = request
            self._deadlines.add(request.number, request.received_s + after_s)

    def _time_of(self, parsed: ParsedRequest) -> tuple[float, float]:
        """What a request may take in all, for errors, and from its arrival here on; 0 and infinite without a limit."""
        timeout_s = parsed.timeout_s or self._timeout_s
        after_s = timeout_s - parsed.age_s if timeout_s else math.inf
        if parsed.left_s is None:
            return timeout_s, after_s
        return timeout_s or parsed.left_s, min(after_s, parsed.left_s)

    def _register(self, request: Request) -> None:
        if not request.parsed.is_prompt_only:
            self.num_requests += 1
            for abort_id in request.abort_ids:
                self._by_abort_id.setdefault((request.parsed.scope, abort_id), []).append(request)

    def _unregister(self, request: Request) -> None:
        if not request.parsed.is_prompt_only:
            self.num_requests -= 1
            for abort_id in request.abort_ids:
                key = request.parsed.scope, abort_id
                self._by_abort_id[key].remove(request)
                if not self._by_abort_id[key]:
                    del self._by_abort_id[key]

    # ------------------------------------------------------------------------------------------------- abort, release

    def abort(self, abort_ids: list[str], scope: str) -> list[int]:
        """Abort the requests with these ids in a scope; their clients get finish_reason `abort`. Returns the positions
        of the ids that were found. Idempotent."""
        found = []
        for place, abort_id in enumerate(abort_ids):
            if requests := self._by_abort_id.get((scope, abort_id)):
                found.append(place)
            for request in requests or ():
                self._abort(request, "abort request")
        return found

    def stop(self, request: Request) -> None:
        """Abort a request whose client still has to read its output. Idempotent."""
        if not all(one.is_finished or one.is_aborted for one in request.prompt_requests):
            self._stage.replay_context.event("stop", request.number)
            self._abort(request, "abort request")

    def expire(self, request: Request) -> None:
        """A request has reached its deadline. If it has output, abort it and keep that; else fail it."""
        if request.is_finished or request.failure is not None:
            return  # only its client has not read everything yet
        self._stage.replay_context.event("timeout", request.number)
        self.metrics.num_timed_out += 1
        if any(sequence.num_generated for sequence in request.sequences):
            self._abort(request, "timeout")
            return
        for prompt_request in request.prompt_requests:
            self._stage.log.info("timed out", extra=log_fields(prompt_request, response_id=request.id))
        request.fail(timeout_error(request.timeout_s, has_dropped_output=request.has_dropped_output))

    def _fail_late(self) -> None:
        """A stage is late for longer than its timeout: fail the requests that wait for it."""
        for request in {id(one.request): one.request for one in self._table.values()}.values():
            if (error := self.late_stages.error_of(request)) is not None and not request.is_finished:
                self._stage.replay_context.event("late", request.number, error.message.encode())
                self.log_rejected(error)
                request.fail(error)

    def _abort(self, request: Request, why: str) -> None:
        for prompt_request in request.prompt_requests:
            if not (prompt_request.is_finished or prompt_request.is_released or prompt_request.is_aborted):
                prompt_request.is_aborted = True
                fields = log_fields(prompt_request, response_id=request.id, why=why)
                self._stage.log.info("aborted", extra=fields)
                if prompt_request.is_preempted:  # no stage has it
                    self._end_withdrawn(prompt_request)
                    request.wake()
                else:
                    self._send_abort(prompt_request)

    def _end_withdrawn(self, prompt_request: PromptRequest) -> None:
        """Close a request that was withdrawn, as its closing messages would."""
        now_s = self._stage.replay_context.monotonic()
        for sequence in prompt_request.sequences:
            if sequence.finish == m.Finish.NONE:
                sequence.finish, sequence.ended_s = m.Finish.ABORT, now_s
                self.metrics.ended(m.Finish.ABORT)
        prompt_request.is_preempted = False
        self._close(prompt_request)

    def release(self, request: Request) -> None:
        """The response is over, complete or not: abort what is still open, and settle what is closed. Idempotent."""
        if request.is_released:
            return
        self._stage.replay_context.event("leave", request.number)
        request.is_released = True
        if request.usage is not None:
            request.usage.update(request, is_last=True)
        if self._by_number.pop(request.number, None) is not None:
            self._deadlines.remove(request.number)
        self._unregister(request)
        self.keep(request, 0, 0)
        has_finished = request.prompt_requests and request.is_finished and request.failure is None
        if has_finished and not request.parsed.is_prompt_only:
            now_s = time.monotonic()
            self.recent.keep(timings.times_of(request, now_s), request.parsed.scope)
            for prompt_request in request.prompt_requests:
                took_s = round(now_s - request.received_s, 4)
                fields = log_fields(prompt_request, response_id=request.id, took_s=took_s)
                self._stage.log.debug("finished", extra=fields)
        for prompt_request in request.prompt_requests:
            if prompt_request.is_closed:
                self._settle(prompt_request)
            else:
                self._release(prompt_request)

    def _release(self, prompt_request: PromptRequest) -> None:
        prompt_request.is_released = True
        num_before = prompt_request.num_output_bytes
        prompt_request.drop_output()
        self.count_output(prompt_request, prompt_request.num_output_bytes - num_before)
        if prompt_request.is_finished:
            self.close_if_finished(prompt_request)  # only its prompt's ids were still expected
        elif prompt_request.is_preempted:
            self._end_withdrawn(prompt_request)
        else:
            self._stage.log.info("aborted", extra=log_fields(prompt_request, response_id=prompt_request.request.id))
            self._send_abort(prompt_request)

    def _send_abort(self, prompt_request: PromptRequest) -> None:
        """Abort it in the stages that may hold it. Its sequences still get their closing messages."""
        abort = m.Abort(prompt_request.id, prompt_request.submit.attempt)
        self._send(self._stage.outbox("ingest", prompt_request.ingest), abort)
        if prompt_request.generates:
            self._send(self._schedule, abort)

    def send_aborts(self, request_id: int, attempt: int) -> None:
        """Abort a request that may be anywhere."""
        abort = m.Abort(request_id, attempt)
        for ingest in self._ingests:
            self._send(ingest, abort)
        self._send(self._schedule, abort)

    def send_closed(self, request_id: int, attempt: int) -> None:
        """Have schedule forget a request."""
        self._closed.append(closed := m.Closed(request_id, attempt))
        self._send(self._schedule, closed)

    def repeat_closed(self) -> None:
        """Schedule has died. Its successor may have got requests, and even finished them, before this gateway learned
        of it: then their `Closed` was lost. It ignores those of requests that it does not have."""
        for closed in self._closed:
            self._send(self._schedule, closed)

    def fail_all(self, error: ApiError, *, is_leaving: bool = False) -> None:
        """Fail all open requests."""
        self._stage.replay_context.event("fail all", data=b"leaving" if is_leaving else b"")
        for request in {id(one.request): one.request for one in self._table.values()}.values():
            request.fail(error)

    def close_all(self, error: ApiError) -> None:
        """Fail and close all requests: no closing messages will arrive any more."""
        for prompt_request in list(self._table.values()):
            prompt_request.request.fail(error)
            self._close(prompt_request)
        self._unsent.clear()
        self.late_stages.close()

    # ----------------------------------------------------------------------------------------------------------- close

    def close_if_finished(self, prompt_request: PromptRequest) -> None:
        """Close a prompt request if all its sequences have finished and its prompt's ids have arrived or are not
        needed."""
        is_incomplete = (
            prompt_request.prompt_ids is None
            and not prompt_request.is_released
            and not prompt_request.is_aborted
            and prompt_request.request.failure is None
        )
        if prompt_request.is_finished and not is_incomplete and not prompt_request.is_closed:
            if prompt_request.generates:
                self.send_closed(prompt_request.id, prompt_request.submit.attempt)
            self._close(prompt_request)

    def _close(self, prompt_request: PromptRequest) -> None:
        if not prompt_request.is_closed:
            prompt_request.is_closed = True
            prompt_request.request.num_open -= 1
        if prompt_request.request.is_released:
            self._settle(prompt_request)

    def _settle(self, prompt_request: PromptRequest) -> None:
        """Return its credits."""
        if self._table.pop(prompt_request.id, None) is not None:
            self.admission.give(
                prompt_request.submit.options.n,
                prompt_request.num_counted,
                time.monotonic(),
                prompt_request.num_bytes,
                prompt_request.base_bytes,
            )
        if not self._table:
            self._idle.set()
        if self.admission.num_preempted:
            self.on_room()

    # ------------------------------------------------------------------------------------------------------------ send

    def flush(self) -> None:
        """Send what full sockets refused. Call it once per wake."""
        while self._unsent:
            outbox, message = self._unsent[0]
            if not outbox.send(message):
                return
            self._unsent.popleft()

    def _ingest_of(self, request_id: int) -> int:
        """The replica of ingest for a new request."""
        return topology.shard(request_id, len(self._ingests))

    def _send(self, outbox: Any, message: m.Abort | m.Closed | m.Submit) -> None:
        if self._unsent or not outbox.send(message):  # in order: a Closed must not overtake its Abort
            self._unsent.append((outbox, message))


def _sequences(parsed: ParsedRequest) -> list[SequenceOutput]:
    if not parsed.outputs:
        return [SequenceOutput() for _ in range(parsed.num_sequences)]
    return [
        SequenceOutput(
            ids=bytearray(ids),
            num_received=len(ids) // ID_BYTES,
            is_resumed=bool(ids) and not parsed.options.repeats_received,
        )
        for ids in parsed.outputs
    ]


def log_fields(prompt_request: PromptRequest, **fields: Any) -> dict[str, Any]:
    return {"fields": {"request": f"{prompt_request.id:x}", **fields}}
