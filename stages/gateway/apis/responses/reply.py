"""Replies of POST /v1/responses: the response, complete or as the events of a stream. Pure.

stream   created · in_progress · events of the output … · completed, incomplete, or error and failed
         In the background: created · queued · in_progress when the output begins · …
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from msgspec import Raw

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admission.open_bytes import (
    ECHO_COPIES,
    FIRST_EVENTS,
    VALUE_BYTES,
    json_bytes,
    text_bytes,
    utf8_bytes,
)
from pipeline.stages.gateway.apis.openai.reply import usage_of
from pipeline.stages.gateway.apis.openai.types import ChatDelta
from pipeline.stages.gateway.apis.responses.body import renamed
from pipeline.stages.gateway.apis.responses.fields import ResponseFields
from pipeline.stages.gateway.apis.responses.items import Item, ReasoningItem, Status
from pipeline.stages.gateway.apis.responses.output import OutputBuilder
from pipeline.stages.gateway.apis.responses.types import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningEcho,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents, trace_write
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.replies.chat import ReplyReader
from pipeline.stages.gateway.replies.reasoning_tokens import num_reasoning_tokens
from pipeline.stages.gateway.replies.token_details import TokenDetailFormatter

SHUTTING_DOWN = "shutting_down"
"""Code of the error of requests that the server does not finish."""

_STATUSES: dict[m.Finish, ResponseStatus] = {
    m.Finish.STOP: "completed",
    m.Finish.LENGTH: "incomplete",
    m.Finish.ABORT: "cancelled",
}
"""By how the output ended; a request that ends with an error fails instead"""

_encoder = msgspec.json.Encoder()


def response_of(request: Request, status: ResponseStatus, output: list[Item]) -> ResponseObject:
    """The response, without usage."""
    parsed = request.parsed
    fields = reply_fields_of(request.parsed)
    return ResponseObject(
        id=request.id,
        created_at=request.created,
        status=status,
        background=fields.background,
        instructions=fields.instructions,
        max_output_tokens=fields.max_output_tokens,
        model=parsed.model,
        output=output,
        parallel_tool_calls=fields.parallel_tool_calls,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        reasoning=ReasoningEcho(fields.effort, fields.summary),
        safety_identifier=fields.safety_identifier,
        store=fields.store,
        temperature=parsed.options.temperature,
        text=Raw(fields.text.encode()),
        tool_choice=Raw(fields.tool_choice.encode()),
        tools=Raw(fields.tools.encode()),
        top_logprobs=fields.top_logprobs,
        top_p=parsed.options.top_p,
        truncation=fields.truncation,
        user=fields.user,
        metadata=fields.metadata,
    )


def whole(request: Request) -> bytes:
    """The response body of a finished request."""
    begin_s = time.monotonic()
    reader = _Reader(request)
    while reader.hold_part():
        pass
    for _ in itertools.chain(reader.read(), reader.finish()):
        pass
    response = _finished(request, reader.builder.items)
    _keep(request, response)
    body = _encoder.encode(response)
    trace_write(request, begin_s, body)
    return body


def failed(request: Request, error: ApiError, output: list[Item]) -> ResponseObject:
    """The response of a request that has failed. Background responses that a shutdown ends are cancelled."""
    is_cancelled = reply_fields_of(request.parsed).background and error.code == SHUTTING_DOWN
    response = response_of(request, "cancelled" if is_cancelled else "failed", output)
    code = error.code or ("server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt")
    response.error = ResponseError(code, error.message, error.param)
    _keep(request, response)
    return response


def _finished(request: Request, output: list[Item]) -> ResponseObject:
    (sequence,) = request.choices
    response = response_of(request, _STATUSES[m.Finish(sequence.finish)], output)
    if response.status == "incomplete":
        response.incomplete_details = IncompleteDetails("max_output_tokens")
    usage = usage_of(request)
    response.usage = ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(request.num_cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(_num_reasoning_tokens(request, output)),
        usage.total_tokens,
    )
    return response


def _num_reasoning_tokens(request: Request, output: list[Item]) -> int:
    (sequence,) = request.choices
    if not any(isinstance(item, ReasoningItem) for item in output):
        return 0
    return num_reasoning_tokens(request.formats, sequence) or 0


def _keep(request: Request, response: ResponseObject) -> None:
    if request.on_response is not None:
        request.on_response(response)


class _Reader:
    """Reads the only sequence of a request into output items."""

    def __init__(self, request: Request) -> None:
        self._request = request
        (self._prompt_request,) = request.prompt_requests
        (self._sequence,) = request.sequences
        self.builder = OutputBuilder(f"{request.salt:x}", reply_fields_of(request.parsed).called)
        self._reader = None
        if request.parsed.reply is not None:
            self._reader = ReplyReader(request, self._prompt_request, self._sequence, 0)
        self._formatter = TokenDetailFormatter(request, self._prompt_request, self._sequence)
        self.is_over = False
        """All output was read."""

    def hold_part(self) -> bool:
        """Give the builder a part of the logprobs that have arrived if they are too many for one turn of the event
        loop. Returns whether there was one: `read` comes later."""
        if not self._formatter.has_part:
            return False
        if (found := self._formatter.take_part().chat_logprobs) is not None:
            self.builder.hold(found.content)
        return True

    def read(self) -> Iterator[ResponseEvent]:
        """Read the output that has arrived since the last call."""
        if self.is_over or (self._reader is not None and self._reader.is_waiting):
            return
        is_over = self._sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
        text = self._sequence.take_text()
        deltas: list[ChatDelta] = []
        if self._reader is None:
            deltas = [ChatDelta(content=text)] if text else []
        else:
            deltas = self._reader.deltas(text) if text else []
            deltas += self._reader.rest() if is_over else []
        details = self._formatter.take(text)
        yield from self.builder.feed(deltas, details.chat_logprobs.content if details.chat_logprobs else ())
        self.is_over = is_over

    def finish(self) -> Iterator[ResponseEvent]:
        """End the output, all of which was read. Its events repeat it."""
        status: Status = "completed" if self._sequence.finish == m.Finish.STOP else "incomplete"
        yield from self.builder.finish(status)


class ResponseEvents(ReplyEvents):
    """The events of one streamed response."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._reader = _Reader(request)
        self._num_events = 0
        self._is_queued = False
        """A background response has not begun."""

    @property
    def are_over(self) -> bool:
        return self._reader.is_over and self._request.is_finished and self._request.failure is None

    def _first(self) -> bytes:
        self._is_queued = reply_fields_of(self._request.parsed).background
        status: ResponseStatus = "queued" if self._is_queued else "in_progress"
        response = response_of(self._request, status, [])
        names = ("created", status)
        return b"".join(self._framed(ResponseEvent(type=f"response.{name}", response=response)) for name in names)

    def _due(self) -> Iterator[bytes]:
        if self._is_queued and self._request.has_begun:
            self._is_queued = False
            response = response_of(self._request, "in_progress", [])
            yield self._framed(ResponseEvent(type="response.in_progress", response=response))
        self.has_more = self._reader.hold_part()
        if not self.has_more:
            yield from map(self._framed, self._reader.read())

    def ended(self) -> bytes:
        """Stores the response."""
        data = b"".join(map(self._framed, self._reader.finish()))
        response = _finished(self._request, self._reader.builder.items)
        _keep(self._request, response)
        name = "completed" if response.status == "completed" else "incomplete"
        event = ResponseEvent(type=f"response.{name}", response=response)
        return data + self._framed(event)

    def failed(self, error: ApiError) -> bytes:
        error = renamed(error)
        response = failed(self._request, error, self._reader.builder.items)
        assert response.error is not None
        event = ResponseEvent(type="error", code=response.error.code, message=error.message, param=error.param)
        return self._framed(event) + self._framed(ResponseEvent(type="response.failed", response=response))

    def _framed(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encoder.encode(event))


@dataclass(frozen=True)
class ResponsesDialect(Dialect):
    """/v1/responses"""

    fields: ResponseFields

    id_prefix = "resp_"
    takes_id = False  # clients refer to stored responses by their ids
    makes_ids = True
    ends_with_output = True
    prompt_field = "input"

    @property
    def keeps_events(self) -> bool:  # type: ignore[override]
        return self.fields.background

    def whole(self, request: Request) -> bytes:
        return whole(request)

    def events(self, request: Request) -> ResponseEvents:
        return ResponseEvents(request)

    def reply_bytes(self, *, stream: bool) -> int:
        fields = self.fields
        own = fields.instructions, fields.user, fields.prompt_cache_key, fields.safety_identifier
        raw = fields.text, fields.tool_choice, fields.tools  # JSON already
        size = fields.conversation_bytes + sum(map(text_bytes, own)) + sum(map(text_bytes, raw))
        size += sum(text_bytes(key) + text_bytes(value) + 2 * VALUE_BYTES for key, value in fields.metadata.items())
        for name, one in fields.called.items():
            size += text_bytes(name) + text_bytes(one.name) + text_bytes(one.namespace) + 2 * VALUE_BYTES
        repeated = sum(map(json_bytes, own)) + sum(map(utf8_bytes, raw)) + json_bytes(fields.metadata)
        return size + (FIRST_EVENTS if stream else ECHO_COPIES) * repeated


def reply_fields_of(parsed: ParsedRequest) -> ResponseFields:
    """What a request of this API asks for besides its output."""
    assert isinstance(parsed.dialect, ResponsesDialect)
    return parsed.dialect.fields
