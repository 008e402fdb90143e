"""The table of open requests: opens, aborts and releases them, and owns the credits that bound them.

    open ──Submit──► (Accepted) ──► Deltas, Deltas, … ──► closed ──Closed──► removed
                         └────────────► Rejected ───────────┘

`open` creates one prompt request for each prompt. A prompt request is closed when all its sequences have finished and
its prompt's ids have arrived, if anything still needs them. It is removed when, besides, its response is over: then its
credits, one for each sequence, its prompt's tokens and the bytes that it keeps, are returned (see admission.py). If a
response ends early, `release` aborts its open prompt requests; they stay in the table until their closing messages have
arrived. A request that reaches its deadline is aborted like one aborted by id, or fails if it has no token yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from pipeline.http_server.access.key_accounts import KeyAccounts
from pipeline.runtime import messages as m
from pipeline.runtime.log.event_log import EventLog
from pipeline.runtime.log.limited_log import LimitedLog
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admission import open_bytes
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.admission.unread import UnreadOutput, unread_replies
from pipeline.stages.gateway.admission.usage import RequestUsage, usage_of
from pipeline.stages.gateway.errors import ApiError, overloaded, timeout_error
from pipeline.stages.gateway.metrics import GatewayMetrics
from pipeline.stages.gateway.open_requests import timings
from pipeline.stages.gateway.open_requests.abort_ids import AbortIds
from pipeline.stages.gateway.open_requests.deadlines import RequestDeadlines
from pipeline.stages.gateway.open_requests.late_stages import LateStages
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, log_fields
from pipeline.stages.gateway.open_requests.rejections import Rejections
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.stage_sender import StageSender
from pipeline.stages.gateway.open_requests.submit import new_sequences, new_submits
from pipeline.stages.gateway.open_requests.timings import RecentRequests
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.received import Received
from pipeline.text.formats.chat_formats import ChatFormats


class RequestTable:
    """Open requests, by the ids that the stages know them by."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", formats: ChatFormats) -> None:
        """`formats` are the model's."""
        self._stage = stage
        self.sender = StageSender(stage)
        self.formats = formats
        self.accounts = KeyAccounts.inherited(stage.launch.keys_fd, stage.launch.usage_fd, stage.replica)
        """Of API keys, which a replay has not: the effects of their limits are in the recording."""
        self.num_opened = 0
        """Calls of `open`, including those that were refused."""
        self._table: dict[int, PromptRequest] = {}
        self.abort_ids = AbortIds()
        self.admission = Admission.of(stage.settings)
        self.unread = unread_replies(stage.settings, stage.log)
        """Replies that clients have not taken, besides those of open requests."""
        self.unread_output = UnreadOutput(self, self.unread.deliveries)
        self.on_room: Callable[[], None] = lambda: None
        """Called when a request is removed while others wait for its bytes."""
        self.hidden_size: int | None = None
        """Length of an embedding; None until it is known."""
        self._deadlines = RequestDeadlines(stage.settings.gateway.request_timeout_s, self.expire)
        # In a replay nothing is late: the effects are in the recording.
        late_s = 0.0 if stage.replay_context.is_replaying else stage.settings.gateway.late_stage_timeout_s
        self.late_stages = LateStages(late_s, self._fail_late)
        self._left_out_log = EventLog(stage.log, "left out tools that only their provider runs")
        self._idle = asyncio.Event()
        self._idle.set()
        self._trace = stage.trace
        self.metrics = GatewayMetrics()
        self.rejections = Rejections(self.metrics, stage.log)
        self.limited_log = LimitedLog(stage.log)
        self.recent = RecentRequests()
        stage.control_requests.own_counts = lambda: self.metrics.counts(
            self.num_open, self.admission, self.unread.num_bytes, self.unread.deliveries.num_given_up
        )
        stage.control_requests.find_request = self.recent.find

    @property
    def num_open(self) -> int:
        return len(self._table)

    @property
    def num_requests(self) -> int:
        """Requests for output whose responses are not over."""
        return self.abort_ids.num_requests

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
        self.sender.submit_again(prompt_request)
        if prompt_request.is_aborted or prompt_request.is_released:
            self.sender.abort(prompt_request)

    def rescaled(self) -> None:
        """The number of ingests or gateways in the stage's settings has changed."""
        self.sender.rescaled()
        self.admission.rescale(self._stage.settings)

    async def idle(self) -> None:
        """Wait until nothing is open. The caller sets the deadline."""
        await self._idle.wait()

    # ------------------------------------------------------------------------------------------------------------ open

    def check_room(self, body_bytes: int = 0, media_bytes: int = 0) -> None:
        """Call it before the body is read. Raises ApiError, 503, if no request with a body of this size would be
        admitted, or none with so many bytes of images."""
        self._check_late_stages(generates=False)
        try:
            self.unread_output.check_room(body_bytes, media_bytes)
        except ApiError as error:
            self.rejections.overloaded(error)
            raise

    def _check_late_stages(self, *, generates: bool) -> None:
        try:
            self.late_stages.check(generates=generates)
        except ApiError as error:
            self.rejections.log(error)
            raise

    def open(self, parsed: ParsedRequest, received: Received | None) -> Request:
        """Create a prompt request for each prompt and send them to ingest. `received` is for a recording, and None in a
        replay. Raises ApiError: 503 if too much is open or a stage is late, 504 if the deadline has passed already."""
        begin_s = time.monotonic()
        self._check_late_stages(generates=not parsed.is_prompt_only)
        timeout_s, after_s = self._deadlines.time_of(parsed)
        if parsed.received_s and not self._stage.replay_context.is_replaying and begin_s >= parsed.received_s + after_s:
            raise self.rejections.timed_out(timeout_s)
        try:
            request = self._open(parsed, received)
        except ApiError as error:
            if error.code == "overloaded":
                self.rejections.overloaded(error)
            raise
        if parsed.left_out and not parsed.is_prompt_only and not self._stage.replay_context.is_replaying:
            self._left_out_log.add(len(parsed.left_out), types=", ".join(parsed.left_out))
        if self._trace.on:
            ids = [one.id for one in request.prompt_requests]
            self._trace.span("submit", begin_s, time.monotonic(), {"response_id": request.id}, ids)
        return request

    def _open(self, parsed: ParsedRequest, received: Received | None) -> Request:
        replay = self._stage.replay_context
        self.num_opened += 1
        parsed = open_bytes.measured(parsed) if parsed.size is None else parsed
        sized, fixed = open_bytes.size_of(parsed), open_bytes.fixed_bytes(parsed.options)
        estimates = [self.admission.estimate(one, is_computed=not parsed.is_prompt_only) for one in sized.num_tokens]
        now_s = time.monotonic()
        reply_bytes, sizes = sized.reply_bytes, open_bytes.submitted_bytes(parsed, fixed)
        outputs = open_bytes.pooled_bytes(parsed, self.hidden_size, self.admission.max_prompt_tokens)
        usage: RequestUsage | None = None
        if not replay.is_replaying:  # a recording has only what was admitted
            parsed, usage = self._admitted(parsed, sum(estimates), now_s, reply_bytes + sum(sizes), sum(outputs))
        if replay.is_recording:
            replay.event("open", self.num_opened, msgspec.json.encode(received))
        cost = open_bytes.output_cost(parsed, self.hidden_size)
        request = Request(parsed, self._stage, self.num_opened, self.formats, cost, fixed)
        request.usage = usage
        self.abort_ids.add(request)
        self.admission.keep(request, reply_bytes, reply_bytes)
        submits, is_logged = new_submits(self._stage, parsed), self._stage.log.isEnabledFor(logging.DEBUG)
        ingests = self.sender.submit(submits)
        for submit, ingest, estimate, size, output in zip(submits, ingests, estimates, sizes, outputs, strict=True):
            if ingest is None:
                continue
            prompt_request = PromptRequest(
                submit, request, new_sequences(parsed), estimate, size + output, size, ingest
            )
            prompt_request.sequences[0].num_bytes = output
            request.prompt_requests.append(prompt_request)
            request.sequences += prompt_request.sequences
            request.num_open += 1
            self.admission.take(parsed.num_sequences, estimate, now_s, size, output)
            self.admission.media.take(prompt_request, now_s)
            self._table[prompt_request.id] = prompt_request
            self._idle.clear()
            if prompt_request.generates:
                most = self.admission.most_output(parsed.options.max_tokens)
                self.metrics.opened(parsed.num_sequences, parsed.n, most)
            if is_logged:
                self._stage.log.debug("opened", extra=log_fields(prompt_request, response_id=request.id))
        if None in ingests:
            self.release(request)
            raise overloaded("the queue to its stages is full")
        if parsed.is_pooled:
            self.metrics.pooled(parsed.task)
        self._set_deadline(request)
        return request

    def _admitted(
        self, parsed: ParsedRequest, num_tokens: int, now_s: float, num_bytes: int, num_output_bytes: int
    ) -> tuple[ParsedRequest, RequestUsage | None]:
        """The request, with its bounds, and what counts it for its key. Raises ApiError: 503 if too much is open, 400
        if it would never fit, 429 if its key has used its limit. What is open depends on more than a recording has, so
        a refusal is recorded."""
        admission = self.admission
        try:
            if self.sender.is_full:
                raise overloaded("the queue to its stages is full")
            parsed = open_bytes.bounded(
                parsed, admission.max_request_bytes, self.hidden_size, admission.max_prompt_tokens
            )
            self.unread_output.admit(parsed, num_tokens, now_s, num_bytes, num_output_bytes)
            usage = usage_of(self.accounts, parsed, num_tokens)
        except ApiError as error:
            self._stage.replay_context.event("refused", self.num_opened, error.message.encode())
            raise
        return parsed, usage

    def count_usage(self) -> None:
        """Count what open requests have used. Call it once per heartbeat."""
        if self.accounts.keys is not None:
            for request in {id(one.request): one.request for one in self._table.values()}.values():
                if request.usage is not None and not request.is_released:
                    request.usage.update(request)

    def _set_deadline(self, request: Request) -> None:
        request.timeout_s, after_s = self._deadlines.time_of(request.parsed)
        if request.timeout_s and not self._stage.replay_context.is_replaying:
            self._deadlines.add(request, after_s)

    # ------------------------------------------------------------------------------------------------- abort, release

    def abort(self, abort_ids: list[str], scope: str) -> list[int]:
        """Abort the requests with these ids in a scope; their clients get finish_reason `abort`. Returns the positions
        of the ids that were found. Idempotent."""
        found = []
        for index, abort_id in enumerate(abort_ids):
            if requests := self.abort_ids.find(abort_id, scope):
                found.append(index)
            for request in requests:
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
            self.limited_log.info("timed out", request=prompt_request.name, response_id=request.id)
        request.fail(timeout_error(request.timeout_s, has_dropped_output=request.has_dropped_output))

    def _fail_late(self) -> None:
        """A stage is late for longer than its timeout: fail the requests that wait for it."""
        for request in {id(one.request): one.request for one in self._table.values()}.values():
            if (error := self.late_stages.error_of(request)) is not None and not request.is_finished:
                self._stage.replay_context.event("late", request.number, error.message.encode())
                self.rejections.log(error)
                request.fail(error)

    def _abort(self, request: Request, why: str) -> None:
        for prompt_request in request.prompt_requests:
            if not (prompt_request.is_finished or prompt_request.is_released or prompt_request.is_aborted):
                prompt_request.is_aborted = True
                self.limited_log.info("aborted", request=prompt_request.name, response_id=request.id, why=why)
                if prompt_request.is_preempted:  # no stage has it
                    self._end_withdrawn(prompt_request)
                    request.wake()
                else:
                    self.sender.abort(prompt_request)

    def _end_withdrawn(self, prompt_request: PromptRequest) -> None:
        """Close a request that was withdrawn, as its closing messages would."""
        now_s = self._stage.replay_context.monotonic()
        for sequence in prompt_request.sequences:
            if sequence.finish == m.Finish.NONE:
                sequence.finish, sequence.ended_s = m.Finish.ABORT, now_s
                self.metrics.ended(m.Finish.ABORT)
        prompt_request.is_preempted = False
        self.close(prompt_request)

    def release(self, request: Request) -> None:
        """The response is over, complete or not: abort what is still open, and settle what is closed. Idempotent."""
        if request.is_released:
            return
        self._stage.replay_context.event("leave", request.number)
        request.release()
        if request.usage is not None:
            request.usage.update(request, is_last=True)
        self._deadlines.remove(request)
        self.abort_ids.remove(request)
        self.admission.keep(request, 0, 0)
        has_finished = request.prompt_requests and request.is_finished and request.failure is None
        if has_finished and not request.parsed.is_prompt_only:
            now_s = time.monotonic()
            self.recent.keep(request, timings.times_of(request, now_s))
            logged = request.prompt_requests if self._stage.log.isEnabledFor(logging.DEBUG) else ()
            for prompt_request in logged:
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
        self.admission.count_output(prompt_request, prompt_request.num_output_bytes - num_before)
        if prompt_request.is_finished:
            self.close_if_finished(prompt_request)  # only its prompt's ids were still expected
        elif prompt_request.is_preempted:
            self._end_withdrawn(prompt_request)
        else:
            response_id = prompt_request.request.id
            self.limited_log.info("aborted", request=prompt_request.name, response_id=response_id)
            self.sender.abort(prompt_request)

    def fail_all(self, error: ApiError, name: bytes = b"") -> None:
        """Fail all open requests. `name` is that of the error in recordings."""
        self._stage.replay_context.event("fail all", data=name)
        for request in {id(one.request): one.request for one in self._table.values()}.values():
            request.fail(error)

    def close_all(self, error: ApiError) -> None:
        """Fail and close all requests: no closing messages will arrive any more."""
        for prompt_request in list(self._table.values()):
            prompt_request.request.fail(error)
            self.close(prompt_request)
        self.sender.clear()
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
                self.sender.close(prompt_request.id, prompt_request.submit.attempt)
            self.close(prompt_request)

    def close(self, prompt_request: PromptRequest) -> None:
        """No more messages about it will arrive, or they are not needed."""
        if not prompt_request.is_closed:
            prompt_request.is_closed = True
            prompt_request.request.num_open -= 1
            self.admission.media.give(prompt_request, time.monotonic())
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
