"""Translates the messages of Ollama's API to those of a chat request. Pure.

Ollama's tool calls may have no ids, and some chat templates need them: a call without one gets the number of the call,
and a result without one answers the first call that has no result yet, by its name if it has one.
"""

import itertools
from collections import deque
from collections.abc import Sequence

from pipeline.client.protocol.conversation import ContentPart, FunctionCall, MessageParam, ToolCallParam
from pipeline.stages.gateway.apis.anthropic.tools import object_text
from pipeline.stages.gateway.apis.ollama import bodies as b
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.chat.images import ChatImages


def message_with(role: str, text: str, images: Sequence[str]) -> MessageParam:
    """A message with images before its text."""
    parts = [ContentPart("image_url", image_url=f"data:;base64,{image}") for image in images]
    return MessageParam(role, [*parts, ContentPart("text", text)] if text else parts)


def messages_of(messages: Sequence[b.OllamaMessage], images: ChatImages) -> list[MessageParam]:
    """The messages of a chat request. `images` checks whether they may have some. Raises ApiError."""
    open_calls = _OpenCalls()
    num_calls = 0
    taken = {call.id for message in messages for call in message.tool_calls or ()}
    num_all = sum(len(message.tool_calls or ()) for message in messages)
    spare = (one for number in itertools.count(num_all) if (one := _numbered(number)) not in taken)
    found = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        if message.role not in b.ROLES:
            raise invalid(f"{at}.role", f"'{at}.role' must be one of {', '.join(b.ROLES)}", "invalid_value")
        if message.images:
            instead = f"the text in '{at}.content', and no 'images'"
            images.check(f"{at}.images[0]", message.role, instead)
        calls = [_call(f"{at}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls or ())]
        for i, call in enumerate(calls, num_calls):
            if not call.id:
                call.id = next(spare) if (own := _numbered(i)) in taken else own
        num_calls += len(calls)
        translated = MessageParam(
            message.role,
            message.content or (None if calls else ""),
            tool_calls=calls or None,
            reasoning=message.thinking or None,
        )
        if message.images:
            translated.content = message_with(message.role, message.content or "", message.images).content
        if message.role == "tool":
            translated.name = message.tool_name or None
            translated.tool_call_id = open_calls.answered(message) or _numbered(num_calls)
        elif calls:
            open_calls = _OpenCalls(calls)
        found.append(translated)
    return found


def _numbered(number: int) -> str:
    """Nine letters and digits, because templates of Mistral's models refuse other ids."""
    return f"call{number:05}"


def _call(at: str, call: b.OllamaToolCallParam) -> ToolCallParam:
    raw = call.function.arguments
    is_given = bytes(raw) not in (b"", b"null")
    arguments = object_text(raw, f"{at}.function.arguments") if is_given else "{}"
    return ToolCallParam(FunctionCall(call.function.name, arguments), call.id)


class _OpenCalls:
    """The calls of an assistant's message that have no result yet. Finding one takes the same time however many there
    are."""

    def __init__(self, calls: Sequence[ToolCallParam] = ()) -> None:
        self._calls = calls
        self._is_open = [True] * len(calls)
        self._all = deque(range(len(calls)))
        self._by_id: dict[str, deque[int]] = {}
        self._by_name: dict[str, deque[int]] = {}
        for index, call in enumerate(calls):
            self._by_id.setdefault(call.id or "", deque()).append(index)
            assert call.function is not None, "Ollama's calls are those of functions"
            self._by_name.setdefault(call.function.name, deque()).append(index)

    def answered(self, message: b.OllamaMessage) -> str | None:
        """The id of the call that a tool's message answers, which is then no longer open. If none is open, the id that
        the message gives."""
        if wanted := message.tool_call_id:
            indices = self._by_id.get(wanted)
        else:
            indices = self._by_name.get(message.tool_name) if message.tool_name else self._all
        while indices:
            index = indices.popleft()
            if self._is_open[index]:
                self._is_open[index] = False
                return self._calls[index].id
        return wanted or None
