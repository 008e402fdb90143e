"""Translates the messages of Ollama's API to those of a chat request. Pure.

Ollama's tool calls may have no ids, and some chat templates need them: a call without one gets the number of the call,
and a result without one answers the first call that has no result yet, by its name if it has one.
"""

from collections.abc import Sequence

from pipeline.stages.gateway.errors import invalid, unsupported
from pipeline.stages.gateway.ollama import bodies as b
from pipeline.stages.gateway.parsing.anthropic.tools import object_text
from pipeline.stages.gateway.parsing.conversation import FunctionCall, MessageParam, ToolCallParam


def messages_of(messages: Sequence[b.OllamaMessage]) -> list[MessageParam]:
    """The messages of a chat request. Raises ApiError."""
    open_calls: list[ToolCallParam] = []
    num_calls = 0
    found = []
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        if message.role not in b.ROLES:
            raise invalid(f"{at}.role", f"'{at}.role' must be one of {', '.join(b.ROLES)}", "invalid_value")
        if message.images:
            raise unsupported(f"{at}.images", "content must be text")
        calls = [_call(f"{at}.tool_calls[{i}]", call, num_calls + i) for i, call in enumerate(message.tool_calls or ())]
        num_calls += len(calls)
        translated = MessageParam(
            message.role,
            message.content or (None if calls else ""),
            tool_calls=calls or None,
            reasoning=message.thinking or None,
        )
        if message.role == "tool":
            translated.name = message.tool_name or None
            translated.tool_call_id = _answered(message, open_calls) or f"call{num_calls:05}"
        elif calls:
            open_calls = calls.copy()
        found.append(translated)
    return found


def _call(at: str, call: b.OllamaToolCallParam, number: int) -> ToolCallParam:
    raw = call.function.arguments
    is_given = bytes(raw) not in (b"", b"null")
    arguments = object_text(raw, f"{at}.function.arguments") if is_given else "{}"
    # Nine letters and digits, because templates of Mistral's models refuse other ids.
    return ToolCallParam(call.id or f"call{number:05}", FunctionCall(call.function.name, arguments))


def _answered(message: b.OllamaMessage, open_calls: list[ToolCallParam]) -> str | None:
    """The id of the call that a tool's message answers, which is then removed from `open_calls`."""
    wanted = message.tool_call_id
    for place, call in enumerate(open_calls):
        if wanted == call.id if wanted else message.tool_name in (None, "", call.function.name):
            return open_calls.pop(place).id
    return wanted or None
