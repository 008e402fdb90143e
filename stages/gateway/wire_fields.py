"""Parts of a request that came over ZeroMQ, read as those of HTTP's bodies are: what the output is to match, and chats
with tools. Where a part is JSON text, so that the wire has one type for it, it is decoded and checked here.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from pipeline import messages as m
from pipeline import protocol as p
from pipeline.config.settings import Limits as Caps
from pipeline.stages.gateway.bodies import ContentPart, Message
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.structured import KINDS, StructuredOutputs

T = TypeVar("T")
TOOL_CHOICES = ("none", "auto", "required", "named")


class _Function(msgspec.Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


def structured_of(given: p.StructuredOutputs | None) -> StructuredOutputs | None:
    """The same as a body of HTTP has it. Raises ApiError."""
    if given is None:
        return None
    match given.kind:
        case "json":
            return StructuredOutputs(json=Raw(msgspec.json.encode(given.source)))
        case "structural_tag":
            return StructuredOutputs(structural_tag=Raw(msgspec.json.encode(given.source)))
        case "json_object":
            return StructuredOutputs(json_object=True)
        case "regex":
            return StructuredOutputs(regex=given.source)
        case "grammar":
            return StructuredOutputs(grammar=given.source)
        case "choice":
            return StructuredOutputs(choice=_decoded(given.source, list[str], "structured_outputs.choice"))
    param = "structured_outputs.kind"
    raise invalid(param, f"'{param}' must be one of {', '.join(KINDS)}", "invalid_value")


def chat_of(chat: p.ChatPrompt, plain: Callable[[int, Message], m.ChatMessage], caps: Caps) -> m.ChatPrompt:
    """A chat; `plain` reads a message without tools. Raises ApiError."""
    if chat.continue_final_message and chat.add_generation_prompt:
        message = "'continue_final_message' is not allowed together with add_generation_prompt = true"
        raise invalid("continue_final_message", message)
    if chat.documents is not None:
        _decoded(chat.documents, list[dict[str, Any]], "documents")
    if chat.chat_template_kwargs is not None:
        _decoded(chat.chat_template_kwargs, dict[str, Any], "chat_template_kwargs")
    _check_tools(chat, caps)
    return m.ChatPrompt(
        [_message(i, message, plain) for i, message in enumerate(chat.messages)],
        chat.add_generation_prompt,
        chat.continue_final_message,
        chat.tools or "",
        chat.tool_choice,
        chat.tool_name,
        chat.parallel_tool_calls,
        chat.documents or "",
        chat.chat_template_kwargs or "",
    )


def _check_tools(chat: p.ChatPrompt, caps: Caps) -> None:
    tools = [] if chat.tools is None else _decoded(chat.tools, list[_Tool], "tools")
    if chat.tools is not None and not tools:
        raise invalid("tools", "'tools' must not be an empty array", "invalid_value")
    if len(tools) > caps.max_tools:
        message = f"'tools' has {len(tools)} entries, and at most {caps.max_tools} are taken: limits.max_tools"
        raise invalid("tools", message, "invalid_value")
    if chat.tool_choice not in TOOL_CHOICES:
        message = f"'tool_choice' must be one of {', '.join(TOOL_CHOICES)}"
        raise invalid("tool_choice", message, "invalid_value")
    if chat.tool_choice in ("required", "named") and not tools:
        raise invalid("tool_choice", f"'tool_choice' is {chat.tool_choice}, and there are no 'tools'", "invalid_value")
    if chat.tool_choice == "named" and chat.tool_name not in {tool.function.name for tool in tools}:
        raise invalid("tool_name", "'tool_name' must be that of one of 'tools'", "invalid_value")


def _message(i: int, one: p.ChatMessage, plain: Callable[[int, Message], m.ChatMessage]) -> m.ChatMessage:
    at = f"messages[{i}]"
    for name, value, role in (("tool_calls", one.tool_calls, "assistant"), ("tool_call_id", one.tool_call_id, "tool")):
        if value and one.role != role:
            raise invalid(f"{at}.{name}", f"'{at}.{name}' is only allowed in messages of role {role}", "invalid_value")
    parts = one.content if isinstance(one.content, list) else None
    if one.role == "tool" or (one.content is None and one.tool_calls):
        if one.content is None and one.role == "tool":
            raise invalid(f"{at}.content", f"'{at}.content' is required")
        content = "\n".join(parts) if parts is not None else one.content
        read = m.ChatMessage(one.role, content if isinstance(content, str) else None, one.name)
    else:
        given = (
            one.content if not isinstance(one.content, list) else [ContentPart("text", text) for text in one.content]
        )
        read = plain(i, Message(one.role, given, one.name))
    return msgspec.structs.replace(
        read,
        parts=parts,
        tool_calls=[_tool_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(one.tool_calls)],
        tool_call_id=one.tool_call_id,
        reasoning=one.reasoning,
    )


def _tool_call(call: p.ToolCall, at: str) -> m.ToolCall:
    _decoded(call.arguments or "{}", dict[str, Any], f"{at}.arguments")
    return m.ToolCall(call.id, call.name, call.arguments)


def _decoded(text: str, kind: type[T], param: str) -> T:
    """JSON text as what it must be. Raises ApiError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(param, f"'{param}': {error}", "invalid_type") from error
    except msgspec.DecodeError as error:
        raise invalid(param, f"'{param}' is not valid JSON: {error}", "invalid_value") from error
    except RecursionError as error:
        raise invalid(param, f"'{param}' is nested too deeply", "invalid_value") from error
