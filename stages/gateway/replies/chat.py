"""Parses tool calls and reasoning in the replies to chats, complete or streamed. Pure.

The first delta of a tool call has its index, id, type, name and empty arguments; pieces of the arguments follow.
finish_reason is `tool_calls` if a complete reply has tool calls, and `stop` if the client named the function, as in
OpenAI and vLLM. A reply that ends within a tool call keeps its `length` or `stop`. Reasoning has two names: DeepSeek's
`reasoning_content`, and vLLM's newer `reasoning`.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import assert_never

from msgspec import UNSET

from pipeline.stages.gateway.apis.openai.types import (
    ChatDelta,
    CustomDelta,
    FunctionDelta,
    ReplyCustom,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
    ToolDelta,
)
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.chat.custom_tools import input_of
from pipeline.text.formats.chat_formats import ReplyParser
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning


class ReplyReader:
    """Parses one choice. `index` is its index."""

    def __init__(self, request: Request, prompt_request: PromptRequest, sequence: SequenceOutput, index: int) -> None:
        assert request.parsed.reply is not None
        self._parsing = request.parsed.reply
        self._request = request
        self._prompt_request = prompt_request
        self._sequence = sequence
        self._index = index
        self._num_calls = 0
        self._num_ended = 0
        self._ids: dict[int, str] = {}
        """The ids of calls that the model wrote, by index."""
        self._written: set[str] = set()
        """These ids"""
        self._reply_parser: ReplyParser | None = None
        self._custom: tuple[int, list[str]] | None = None
        """The index of the custom tool's call that is open in a stream, and its arguments so far"""

    @property
    def is_waiting(self) -> bool:
        """Whether parsing must wait until it is known how the reply begins, which output may overtake."""
        needs_tail = self._request.parsed.prompt_options.with_tail and not self._request.is_finished
        return needs_tail and self._prompt_request.prompt_ids is None

    def events(self, text: str) -> list[Event]:
        """The events for new text, which was taken from the sequence just now."""
        return _merged(self._kept(self._parser.push(text, self._sequence.take_special_spans())))

    def rest_events(self) -> list[Event]:
        """The remaining events at the end."""
        return _merged(self._kept(self._parser.finish()))

    def deltas(self, text: str) -> list[ChatDelta]:
        """The deltas for new text of a stream."""
        return list(self._deltas(self.events(text)))

    def rest(self) -> list[ChatDelta]:
        """The remaining deltas at the end of a stream."""
        return [*self._deltas(self.rest_events()), *self._end_custom()]

    def message(self, text: str) -> ReplyMessage:
        """The message for a complete text."""
        content, reasoning = [], []
        calls: list[tuple[int, str, list[str]]] = []
        for event in (*self.events(text), *self.rest_events()):
            match event:
                case Content(piece):
                    content.append(piece)
                case Reasoning(piece):
                    reasoning.append(piece)
                case CallBegun(index, name):
                    calls.append((index, name, []))
                case Arguments(index, piece):
                    calls[index][2].append(piece)
                case CallEnded():
                    pass
                case _:
                    assert_never(event)
        message = ReplyMessage("".join(content))
        if calls:
            message.tool_calls = [self._call(index, name, "".join(pieces)) for index, name, pieces in calls]
        if reasoning:
            message.reasoning_content = message.reasoning = "".join(reasoning)
        if not message.content and (calls or reasoning):
            message.content = None
        return message

    def _call(self, index: int, name: str, arguments: str) -> ReplyToolCall:
        if name in self._parsing.custom:
            return ReplyToolCall(self.call_id(index), UNSET, "custom", ReplyCustom(name, input_of(arguments)))
        return ReplyToolCall(self.call_id(index), ReplyFunction(name, arguments))

    def finish_reason(self, finish_reason: str) -> str:
        """The finish_reason of a choice that was parsed completely."""
        if finish_reason == "stop" and self.has_complete_calls and self._parsing.tool_choice != "named":
            return "tool_calls"
        return finish_reason

    @property
    def has_complete_calls(self) -> bool:
        """Whether there are tool calls, and the reply did not end within one."""
        return 0 < self._num_calls == self._num_ended

    @property
    def _parser(self) -> ReplyParser:
        if self._reply_parser is None:
            parsing = self._parsing
            self._reply_parser = self._request.formats.parser(
                parsing.tool_choice, parsing.tools, self._prompt_request.tail, shows_specials=parsing.shows_specials
            )
        return self._reply_parser

    def _kept(self, events: Iterable[Event]) -> list[Event]:
        """Filter events: without parallel_tool_calls only the first tool call, and reasoning only if requested."""
        kept: list[Event] = []
        for event in events:
            match event:
                case Content():
                    pass
                case Reasoning():
                    if not self._parsing.with_reasoning:
                        continue
                case CallBegun(index) | Arguments(index) | CallEnded(index):
                    if index and not self._parsing.parallel:
                        continue
                    if isinstance(event, CallBegun) and event.id and event.id not in self._written:
                        self._ids[index] = event.id
                        self._written.add(event.id)
                    self._num_calls += isinstance(event, CallBegun)
                    self._num_ended += isinstance(event, CallEnded)
                case _:
                    assert_never(event)
            kept.append(event)
        return kept

    def _deltas(self, events: Sequence[Event]) -> Iterable[ChatDelta]:
        for event in events:
            match event:
                case Content(text):
                    yield ChatDelta(content=text)
                case Reasoning(text):
                    yield ChatDelta(reasoning_content=text, reasoning=text)
                case CallBegun(index, name) if name in self._parsing.custom:
                    self._custom = (index, [])
                    custom = CustomDelta(name=name, input="")
                    yield ChatDelta(tool_calls=[ToolDelta(index, self.call_id(index), "custom", custom=custom)])
                case Arguments(index, text) if self._custom is not None and self._custom[0] == index:
                    self._custom[1].append(text)
                case CallEnded():
                    yield from self._end_custom()
                case CallBegun(index, name):
                    function = FunctionDelta(name=name, arguments="")
                    yield ChatDelta(tool_calls=[ToolDelta(index, self.call_id(index), "function", function)])
                case Arguments(index, text):
                    yield ChatDelta(tool_calls=[ToolDelta(index, UNSET, UNSET, FunctionDelta(arguments=text))])
                case _:
                    assert_never(event)

    def _end_custom(self) -> Iterable[ChatDelta]:
        """The input of the custom tool's call that is open, if one is: it is in JSON, which is read when it ends."""
        if self._custom is not None:
            (index, pieces), self._custom = self._custom, None
            custom = CustomDelta(input=input_of("".join(pieces)))
            yield ChatDelta(tool_calls=[ToolDelta(index, UNSET, UNSET, custom=custom)])

    def written_id(self, index: int) -> str | None:
        """The id that the model wrote for a call and expects back with the result; None if its format has none."""
        return self._ids.get(index)

    def call_id(self, index: int) -> str:
        """The id that the model wrote, or a unique one, which is the same in a replay."""
        if (written := self.written_id(index)) is not None:
            return written
        parsing = self._request.formats.tools_of(self._parsing.tool_choice)
        assert parsing is not None, "a tool call was parsed without a tool call format"
        seed = f"{self._request.salt:x} {self._index} {index}".encode()
        return parsing.call_id(int.from_bytes(hashlib.blake2b(seed, digest_size=16).digest()))


def _merged(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring events of one kind, for slow clients."""
    merged: list[Event] = []
    for (kind, index), run in itertools.groupby(events, _kind):
        match kind:
            case "content":
                merged.append(Content(_joined(run)))
            case "reasoning":
                merged.append(Reasoning(_joined(run)))
            case "arguments":
                merged.append(Arguments(index, _joined(run)))
            case _:
                merged += run
    return merged


def _kind(event: Event) -> tuple[str, int]:
    """What can be merged is equal."""
    match event:
        case Content():
            return "content", 0
        case Reasoning():
            return "reasoning", 0
        case Arguments(index):
            return "arguments", index
    return "", 0


def _joined(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content | Reasoning | Arguments))
