"""Stream events of the Messages API. Pure.

    message_start, one or more blocks, message_delta, message_stop

A block is content_block_start, content_block_delta …, content_block_stop; a ping follows the start of the first. An
empty reply has no block. A failed request ends with an `error` event instead, within a block or between two.
"""

from collections.abc import Iterator
from typing import assert_never

import msgspec

from pipeline.http_server.apis.anthropic import ID_HEADER, error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.names import own_field
from pipeline.stages.gateway.apis.anthropic.reply import NO_INPUT, MessageReader, usage_of, whole
from pipeline.stages.gateway.apis.anthropic.types import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageReply,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

_encoder = msgspec.json.Encoder()
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""Clients ignore it."""


class MessageEvents(ReplyEvents):
    """The events of one streamed response."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        (self._sequence,) = request.sequences
        self._reader = MessageReader(request)
        self._open: type[ContentBlock] | None = None
        """The type of the block that has begun and not ended."""
        self._num_begun = 0
        self._is_over = False

    @property
    def are_over(self) -> bool:
        return self._is_over and self._request.is_finished and self._request.failure is None

    def _first(self) -> bytes:
        """Output may overtake the prompt's ids: these have arrived."""
        usage = usage_of(self._request)
        usage.output_tokens = 0
        message = MessageReply(
            id=self._request.id,
            content=[],
            model=self._request.parsed.model,
            stop_reason=None,
            stop_sequence=None,
            usage=usage,
        )
        return framed(MessageStart(message))

    def _due(self) -> Iterator[bytes]:
        return map(framed, self._new())

    def _new(self) -> Iterator[MessageEvent]:
        if self._is_over or self._reader.is_waiting:
            return
        is_over = self._sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
        found = self._reader.events(self._sequence.take_text())
        if is_over:
            found += self._reader.rest()
            self._is_over = True
        for event in found:
            yield from self._events_of(event)
        if is_over:
            yield from self._end()

    def _events_of(self, event: Event) -> Iterator[MessageEvent]:
        match event:
            case Content(text):
                if text:
                    yield from self._within(TextBlock(""))
                    yield self._delta(TextDelta(text))
            case Reasoning(text):
                if text:
                    yield from self._within(ThinkingBlock(""))
                    yield self._delta(ThinkingDelta(text))
            case CallBegun(index, name):
                yield from self._end()
                yield from self._begin(ToolUseBlock(self._reader.call_id(index), name, NO_INPUT))
            case Arguments(_, text):
                yield self._delta(InputJsonDelta(text))
            case CallEnded():
                yield from self._end()
            case _:
                assert_never(event)

    def ended(self) -> bytes:
        stop = StopDelta(*self._reader.stop_of(self._sequence))
        return framed(MessageDelta(stop, usage_of(self._request))) + framed(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_json(error, self._request.id) + b"\n\n"

    def _within(self, block: ContentBlock) -> Iterator[MessageEvent]:
        """Begin a block, unless one of its type is open."""
        if self._open is not type(block):
            yield from self._end()
            yield from self._begin(block)

    def _begin(self, block: ContentBlock) -> Iterator[MessageEvent]:
        self._open = type(block)
        self._num_begun += 1
        yield ContentBlockStart(self._num_begun - 1, block)
        if self._num_begun == 1:
            yield Ping()

    def _delta(self, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> ContentBlockDelta:
        return ContentBlockDelta(self._num_begun - 1, delta)

    def _end(self) -> Iterator[MessageEvent]:
        if self._open is not None:
            self._open = None
            yield ContentBlockStop(self._num_begun - 1)


def framed(event: MessageEvent) -> bytes:
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


class MessagesDialect(Dialect):
    """/v1/messages"""

    id_prefix = "msg_"
    keep_alive = PING
    is_resumable = True
    begins_with_usage = True

    def whole(self, request: Request) -> bytes:
        return whole(request)

    def events(self, request: Request) -> MessageEvents:
        return MessageEvents(request)

    def headers(self, request: Request) -> dict[str, str]:
        return {ID_HEADER: request.id}

    def field(self, name: str) -> str:
        return own_field(name)


MESSAGES = MessagesDialect()
