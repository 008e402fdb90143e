"""Chat options and tool calls, checked and converted to the client protocol."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.client import protocol as p
from pipeline.client.inputs.checks import shown

KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
"""The keys of a message. `reasoning_content` is another name of `reasoning`."""


class ChatOptions(NamedTuple):
    """The options of all conversations of a call, as they are sent."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: str | None = None
    """JSON text"""
    chat_template_kwargs: str | None = None
    """JSON text"""

    def prompt(self, messages: list[p.MessageParam]) -> dict[str, Any]:
        """The fields of the protocol's `Request`."""
        fields: dict[str, Any] = {"messages": messages, **self._asdict()}
        for name in ("tools", "chat_template_kwargs"):
            if (text := fields.pop(name)) is not None:
                fields[name] = p.json_text(text)
        return fields


def chat_options(
    add_generation_prompt: Any, continue_final_message: Any, tools: Any, chat_template_kwargs: Any
) -> ChatOptions:
    """Check and convert the options. Raises TypeError or ValueError that names the argument."""
    for name, flag in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {shown(flag)}")
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message needs add_generation_prompt=False: the output continues a message")
    if tools is not None and (
        not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise TypeError(f"tools must be a list of dicts, not {shown(tools)}")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, not {shown(chat_template_kwargs)}")
    return ChatOptions(
        add_generation_prompt,
        continue_final_message,
        _json("tools", tools) if tools else None,
        _json("chat_template_kwargs", chat_template_kwargs) if chat_template_kwargs else None,
    )


def unknown_keys(message: Mapping[str, Any]) -> list[str]:
    """A message's keys that are not supported. Keys with the value None are ignored."""
    return sorted(str(key) for key, value in message.items() if key not in KEYS and value is not None)


def reasoning_of(message: Mapping[str, Any]) -> Any:
    reasoning = message.get("reasoning_content")
    return message.get("reasoning") if reasoning is None else reasoning


def tool_calls_of(calls: Any, where: str) -> list[p.ToolCallParam]:
    """Convert a message's `tool_calls` from OpenAI's format; arguments are JSON text or an object. Without an id,
    the server takes the results in their order. Raises TypeError or ValueError that names `where`."""
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TypeError(f"{where} must be a list of calls, not {shown(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> p.ToolCallParam:
    call_id = (call.get("id") or "") if isinstance(call, Mapping) else None
    match call:
        case {"function": {"name": str(name), "arguments": str(arguments)}} if isinstance(call_id, str):
            return p.ToolCallParam(p.FunctionCall(name, arguments), call_id)
        case {"function": {"name": str(name), "arguments": Mapping() as arguments}} if isinstance(call_id, str):
            arguments = _json(f"{where}.function.arguments", arguments)
            return p.ToolCallParam(p.FunctionCall(name, arguments), call_id)
    shape = '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
    raise TypeError(f"{where} must be a dict such as {shape}, not {shown(call)}")


def _json(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains a lone surrogate, which is not a valid character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} is not valid JSON: {error}") from error
    return text
