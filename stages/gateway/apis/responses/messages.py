"""Converts the items of a conversation to the messages of a chat. Pure.

An assistant's turn may be several items: reasoning, messages, and function calls. A chat has one message for them. A
turn goes on until an item that is not the assistant's, or until a message follows a message.
"""

from collections.abc import Sequence

import msgspec

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.items import (
    CallItem,
    CallOutputItem,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
)
from pipeline.stages.gateway.apis.responses.tools import chat_name
from pipeline.stages.gateway.errors import invalid, shown
from pipeline.stages.gateway.parsing.chat.custom_tools import arguments_of
from pipeline.stages.gateway.parsing.chat.images import ChatImages


class _Turn(msgspec.Struct):
    """Items of an assistant that become one message. Text and reasoning that other items interrupt go on where they
    ended, as in a chat."""

    reasoning: list[str] = []
    parts: list[str] | None = None
    calls: list[m.ToolCall] = []

    last: type[Item] | None = None
    """The type of the item that was added last."""

    def add(self, texts: list[str]) -> None:
        """Add the texts of a message."""
        self.parts = _continued(self.parts or [], texts)

    def add_reasoning(self, texts: list[str]) -> None:
        is_interrupted = self.last is not ReasoningItem
        self.reasoning = _continued(self.reasoning, texts) if is_interrupted else [*self.reasoning, *texts]

    def message(self) -> m.ChatMessage:
        content = None if self.parts is None and self.calls else "\n".join(self.parts or ())
        parts = self.parts if self.parts is not None and len(self.parts) > 1 else None
        reasoning = "\n".join(self.reasoning) or None
        return m.ChatMessage("assistant", content, parts=parts, tool_calls=self.calls, reasoning=reasoning)


def messages_of(
    instructions: str | None, items: Sequence[Item], num_stored: int, images: ChatImages
) -> list[m.ChatMessage]:
    """The messages of a conversation, whose images are added to `images`. `num_stored` of the items come from the
    previous response; the others are the field `input`. Raises ApiError if an output answers no call, or for an image
    that can't be sent."""
    found = [] if instructions is None else [m.ChatMessage("system", instructions)]
    turn: _Turn | None = None
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        is_own = not isinstance(item, CallOutputItem) and (
            not isinstance(item, MessageItem) or item.role == "assistant"
        )
        if turn is not None and (not is_own or (isinstance(item, MessageItem) and turn.last is MessageItem)):
            found.append(turn.message())
            turn = None
        if is_own and turn is None:
            turn = _Turn()
        at = f"input[{index - num_stored}]" if index >= num_stored else ""
        match item:
            case MessageItem(role="assistant") if turn is not None:
                turn.add(_texts(item.content))
            case MessageItem():
                texts, offsets = (
                    _texts(item.content),
                    _add_images(at and f"{at}.content", item.role, item.content, images),
                )
                parts = texts if len(texts) > 1 or offsets else None
                found.append(m.ChatMessage(item.role, "\n".join(texts), parts=parts, image_offsets=offsets))
            case FunctionCallItem() | CustomToolCallItem() if turn is not None:
                call_ids.add(item.call_id)
                turn.calls.append(_call(item))
            case ReasoningItem() if turn is not None:
                turn.add_reasoning([part.text for part in item.content or item.summary])
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                if item.call_id not in call_ids:
                    param = f"input[{index - num_stored}].call_id"
                    message = f"'{param}' is {shown(item.call_id)!r}, and no call before it has this call_id"
                    raise invalid(param, message, "invalid_value")
                found.append(_result(at and f"{at}.output", item, images))
        if turn is not None:
            turn.last = type(item)
    if turn is not None:
        found.append(turn.message())
    return found


def _call(item: CallItem) -> m.ToolCall:
    arguments = item.arguments if isinstance(item, FunctionCallItem) else arguments_of(item.input)
    name = chat_name(item.name, item.namespace) if item.namespace else item.name
    return m.ToolCall(item.call_id, name, arguments)


def _continued(before: list[str], texts: list[str]) -> list[str]:
    if not before or not texts:
        return [*before, *texts]
    return [*before[:-1], before[-1] + texts[0], *texts[1:]]


_Part = OutputText | InputText | InputImage | Refusal


def _result(at: str, item: CallOutputItem, images: ChatImages) -> m.ChatMessage:
    if isinstance(item.output, str):
        return m.ChatMessage("tool", item.output, tool_call_id=item.call_id)
    texts, offsets = _texts(item.output), _add_images(at, "tool", item.output, images)
    return m.ChatMessage("tool", "\n".join(texts), parts=texts, tool_call_id=item.call_id, image_offsets=offsets)


def _texts(given: Sequence[_Part]) -> list[str]:
    texts = [part for part in given if not isinstance(part, InputImage)]
    return [part.refusal if isinstance(part, Refusal) else part.text for part in texts]


def _add_images(at: str, role: str, given: Sequence[_Part], images: ChatImages) -> list[int]:
    """Add the images among parts. `at` is the path of these; empty if they come from the previous response. Returns
    how many texts are before each."""
    offsets, num_texts = [], 0
    for index, part in enumerate(given):
        if not isinstance(part, InputImage):
            num_texts += 1
            continue
        where = f"{at}[{index}]" if at else "previous_response_id"
        images.check(where, role, '{"type": "input_text", "text": "…"}')
        if not part.image_url:
            raise invalid(f"{where}.image_url", f"'{where}.image_url' is required: this server stores no files")
        images.add_url(f"{where}.image_url" if at else where, part.image_url, part.detail, f"{where}.detail")
        offsets.append(num_texts)
    return offsets
