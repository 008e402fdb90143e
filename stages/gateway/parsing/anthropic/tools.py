"""Tools of a Messages request, translated to those of a chat request. Pure."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pipeline.config.settings import LimitSettings as Caps
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.anthropic import bodies as b

_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{b.MAX_TOOL_NAME_CHARS}}}")


class _Function(msgspec.Struct):
    name: str
    description: str | UnsetType
    parameters: Raw


class _Tool(msgspec.Struct):
    """A tool as chat templates expect it."""

    type: str
    function: _Function


def tools_json(tools: Sequence[b.ToolParam]) -> str:
    """The tools as `ChatPrompt.tools`. Call `choice_of` first, which checks them."""
    if not tools:
        return ""
    each = [_Tool("function", _Function(one.name, one.description or UNSET, one.input_schema)) for one in tools]
    return msgspec.json.encode(each).decode()


def choice_of(body: b.CountTokensBody, caps: Caps) -> tuple[str, str, bool]:
    """`tool_choice`, `tool_name` and `parallel_tool_calls` of `ChatPrompt`. Raises ApiError, also for the tools."""
    names = _checked_names(body.tools or [], caps)
    match body.tool_choice:
        case None:
            return "auto", "", True
        case b.ToolChoiceNone():
            return "none", "", True
        case b.ToolChoiceAuto(single):
            return "auto", "", not single
        case b.ToolChoiceAny(single):
            if not names:
                raise invalid("tool_choice", "'tool_choice' any is only allowed together with 'tools'", "invalid_value")
            return "required", "", not single
        case b.ToolChoiceTool(name, single):
            if name not in names:
                message = f"'tool_choice.name' is {name[: b.MAX_TOOL_NAME_CHARS]!r}, which is not one of 'tools'"
                raise invalid("tool_choice.name", message, "invalid_value")
            return "named", name, not single


def _checked_names(tools: Sequence[b.ToolParam], caps: Caps) -> set[str]:
    """Check the tools. Returns their names."""
    if len(tools) > caps.max_tools:
        message = f"'tools' has {len(tools)} entries, and the limit is {caps.max_tools} (limits.max_tools)"
        raise invalid("tools", message, "invalid_value")
    names: set[str] = set()
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        if tool.type not in (None, "custom"):
            raise unsupported(f"{at}.type", "this server runs no tools of its own, tools must have type custom")
        if not _NAME.fullmatch(tool.name):
            message = f"'{at}.name' must be 1 to {b.MAX_TOOL_NAME_CHARS} letters, digits, _ and -"
            raise invalid(f"{at}.name", message, "invalid_value")
        if tool.name in names:
            message = f"'{at}.name' repeats {tool.name}: tool names must be unique"
            raise invalid(f"{at}.name", message, "invalid_value")
        if not bytes(tool.input_schema):
            raise invalid(f"{at}.input_schema", f"'{at}.input_schema' is required")
        if _decoded(tool.input_schema, f"{at}.input_schema").get("type", "object") != "object":
            param = f"{at}.input_schema.type"
            raise invalid(param, f"'{param}' must be object", "invalid_value")
        names.add(tool.name)
    return names


def object_text(raw: Raw, param: str) -> str:
    """The JSON text of a field that must be an object, as the client wrote it. Raises ApiError."""
    _decoded(raw, param)
    return bytes(raw).decode()


def _decoded(raw: Raw, param: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise invalid(param, f"'{param}' must be an object", "invalid_type") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _invalid_json(param, str(error)) from error
    except RecursionError as error:
        raise _invalid_json(param, "nested too deeply") from error
    return found


def _invalid_json(param: str, why: str) -> ApiError:
    return invalid(param, f"'{param}' is not valid JSON: {why}", "invalid_json")
