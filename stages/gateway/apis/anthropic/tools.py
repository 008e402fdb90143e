"""Tools of a Messages request, translated to those of a chat request. Pure."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pipeline.config.settings import LimitSettings as Caps
from pipeline.stages.gateway.apis.anthropic import bodies as b
from pipeline.stages.gateway.apis.anthropic.known_tools import KNOWN, is_left_out, known
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.chat.tools import check_num_tools

_TOOL_INDEX = re.compile(r"tools\[(\d{1,9})\]")
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
    each = [_Tool("function", _function(one)) for one in tools if not _is_left_out(one)]
    return msgspec.json.encode(each).decode() if each else ""


def left_out(tools: Iterable[b.ToolParam]) -> list[str]:
    """Types of the tools that are not in the prompt"""
    return [one.type or "" for one in tools if _is_left_out(one)]


def in_body(param: str, tools: Sequence[b.ToolParam]) -> str:
    """The path of a tool of the prompt as a path in the body, which also has those that are left out."""
    found = _TOOL_INDEX.match(param)
    indices = [index for index, one in enumerate(tools) if not _is_left_out(one)]
    if found is None or int(found[1]) >= len(indices):
        return param
    return f"tools[{indices[int(found[1])]}]{param[found.end() :]}"


def _is_left_out(tool: b.ToolParam) -> bool:
    return tool.type is not None and is_left_out(tool.type)


def _function(tool: b.ToolParam) -> _Function:
    if tool.type not in KNOWN:
        return _Function(tool.name or "", tool.description or UNSET, tool.input_schema)
    description, schema = known(tool)
    return _Function(tool.name or "", description, schema)


def choice_of(body: b.CountTokensBody, caps: Caps) -> tuple[str, str, bool]:
    """`tool_choice`, `tool_name` and `parallel_tool_calls` of `ChatPrompt`. Raises ApiError, also for the tools."""
    tools = body.tools or []
    names = _checked_names(tools, caps)
    match body.tool_choice:
        case None:
            return "auto", "", True
        case b.ToolChoiceNone():
            return "none", "", True
        case b.ToolChoiceAuto(single):
            return "auto", "", not single
        case b.ToolChoiceAny(single):
            if not names:
                which = "those that only Anthropic runs don't count" if tools else "there are none"
                message = f"'tool_choice' any is only allowed together with 'tools': {which}"
                raise invalid("tool_choice", message, "invalid_value")
            return "required", "", not single
        case b.ToolChoiceTool(name, single):
            if name not in names:
                is_known = any(one.name == name for one in tools)
                why = "only Anthropic runs, so it is left out" if is_known else "is not one of 'tools'"
                message = f"'tool_choice.name' is {name[: b.MAX_TOOL_NAME_CHARS]!r}, which {why}"
                raise invalid("tool_choice.name", message, "invalid_value")
            return "named", name, not single


def _checked_names(tools: Sequence[b.ToolParam], caps: Caps) -> set[str]:
    """Check the tools. Returns their names."""
    check_num_tools(tools, caps)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if _is_left_out(tool):
            continue
        if tool.type not in (None, "custom", *KNOWN):
            raise unsupported(f"{at}.type", "tools must have type custom, or one of Anthropic's types")
        if tool.name is None:
            raise invalid(f"{at}.name", f"'{at}.name' is required")
        if not _NAME.fullmatch(tool.name):
            message = f"'{at}.name' must be 1 to {b.MAX_TOOL_NAME_CHARS} letters, digits, _ and -"
            raise invalid(f"{at}.name", message, "invalid_value")
        if tool.name in names:
            message = f"'{at}.name' repeats {tool.name}: tool names must be unique"
            raise invalid(f"{at}.name", message, "invalid_value")
        if tool.type in KNOWN:
            names.add(tool.name)
            continue
        if not bytes(tool.input_schema):
            raise invalid(f"{at}.input_schema", f"'{at}.input_schema' is required")
        if _decoded(tool.input_schema, f"{at}.input_schema").get("type", "object") != "object":
            param = f"{at}.input_schema.type"
            raise invalid(param, f"'{param}' must be object", "invalid_value")
        names.add(tool.name)
    return names


def object_text(raw: Raw, param: str) -> str:
    """The JSON text of a field that must be an object, as the client wrote it. Raises ApiError."""
    _decoded(raw, param, Raw)  # a number may be larger than any float
    return bytes(raw).decode()


def _decoded(raw: Raw, param: str, values: Any = Any) -> dict[str, Any]:
    """`values`: the type of the object's values."""
    try:
        found: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, values])
    except msgspec.ValidationError as error:
        raise invalid(param, f"'{param}' must be an object", "invalid_type") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _invalid_json(param, str(error)) from error
    except RecursionError as error:
        raise _invalid_json(param, "nested too deeply") from error
    return found


def _invalid_json(param: str, why: str) -> ApiError:
    return invalid(param, f"'{param}' is not valid JSON: {why}", "invalid_json")
