"""Tools of a chat, and `tool_choice`. Pure.

function        as it is
custom          a function with one text, see custom_tools.py: the reply has a call of type custom
allowed_tools   the model gets only these

Tools of other types, such as web_search, are run by the provider of a model: they are left out.
"""

from collections.abc import Iterable, Sized
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from pipeline.config.settings import LimitSettings as Caps
from pipeline.stages.gateway.errors import invalid, of_validation, shown, unsupported
from pipeline.stages.gateway.parsing.chat.custom_tools import INPUT_SCHEMA, format_text
from pipeline.stages.gateway.parsing.decode import without_gc

T = TypeVar("T")
RUN_BY_CLIENTS = ("function", "custom")
"""Types of tools"""
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(msgspec.Struct):
    definition: str
    syntax: str


class CustomFormat(msgspec.Struct):
    """The model reads the grammar; it is not enforced."""

    type: str
    grammar: CustomGrammar | None = None


class Custom(msgspec.Struct):
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct):
    type: str
    function: Function | None = None
    custom: Custom | None = None

    @property
    def named(self) -> Function | Custom | None:
        return self.custom if self.type == "custom" else self.function


class _Tools(msgspec.Struct):
    tools: list[Tool] | None = None


class _Type(msgspec.Struct):
    type: str


class _Types(msgspec.Struct):
    tools: list[_Type] | None = None


class _RawTools(msgspec.Struct):
    tools: list[Raw] | None = None


class _Named(msgspec.Struct):
    name: str


class _Allowed(msgspec.Struct):
    mode: str
    tools: list["_NamedChoice"]


class _NamedChoice(msgspec.Struct):
    type: str
    function: _Named | None = None
    custom: _Named | None = None
    allowed_tools: _Allowed | None = None


class _Choice(msgspec.Struct):
    tool_choice: str | _NamedChoice | None = None


class _FunctionOut(msgspec.Struct):
    name: str
    description: str | UnsetType
    parameters: Raw


class _ToolOut(msgspec.Struct):
    type: str
    function: _FunctionOut


class ChatTools(NamedTuple):
    """As in `ChatPrompt`"""

    json: str
    choice: str
    name: str


def chat_tools(raw: Raw, raw_choice: Raw, caps: Caps) -> ChatTools:
    """Check the tools and the choice. Raises ApiError."""
    tools = _checked_tools(raw, caps)
    choice, name, allowed = _choice(raw_choice, tools)
    if allowed is None and all(tool.type == "function" for tool in tools):
        return ChatTools(bytes(raw).decode() if tools else "", choice, name)
    written = msgspec.json.decode(b'{"tools":%s}' % bytes(raw), type=_RawTools).tools or [] if tools else []
    kept = [
        _as_function(tool.custom) if tool.custom is not None and tool.type == "custom" else one
        for index, (tool, one) in enumerate(zip(tools, written, strict=True))
        if tool.named is not None and (allowed is None or index in allowed)
    ]
    if choice == "required" and not kept:
        raise invalid("tool_choice", "'tool_choice' required needs a tool in 'tool_choice.allowed_tools.tools'")
    return ChatTools(msgspec.json.encode(kept).decode() if kept else "", choice, name)


def custom_names(raw: Raw) -> list[str]:
    """Names of the custom tools of a body that has been checked."""
    data = bytes(raw)
    if b"custom" not in data and b"\\u" not in data:
        return []
    tools = checked(raw, "tools", _Tools).tools or []
    return [tool.custom.name for tool in tools if tool.type == "custom" and tool.custom is not None]


def left_out_types(raw: Raw) -> list[str]:
    """Types of the tools that the model does not get, of a body that has been checked; each as often as it is there."""
    if bytes(raw) in (b"", b"null"):
        return []
    return [tool.type for tool in checked(raw, "tools", _Types).tools or [] if tool.type not in RUN_BY_CLIENTS]


def _as_function(custom: Custom) -> _ToolOut:
    form = custom.format.grammar if custom.format is not None else None
    texts = [custom.description, None if form is None else format_text(form.syntax, form.definition)]
    return _ToolOut("function", _FunctionOut(custom.name, "\n\n".join(filter(None, texts)) or UNSET, INPUT_SCHEMA))


def _checked_tools(raw: Raw, caps: Caps) -> list[Tool]:
    tools = checked(raw, "tools", _Tools).tools or []
    check_num_tools(tools, caps)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}]"
        if tool.type not in RUN_BY_CLIENTS:
            if tool.function is None and tool.custom is None:
                continue
            raise unsupported(
                f"{at}.type", f"'{shown(tool.type)}' is not function or custom, which this tool looks like"
            )
        at = f"{at}.{tool.type}"
        if tool.named is None:
            raise invalid(at, f"'{at}' is required")
        if tool.named.name in names:
            message = f"'{at}.name' repeats {tool.named.name}: tool names must be unique"
            raise invalid(f"{at}.name", message, "invalid_value")
        if isinstance(tool.named, Function) and (tool.named.parameters or {}).get("type", "object") != "object":
            param = f"{at}.parameters.type"
            raise invalid(param, f"'{param}' must be object", "invalid_value")
        names.add(tool.named.name)
    return tools


def check_num_tools(tools: Sized, caps: Caps) -> None:
    """Raises ApiError if a body has too many."""
    if len(tools) > caps.max_tools:
        message = f"'tools' has {len(tools)} entries, and the limit is {caps.max_tools} (limits.max_tools)"
        raise invalid("tools", message, "invalid_value")


def _choice(raw: Raw, tools: list[Tool]) -> tuple[str, str, set[int] | None]:
    """`tool_choice` and `tool_name` of `ChatPrompt`, and the places of the tools that the model gets; None for all."""
    match checked(raw, "tool_choice", _Choice).tool_choice:
        case None:
            return "auto", "", None
        case ("none" | "auto") as choice:
            return choice, "", None
        case "required":
            if not any(tool.named for tool in tools):
                raise invalid("tool_choice", "'tool_choice' required is only allowed together with tools")
            return "required", "", None
        case str():
            words = 'none, auto, required or {"type": "function", "function": {"name": …}}'
            raise invalid("tool_choice", f"'tool_choice' must be {words}", "invalid_value")
        case _NamedChoice(type="allowed_tools", allowed_tools=None):
            raise invalid("tool_choice.allowed_tools", "'tool_choice.allowed_tools' is required")
        case _NamedChoice(type="allowed_tools", allowed_tools=_Allowed(mode, named)):
            if mode not in ("auto", "required"):
                param = "tool_choice.allowed_tools.mode"
                raise invalid(param, f"'{param}' must be auto or required", "invalid_value")
            return mode, "", _allowed(named, tools)
        case _NamedChoice() as named_choice:
            index = _index_of(named_choice, "tool_choice", _indices(tools))
            found = tools[index].named
            assert found is not None
            return "named", found.name, None


def _allowed(named: Iterable[_NamedChoice], tools: list[Tool]) -> set[int]:
    indices, at = _indices(tools), "tool_choice.allowed_tools.tools"
    return {_index_of(one, f"{at}[{index}]", indices) for index, one in enumerate(named)}


def _indices(tools: Iterable[Tool]) -> dict[tuple[str, str], int]:
    return {(tool.type, tool.named.name): index for index, tool in enumerate(tools) if tool.named is not None}


def _index_of(choice: _NamedChoice, at: str, indices: dict[tuple[str, str], int]) -> int:
    """The place of the tool that the choice names."""
    if choice.type not in RUN_BY_CLIENTS:
        raise unsupported(f"{at}.type", "use function or custom")
    named = choice.function if choice.type == "function" else choice.custom
    if named is None:
        raise invalid(f"{at}.{choice.type}", f"'{at}.{choice.type}' is required")
    index = indices.get((choice.type, named.name))
    if index is None:
        message = f"'{at}' names {shown(named.name)!r}, which is not one of 'tools'"
        raise invalid(at, message, "invalid_value")
    return index


def checked(raw: Raw, name: str, kind: type[T]) -> T:
    """Decode one field as a struct with this field only, so that errors have its path in the body."""
    data = bytes(raw) or b"null"
    try:
        with without_gc():
            return msgspec.json.decode(b'{"%s":%s}' % (name.encode(), data), type=kind)
    except msgspec.ValidationError as error:
        raise of_validation(error) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise invalid(name, f"'{name}' is not valid JSON: {error}", "invalid_json") from error
    except RecursionError as error:
        raise invalid(name, f"'{name}' is nested too deeply", "invalid_json") from error
