"""Response bodies of the Messages API, and what they share with its stream events. Pure."""

import time
from typing import assert_never

import msgspec
from msgspec import Raw

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.conversation import CALL_ID_PREFIX
from pipeline.stages.gateway.apis.anthropic.types import (
    ContentBlock,
    CountTokensReply,
    MessageReply,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from pipeline.stages.gateway.dialect import trace_write
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.chat import ReplyReader
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

NO_INPUT = Raw(b"{}")
"""The input of a tool call whose arguments are not known, or not a JSON object."""

_encoder = msgspec.json.Encoder()


class MessageReader:
    """Splits the output of a request into text, reasoning and tool calls."""

    def __init__(self, request: Request) -> None:
        (prompt_request,), (sequence,) = request.prompt_requests, request.sequences
        self._reader = None if request.parsed.reply is None else ReplyReader(request, prompt_request, sequence, 0)

    @property
    def is_waiting(self) -> bool:
        """As in `ReplyReader`."""
        return self._reader is not None and self._reader.is_waiting

    def events(self, text: str) -> list[Event]:
        """The events of new text."""
        if not text:
            return []
        return [Content(text)] if self._reader is None else self._reader.events(text)

    def rest(self) -> list[Event]:
        """The remaining events at the end."""
        return [] if self._reader is None else self._reader.rest_events()

    def call_id(self, index: int) -> str:
        """The id of a call in Anthropic's form, or the one that the model wrote and expects back."""
        assert self._reader is not None
        if (written := self._reader.written_id(index)) is not None:
            return written
        return CALL_ID_PREFIX + self.plain_call_id(index).removeprefix("call_")

    def plain_call_id(self, index: int) -> str:
        """As in `ReplyReader`."""
        assert self._reader is not None
        return self._reader.call_id(index)

    def stop_of(self, sequence: SequenceOutput) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence` of a reply that was read completely."""
        match sequence.finish:
            case m.Finish.LENGTH:
                return "max_tokens", None
            case m.Finish.ABORT:
                return "pause_turn", None
        if isinstance(sequence.stop_reason, str):
            return "stop_sequence", sequence.stop_reason
        has_calls = self._reader is not None and self._reader.has_complete_calls
        return "tool_use" if has_calls else "end_turn", None


def usage_of(request: Request) -> MessagesUsage:
    num_cached = request.num_cached_tokens
    return MessagesUsage(request.num_prompt_tokens - num_cached, 0, num_cached, request.num_output_tokens)


def whole(request: Request) -> bytes:
    """The response body of a finished request."""
    (sequence,) = request.sequences
    reader = MessageReader(request)
    events = reader.events(sequence.take_text())
    content = _content([*events, *reader.rest()], reader)
    stop_reason, stop_sequence = reader.stop_of(sequence)
    begin_s = time.monotonic()
    body = _encoder.encode(
        MessageReply(
            id=request.id,
            content=content,
            model=request.parsed.model,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage_of(request),
        )
    )
    trace_write(request, begin_s, body)
    return body


def _content(events: list[Event], reader: MessageReader) -> list[ContentBlock]:
    """The blocks of a complete reply."""
    blocks: list[ContentBlock] = []
    arguments: list[str] = []
    last: ToolUseBlock | None = None
    for event in events:
        match event, blocks[-1] if blocks else None:
            case Content(text), TextBlock() as block:
                block.text += text
            case Content(text), _:
                blocks.append(TextBlock(text))
            case Reasoning(text), ThinkingBlock() as block:
                block.thinking += text
            case Reasoning(text), _:
                blocks.append(ThinkingBlock(text))
            case CallBegun(index, name), _:
                arguments, last = [], ToolUseBlock(reader.call_id(index), name, NO_INPUT)
                blocks.append(last)
            case Arguments(_, text), _:
                arguments.append(text)
            case CallEnded(), _:
                assert last is not None
                last.input = object_or_empty("".join(arguments))
                last = None
            case _:
                assert_never(event)
    if last is not None:  # the reply ended within the call, perhaps behind its arguments
        last.input = object_or_empty("".join(arguments))
    return blocks


def object_or_empty(arguments: str) -> Raw:
    """The arguments as the model wrote them, if they are a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Raw])  # a number may be larger than any float
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return NO_INPUT
    return Raw(arguments.encode())


def counted(request: Request) -> bytes:
    """The response body of /v1/messages/count_tokens."""
    return _encoder.encode(CountTokensReply(request.num_prompt_tokens))
