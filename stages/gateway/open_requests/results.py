"""Applies what the stages send to open requests: Accepted, Rejected, Deltas.

Results and `Accepted` take different ways, so results may overtake it. Messages about requests that are not in the
table any more are dropped; if the sender still works on such a request, an `Abort` is sent.
"""

import time
from http import HTTPStatus

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.runtime.tracing import Args
from pipeline.stages.gateway.admission.open_bytes import accepted_bytes, output_bytes
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.early_ends import EarlyEnds
from pipeline.stages.gateway.open_requests.prompt_request import ID_BYTES, PromptRequest, SequenceOutput, log_fields
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.request_errors import rejection_error, sampling_param, sequence_error
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.token_detail_options import too_many

ABORTED = "aborted"
"""Error code of ingest and schedule for a request that was aborted before it started."""


class ResultHandler:
    """Updates the requests of a table and wakes the tasks that write their responses."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", table: RequestTable) -> None:
        self._stage = stage
        self._table = table
        self._metrics = table.metrics
        self._unpublished: dict[int, Request] = {}
        """By number: requests with output of this turn."""
        self._pieces: dict[bytes, bytes] = {}
        """The bytes of tokens in token outputs, once each: log probabilities name the same tokens again and again."""
        self._early_ends: EarlyEnds | None = None

    def publish(self) -> None:
        """Pass on the output of all messages of a turn. Call it at the end of the turn."""
        requests, self._unpublished = self._unpublished, {}
        for request in requests.values():
            request.publish()

    def end_early(self, early_ends: EarlyEnds) -> None:
        """End open replies as the operator has chosen, from now on. Those without output go on."""
        self._early_ends = early_ends
        if early_ends.at != "now":
            return
        for prompt_request in self._table.open_prompts():
            if early_ends.may_end(prompt_request) and not prompt_request.is_preempted:
                for sequence in prompt_request.sequences:
                    if sequence.num_generated and sequence.finish == m.Finish.NONE:
                        self._end_early(prompt_request, sequence, early_ends)
                self._unpublished[prompt_request.request.number] = prompt_request.request

    def _end_early(self, prompt_request: PromptRequest, sequence: SequenceOutput, early_ends: EarlyEnds) -> None:
        """End a sequence that the stages go on with. They forget the request when all of its sequences have ended."""
        early_ends.close(prompt_request, sequence)
        sequence.ended_s = self._stage.replay_context.monotonic()
        if all(one is sequence or one.finish != m.Finish.NONE for one in prompt_request.sequences):
            self._table.sender.abort(prompt_request)
        self._finish(prompt_request, sequence, m.Finish.LENGTH, None)

    def handle(self, message: m.Deltas | m.Accepted | m.Rejected) -> None:
        match message:
            case m.Deltas():
                with self._table.sender.together():
                    self.deltas(message)
            case m.Accepted():
                self.accepted(message)
            case m.Rejected():
                self.rejected(message)

    def accepted(self, message: m.Accepted) -> None:
        """Ingest has tokenized a prompt.

        If the request is not in the table, do not abort it: it was closed while this message was on its way, and the
        `Abort` would stay in schedule for ever. A request that never was in the table is aborted at its first delta.
        """
        ids = self._stage.arrays.take(message.prompt_ids, np.int32)
        prompt_request = self._table.get(message.request_id)
        if prompt_request is None or prompt_request.submit.attempt != message.attempt:
            return
        if prompt_request.prompt_ids is not None:
            return
        request = prompt_request.request
        packed = ids.astype("<i4", copy=False).tobytes()
        prompt_request.prompt_ids = np.frombuffer(packed, np.int32)
        self._table.admission.correct(prompt_request.num_counted, len(ids))
        self._table.admission.media.accepted(prompt_request, len(ids))
        prompt_request.num_counted = len(ids)
        prompt_request.prompt_text, prompt_request.token_strs = message.text, message.token_strs
        prompt_request.pieces, prompt_request.tail = self._once(message.pieces), message.tail
        prompt_request.began_s, prompt_request.done_s = message.began_s, message.done_s
        request.num_accepted += 1
        self._check_num_prompt_logprobs(request, len(ids))
        if request.parsed.echo:
            prompt_request.echo()
        self._drop_prompt(prompt_request, message, packed)
        if prompt_request.generates:
            for sequence in prompt_request.sequences:
                if sequence.finish in (m.Finish.STOP, m.Finish.LENGTH) and not prompt_request.is_released:
                    # its results have overtaken this message
                    self._metrics.prompt(len(ids), request.parsed.task)
            self._table.close_if_finished(prompt_request)
        else:
            for sequence in prompt_request.sequences:
                self._finish(prompt_request, sequence, m.Finish.LENGTH, None)
        request.wake()

    def _drop_prompt(self, prompt_request: PromptRequest, message: m.Accepted, packed: bytes) -> None:
        """Keep the ids of a prompt instead of the prompt: if it is submitted again, nothing is tokenized, rendered, cut
        or checked again. `packed` are the ids, int32."""
        request, submit = prompt_request.request, prompt_request.submit
        options = submit.options
        if message.compiled_grammar is not None:
            options = msgspec.structs.replace(options, grammar=None, compiled_grammar=message.compiled_grammar)
        if message.reasoning_budget is not None:
            options = msgspec.structs.replace(options, reasoning_budget=message.reasoning_budget)
        if message.segment_start:
            options = msgspec.structs.replace(options, segment_start=message.segment_start)
        if prompt_request.generates:
            prompt_request.submit = msgspec.structs.replace(
                submit,
                prompt=m.IdsPrompt(packed),
                options=options,
                prompt_options=m.PromptOptions(lowers_max_tokens=submit.prompt_options.lowers_max_tokens),
            )
        self._table.admission.count_base(
            prompt_request, accepted_bytes(prompt_request.submit, message, request.fixed_bytes)
        )
        if request.is_accepted:
            request.drop_prompts()

    def _once(self, pieces: list[bytes] | None) -> list[bytes] | None:
        """These pieces, equal ones as one object."""
        known = self._pieces
        return None if pieces is None else [known.setdefault(piece, piece) for piece in pieces]

    def _check_num_prompt_logprobs(self, request: Request, num_ids: int) -> None:
        """Count the prompt logprobs of one more accepted prompt, and fail the request if there are too many. A reply
        repeats them for each choice, so it may be many times larger than what was computed."""
        parsed, caps = request.parsed, self._stage.settings.limits
        is_repeated = parsed.dialect.repeats_prompt_logprobs and (parsed.echo or not parsed.stream)
        request.num_prompt_logprobs += parsed.details.num_of_prompt(num_ids, parsed.n if is_repeated else 1)
        if request.num_prompt_logprobs > caps.max_prompt_logprobs:
            error = too_many(parsed.details, request.num_prompt_logprobs, caps)
            request.fail(ApiError(error.status, error.message, sampling_param(request, error.param), error.code))

    def _contradicted(self, prompt_request: PromptRequest, error: AssertionError) -> None:
        """A delta does not follow what has arrived. The client gets an error, and nothing that may be wrong; the other
        requests go on."""
        self._stage.log.error("output is missing", exc_info=error, extra=log_fields(prompt_request))
        message = "the server lost a part of this request's output"
        prompt_request.request.fail(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="output_lost"))

    def rejected(self, message: m.Rejected) -> None:
        """A stage can't run a request. All its sequences end."""
        prompt_request = self._find(message.request_id, message.attempt, is_open=False)
        if prompt_request is None or prompt_request.is_closed:
            return
        request, failure = prompt_request.request, message.failure
        if prompt_request.is_aborted and failure.code == ABORTED:
            for sequence in prompt_request.sequences:
                self._finish(prompt_request, sequence, m.Finish.ABORT, None)
            request.wake()
            return
        if not prompt_request.is_released:
            fields = {"request": prompt_request.name, "status": failure.status, "why": failure.message}
            self._table.limited_log.info("rejected", **fields)
            request.fail(rejection_error(prompt_request, failure))
        prompt_request.is_rejected = True
        for sequence in prompt_request.sequences:
            self._finish(prompt_request, sequence, m.Finish.ERROR, None)

    def deltas(self, message: m.Deltas) -> None:
        """Text and ids of some sequences have arrived. `publish` passes them on."""
        begin = 0
        now_s = self._stage.replay_context.monotonic()
        first_of = {first.index: first for first in message.firsts} if message.firsts else {}
        drafts_of = {counts.index: counts for counts in message.drafts} if message.drafts else {}
        spans_of = (
            dict(zip(message.special_indices, message.special_spans, strict=True)) if message.special_indices else {}
        )
        gaps: dict[tuple[float, int], int] = {}
        """Sequences by the time of their previous ids and by the number of new ones. Those of one message have one
        time, so there are few keys."""
        errors = iter(message.errors)
        if message.prompt_indices:
            self._extend_prompt_logprobs(message)
        marked: list[int] = []
        """Requests that began or ended with this message, for traces."""
        for i, request_id in enumerate(message.request_ids):
            end = begin + message.num_ids[i] * ID_BYTES
            ids, begin = message.ids[begin:end], end
            finish = message.finishes[i]
            error = next(errors, "") if finish == m.Finish.ERROR else ""
            prompt_request = self._find(request_id, message.attempts[i], is_open=finish == m.Finish.NONE)
            if prompt_request is None:
                continue
            sequence = prompt_request.sequences[message.indexes[i]]
            if sequence.finish != m.Finish.NONE:
                continue
            request = prompt_request.request
            prompt_request.is_confirmed = True
            if drafts_of:
                sequence.drafts = drafts_of.get(i, sequence.drafts)
            if not request.is_released:
                if spans_of:
                    sequence.extend_special_spans(spans_of.get(i, b""))
                if not request.parsed.hides_output and not self._extend(prompt_request, sequence, message, i, ids):
                    continue
                request.has_begun = True
                if num_ids := message.num_ids[i]:
                    last_s, num_gaps = sequence.last_s, num_ids
                    if not last_s:
                        sequence.first, sequence.first_s = first_of.get(i), now_s
                        self._metrics.first_s.observe(now_s - request.received_s)
                        marked.append(request_id)
                        last_s, num_gaps = now_s, num_ids - 1
                    gaps[last_s, num_gaps] = gaps.get((last_s, num_gaps), 0) + 1
                    sequence.last_s = now_s
            if finish != m.Finish.NONE:
                marked.append(request_id)
                sequence.settled_s, sequence.sent_s, sequence.ended_s = message.settled_s, message.sent_s, now_s
                self._finish(prompt_request, sequence, finish, message.stop_reasons[i], error)
            elif self._early_ends is not None and self._early_ends.ends(prompt_request, message.texts[i]):
                sequence.settled_s, sequence.sent_s = message.settled_s, message.sent_s
                self._end_early(prompt_request, sequence, self._early_ends)
            self._unpublished[request.number] = request
        self._observe(gaps, now_s)
        if (trace := self._stage.trace).on:
            args: Args = {"sequences": len(message.request_ids), "tokens": len(message.ids) // ID_BYTES}
            trace.span("deltas", now_s, time.monotonic(), args, marked)

    def _observe(self, gaps: dict[tuple[float, int], int], now_s: float) -> None:
        """Count the gaps between tokens. Those that come together share the time since the token before them."""
        for (last_s, num_gaps), num_sequences in gaps.items():
            if num_gaps:
                self._metrics.gap_s.observe((now_s - last_s) / num_gaps, num_sequences * num_gaps)

    def _extend(
        self, prompt_request: PromptRequest, sequence: SequenceOutput, message: m.Deltas, i: int, ids: bytes
    ) -> bool:
        """Append entry `i` of a message to a sequence. Returns whether it follows what has arrived."""
        token_outputs = message.token_outputs[i] if message.token_outputs else b""
        pieces = (self._once(message.pieces[i]) or []) if message.pieces else []
        try:
            sequence.extend(
                message.texts[i], message.text_offsets[i], ids, message.id_offsets[i], token_outputs, pieces
            )
        except AssertionError as missing:
            self._contradicted(prompt_request, missing)
            return False
        self._count_output(prompt_request, sequence)
        return True

    def _count_output(self, prompt_request: PromptRequest, sequence: SequenceOutput) -> None:
        """Count what a sequence keeps now. What a stream has sent since its last output is counted no more."""
        size = output_bytes(prompt_request.request.output_cost, sequence)
        self._table.admission.count_output(prompt_request, size - sequence.num_bytes)
        sequence.num_bytes = size

    def _extend_prompt_logprobs(self, message: m.Deltas) -> None:
        each = zip(
            message.prompt_indices, message.prompt_offsets, message.prompt_logprobs, message.prompt_pieces, strict=True
        )
        for index, offset, logprobs, pieces in each:
            prompt_request = self._table.get(message.request_ids[index])
            if (
                prompt_request is not None
                and prompt_request.submit.attempt == message.attempts[index]
                and not prompt_request.request.is_released
            ):
                num_before = prompt_request.num_output_bytes
                prompt_request.extend_prompt_logprobs(offset, logprobs, self._once(pieces) or [])
                self._table.admission.count_output(prompt_request, prompt_request.num_output_bytes - num_before)

    def _find(self, request_id: int, attempt: int, *, is_open: bool = True) -> PromptRequest | None:
        """The prompt request that a message is about. Returns None for a message of an earlier attempt, and if there is
        no such request; then schedule forgets it, and it is aborted if `is_open`: if the sender goes on with it."""
        prompt_request = self._table.get(request_id)
        if prompt_request is None:
            if is_open:
                self._table.sender.abort_anywhere(request_id, attempt)
            self._table.sender.close(request_id, attempt)
            return None
        return prompt_request if prompt_request.submit.attempt == attempt else None

    def _finish(
        self,
        prompt_request: PromptRequest,
        sequence: SequenceOutput,
        finish: int,
        stop_reason: str | int | None,
        error: str = "",
    ) -> None:
        if sequence.finish != m.Finish.NONE:
            return
        request = prompt_request.request
        if finish == m.Finish.ERROR and not prompt_request.is_released and request.failure is None:
            self._table.limited_log.info("failed", request=prompt_request.name, why=error)
            request.fail(sequence_error(prompt_request, error))
        if request.parsed.hides_output and finish == m.Finish.STOP:
            finish, stop_reason = m.Finish.LENGTH, None  # the hidden id is the one that stopped it
        sequence.finish = finish
        sequence.stop_reason = stop_reason
        if prompt_request.generates:
            self._count(prompt_request, sequence, finish)
        self._table.close_if_finished(prompt_request)

    def _count(self, prompt_request: PromptRequest, sequence: SequenceOutput, finish: int) -> None:
        """Update the metrics with a sequence that has ended."""
        if prompt_request.is_released:
            self._metrics.ended(m.Finish.ABORT)
        elif prompt_request.is_rejected:
            self._metrics.rejected()
        elif finish not in (m.Finish.STOP, m.Finish.LENGTH):
            self._metrics.ended(finish)
        else:
            now_s = self._stage.replay_context.monotonic()
            decode_s = sequence.last_s - sequence.first_s
            self._metrics.finished(finish, now_s - prompt_request.request.received_s, decode_s, sequence.num_generated)
            if prompt_request.prompt_ids is not None:  # otherwise `accepted` counts it
                self._metrics.prompt(len(prompt_request.prompt_ids), prompt_request.request.parsed.task)
            if prompt_request.is_finished:
                self._metrics.longest(max(one.num_generated for one in prompt_request.sequences))
