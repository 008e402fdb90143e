"""Replies of POST /infill in llama.cpp's shape, complete and as stream events. Pure."""

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.http_server.apis.openai import error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.reply import framed
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents, trace_write
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.timings import times_of

STOP_TYPES = ("eos", "word", "limit", "none")
PREFILL, FIRST_TOKEN = 4, 5
"""Indexes of the stamps in `SequenceTimings` at which the prefill starts and ends."""
Milliseconds = Annotated[float, Meta(description="In milliseconds.")]

_encoder = msgspec.json.Encoder()


class InfillTimings(msgspec.Struct):
    prompt_n: Annotated[int, Meta(description="Prompt tokens that were not found in the prefix cache.")]
    prompt_ms: Milliseconds
    predicted_n: Annotated[int, Meta(description="Output tokens.")]
    predicted_ms: Milliseconds


class InfillReply(msgspec.Struct, kw_only=True):
    """POST /infill; each event of its stream has the same shape, and the last one has the figures."""

    index: int = 0
    content: str
    stop: Annotated[bool, Meta(description="Whether it is the last event.")]
    model: str | UnsetType = UNSET
    tokens_predicted: Annotated[int, Meta(description="Number of output tokens.")] | UnsetType = UNSET
    tokens_evaluated: Annotated[int, Meta(description="Number of prompt tokens.")] | UnsetType = UNSET
    tokens_cached: Annotated[int, Meta(description="Prompt tokens found in the prefix cache.")] | UnsetType = UNSET
    truncated: Annotated[bool, Meta(description="false: prompts are not truncated.")] | UnsetType = UNSET
    stop_type: (
        Annotated[
            str,
            Meta(
                description="none: the request was aborted, or reached its deadline.",
                extra_json_schema={"enum": list(STOP_TYPES)},
            ),
        ]
        | UnsetType
    ) = UNSET
    stopping_word: Annotated[str, Meta(description="The stop string that ended it.")] | UnsetType = UNSET
    timings: InfillTimings | UnsetType = UNSET


def whole(request: Request) -> bytes:
    """The response body of a finished request."""
    (sequence,) = request.sequences
    begin_s = time.monotonic()
    body = _encoder.encode(_last(request, sequence.take_text()))
    trace_write(request, begin_s, body)
    return body


class InfillEvents(ReplyEvents):
    """The events of one streamed response."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        (self._sequence,) = request.sequences

    @property
    def are_over(self) -> bool:
        return self._request.is_finished and self._request.failure is None and not self._sequence.pending

    def _due(self) -> Iterator[bytes]:
        if text := self._sequence.take_text():
            yield framed(_encoder.encode(InfillReply(content=text, stop=False)))

    def ended(self) -> bytes:
        return framed(_encoder.encode(_last(self._request, "")))

    def failed(self, error: ApiError) -> bytes:
        return framed(error_json(error))


class InfillDialect(Dialect):
    """/infill"""

    id_prefix = "cmpl-"
    prompt_field = "input_prefix"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        return whole(request)

    def events(self, request: Request) -> InfillEvents:
        return InfillEvents(request)


INFILL = InfillDialect()


def _last(request: Request, content: str) -> InfillReply:
    """The object with the figures of a finished request."""
    (sequence,) = request.sequences
    (times,) = times_of(request).sequences
    stamps_s, num_cached = times.stamps_s, request.num_cached_tokens
    word = sequence.stop_reason if isinstance(sequence.stop_reason, str) else ""
    stop_type = {m.Finish.LENGTH: "limit", m.Finish.ABORT: "none"}.get(m.Finish(sequence.finish), "eos")
    return InfillReply(
        content=content,
        stop=True,
        model=request.parsed.model,
        tokens_predicted=request.num_output_tokens,
        tokens_evaluated=request.num_prompt_tokens,
        tokens_cached=num_cached,
        truncated=False,
        stop_type="word" if word else stop_type,
        stopping_word=word,
        timings=InfillTimings(
            request.num_prompt_tokens - num_cached,
            _ms(stamps_s[FIRST_TOKEN] - stamps_s[PREFILL]),
            request.num_output_tokens,
            _ms(stamps_s[-1] - stamps_s[FIRST_TOKEN]),
        ),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
