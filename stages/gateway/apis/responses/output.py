"""Builds the output of a response: items from the deltas of a reply, and the events about them. Pure.

    reasoning     added · part added · reasoning_text.delta … · done · part done · item done
    message       added · part added · output_text.delta …    · done · part done · item done
    function call added · function_call_arguments.delta …     · done ·             item done
    custom call   added · custom_tool_call_input.delta        · done ·             item done

One item is open at a time: the next one closes it.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from pipeline.stages.gateway.apis.openai.types import ChatDelta
from pipeline.stages.gateway.apis.responses.fields import CalledTool
from pipeline.stages.gateway.apis.responses.items import (
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    item_id,
)
from pipeline.stages.gateway.apis.responses.types import ResponseEvent
from pipeline.stages.gateway.parsing.chat.custom_tools import input_of
from pipeline.stages.gateway.replies.logprobs import TokenLogprob, packed


class OutputBuilder:
    """The output of one response. Take each event before the next one: events refer to items that change."""

    def __init__(self, seed: str, called: Mapping[str, CalledTool] = MappingProxyType({})) -> None:
        """`seed` makes the ids of items unique. `called`: as in `ResponseFields`."""
        self.items: list[Item] = []
        """Complete ones; the last one may be open."""
        self._seed = seed
        self._called = called
        self._is_open = False
        self._pieces: list[str] = []
        """Text of the open item."""
        self._logprobs: list[Any] = []
        """Of the open message: `TokenLogprob`s as JSON, which takes a third of the memory."""
        self._pending: list[tuple[bytes, Any]] = []
        """Of tokens whose text has not arrived: their bytes, and the same."""

    def feed(self, deltas: list[ChatDelta], logprobs: Iterable[TokenLogprob] = ()) -> Iterator[ResponseEvent]:
        """Add deltas, and the logprobs of the tokens that have arrived with them."""
        self.hold(logprobs)
        for index, delta in enumerate(deltas):
            if delta.content is not UNSET and delta.content:
                yield from self._text(delta.content, is_last=index == len(deltas) - 1)
            elif delta.reasoning is not UNSET and delta.reasoning:
                yield from self._reasoning(delta.reasoning)
            elif delta.tool_calls is not UNSET:
                for call in delta.tool_calls:
                    assert call.function is not UNSET, "custom tools are functions here until their item is built"
                    if call.id is not UNSET and call.function.name is not UNSET:
                        yield from self._begin_call(call.id, call.function.name)
                    if call.function.arguments:
                        yield from self._arguments(call.function.arguments)
        if deltas and not isinstance(self._last, MessageItem):
            self._pending.clear()  # only messages have logprobs

    def hold(self, logprobs: Iterable[TokenLogprob]) -> None:
        """Keep the logprobs of tokens whose text will be added later."""
        self._pending += ((bytes(one.bytes or ()), packed(one)) for one in logprobs)

    def finish(self, status: Status) -> Iterator[ResponseEvent]:
        """The output ends. `status` is that of its last item."""
        if not self.items:
            yield from self._begin_message()
        item = self._last
        if isinstance(item, MessageItem):
            self._logprobs += (one for _, one in self._pending)  # of the token that ended it
        yield from self._close(status)

    @property
    def _last(self) -> Item | None:
        return self.items[-1] if self.items else None

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _event(self, kind: str) -> ResponseEvent:
        """An event about the last item."""
        return ResponseEvent(type=f"response.{kind}", output_index=self._index, item_id=self.items[-1].id)

    def _id(self, kind: type) -> str:
        return item_id(kind, f"{self._seed} {len(self.items)}")

    def _begin(self, item: Item) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        yield ResponseEvent(type="response.output_item.added", output_index=self._index, item=item)

    # ---------------------------------------------------------------------------------------------------------- text

    def _begin_message(self) -> Iterator[ResponseEvent]:
        yield from self._begin(MessageItem(self._id(MessageItem), "assistant", "in_progress", []))
        yield replace(self._event("content_part.added"), content_index=0, part=OutputText(""))

    def _text(self, text: str, *, is_last: bool) -> Iterator[ResponseEvent]:
        """`is_last`: no other delta follows that has arrived with it."""
        is_first = not (self._is_open and isinstance(self._last, MessageItem))
        if is_first:
            yield from self._begin_message()
        logprobs = self._take_logprobs(text, is_alone=is_last and not is_first)
        self._pieces.append(text)
        self._logprobs += logprobs
        yield replace(self._event("output_text.delta"), content_index=0, delta=text, logprobs=logprobs)

    def _take_logprobs(self, text: str, *, is_alone: bool) -> list[Any]:
        """The logprobs to return with a text. `is_alone`: all pending ones belong to it. Otherwise tokens of reasoning
        or of a call have arrived with it: it has those whose bytes are in it."""
        pending = self._pending
        joined = b"".join(piece for piece, _ in pending)
        begin = -1 if is_alone else joined.rfind(text.encode())
        if begin < 0:
            self._pending = []
            return [one for _, one in pending]
        end = begin + len(text.encode())
        taken, rest, offset = [], [], 0
        for piece, one in pending:
            if offset >= end:
                rest.append((piece, one))
            elif offset + len(piece) > begin:
                taken.append(one)
            offset += len(piece)
        self._pending = rest
        return taken

    # ----------------------------------------------------------------------------------------------------- reasoning

    def _reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not (self._is_open and isinstance(self._last, ReasoningItem)):
            yield from self._begin(ReasoningItem(self._id(ReasoningItem), [], [], "in_progress"))
            yield replace(self._event("content_part.added"), content_index=0, part=ReasoningText(""))
        self._pieces.append(text)
        yield replace(self._event("reasoning_text.delta"), content_index=0, delta=text)

    # --------------------------------------------------------------------------------------------------------- calls

    def _begin_call(self, call_id: str, name: str) -> Iterator[ResponseEvent]:
        called = self._called.get(name, CalledTool(name))
        kind = CustomToolCallItem if called.is_custom else FunctionCallItem
        namespace = UNSET if called.namespace is None else called.namespace
        yield from self._begin(kind(self._id(kind), call_id, called.name, "", "in_progress", namespace))

    def _arguments(self, text: str) -> Iterator[ResponseEvent]:
        self._pieces.append(text)
        if isinstance(self._last, CustomToolCallItem):
            return  # they are JSON with the input in it, which is there when they have ended
        yield replace(self._event("function_call_arguments.delta"), delta=text)

    # --------------------------------------------------------------------------------------------------------- close

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        """Close the open item."""
        if not self._is_open:
            return
        self._is_open = False
        text = "".join(self._pieces)
        self._pieces.clear()
        match self.items[-1]:
            case MessageItem() as message:
                part = OutputText(text, logprobs=self._logprobs)
                message.content = [part]
                yield replace(self._event("output_text.done"), content_index=0, text=text, logprobs=self._logprobs)
                self._logprobs = []
                yield replace(self._event("content_part.done"), content_index=0, part=part)
            case ReasoningItem() as reasoning:
                thought = ReasoningText(text)
                reasoning.content = [thought]
                yield replace(self._event("reasoning_text.done"), content_index=0, text=text)
                yield replace(self._event("content_part.done"), content_index=0, part=thought)
            case FunctionCallItem() as call:
                call.arguments = text
                yield replace(self._event("function_call_arguments.done"), name=call.name, arguments=text)
            case CustomToolCallItem() as call:
                call.input = input_of(text)
                yield replace(self._event("custom_tool_call_input.delta"), delta=call.input)
                yield replace(self._event("custom_tool_call_input.done"), input=call.input)
        item = self.items[-1]
        item.status = status
        yield ResponseEvent(type="response.output_item.done", output_index=self._index, item=item)
