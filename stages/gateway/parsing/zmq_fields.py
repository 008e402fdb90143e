"""Converts structured outputs and chats of ZeroMQ requests to the fields of HTTP's bodies. Pure.

Fields that the wire holds as JSON text are decoded and checked here.
"""

from typing import Any

import msgspec
from msgspec import Raw

from pipeline.client import protocol as p
from pipeline.client.protocol.generation import KINDS, StructuredOutputsParam
from pipeline.config.settings import LimitSettings as Caps
from pipeline.http_server.json_depth import check_depth
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.chat_tools import custom_names
from pipeline.stages.gateway.parsing.conversation import ReasoningEffort, chat_prompt
from pipeline.stages.gateway.parsing.message_params import ContentPart, FunctionCall, MessageParam, ToolCallParam

NULL = Raw(b"null")


class _Chat(msgspec.Struct):
    """The fields of a chat body."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    tools: Raw
    tool_choice: Raw
    parallel_tool_calls: bool | None
    documents: Raw
    chat_template_kwargs: Raw
    reasoning_effort: ReasoningEffort | None = None
    chat_template: Raw = Raw()


def structured_of(given: p.StructuredOutputs | None) -> StructuredOutputsParam | None:
    """The `structured_outputs` of a body. Raises ApiError."""
    if given is None:
        return None
    match given.kind:
        case "json":
            return StructuredOutputsParam(json=Raw(msgspec.json.encode(given.source)))
        case "structural_tag":
            return StructuredOutputsParam(structural_tag=Raw(msgspec.json.encode(given.source)))
        case "json_object":
            return StructuredOutputsParam(json_object=True)
        case "regex":
            return StructuredOutputsParam(regex=given.source)
        case "grammar":
            return StructuredOutputsParam(grammar=given.source)
        case "choice":
            return StructuredOutputsParam(choice=_decoded(given.source, list[str], "structured_outputs.choice"))
    param = "structured_outputs.kind"
    raise invalid(param, f"'{param}' must be one of {', '.join(KINDS)}", "invalid_value")


def chat_of(chat: p.ChatPrompt, caps: Caps) -> m.ChatPrompt:
    """The prompt of a chat. Raises ApiError."""
    choice: Any = chat.tool_choice
    tools = _raw(chat.tools, "tools", caps)
    if choice == "named":
        kind = "custom" if chat.tool_name in custom_names(tools) else "function"
        choice = {"type": kind, kind: {"name": chat.tool_name}}
    body = _Chat(
        chat.add_generation_prompt,
        chat.continue_final_message,
        tools,
        Raw(msgspec.json.encode(choice)),
        chat.parallel_tool_calls,
        _raw(chat.documents, "documents", caps),
        _raw(chat.chat_template_kwargs, "chat_template_kwargs", caps),
    )
    return chat_prompt(body, [_message(one) for one in chat.messages], caps)


def _message(one: p.ChatMessage) -> MessageParam:
    calls = [ToolCallParam(FunctionCall(call.name, call.arguments), call.id) for call in one.tool_calls]
    content = one.content
    return MessageParam(
        one.role,
        [ContentPart("text", text) for text in content] if isinstance(content, list) else content,
        one.name,
        calls or None,
        one.tool_call_id,
        one.reasoning,
    )


def _raw(text: str | None, param: str, caps: Caps) -> Raw:
    """Check that `text` is JSON of allowed depth. Its type is checked later, as for bodies."""
    if text is None:
        return NULL
    data = text.encode()
    try:
        check_depth(data, caps.max_json_depth)
    except ApiError:
        message = f"'{param}' is nested too deeply: the limit is {caps.max_json_depth} levels"
        raise invalid(param, message, "invalid_json") from None
    _decoded(text, Any, param)
    return Raw(data)


def _decoded(text: str, kind: Any, param: str) -> Any:
    """Decode JSON of this type. Raises ApiError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(param, f"'{param}': {error}", "invalid_type") from error
    except msgspec.DecodeError as error:
        raise invalid(param, f"'{param}' is not valid JSON: {error}", "invalid_value") from error
    except RecursionError as error:
        raise invalid(param, f"'{param}' is nested too deeply", "invalid_value") from error
