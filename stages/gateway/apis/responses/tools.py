"""The tools of POST /v1/responses as those of a chat. Pure.

    function    a function
    custom      a function with one text, `input`: the output has a custom_tool_call
    namespace   its functions and custom tools, under the namespace's name and their own: the output has both
    others      web_search, mcp, local_shell …: no chat has them, so they are left out. They have no name.

Codex sends all of these.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pipeline.stages.gateway.apis.responses.body import FunctionChoice, FunctionTool, ResponseTool
from pipeline.stages.gateway.apis.responses.fields import CalledTool
from pipeline.stages.gateway.errors import ApiError, invalid, shown, unsupported
from pipeline.stages.gateway.parsing.chat.custom_tools import INPUT_SCHEMA, format_text

MAX_NAME_CHARS = 64
"""Of a chat's function"""
_DIGEST_BYTES = 4
_OF_CHAT = re.compile(r"tools\[(\d{1,9})\]\.function\b")


class _ChatFunction(msgspec.Struct, omit_defaults=True):
    name: str
    description: str | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class _ChatTool(msgspec.Struct):
    function: _ChatFunction
    type: str = "function"


class ChatTools:
    """The tools of a body. Raises ApiError if one is of no type."""

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.shown: list[ResponseTool] = []
        """Those that the model has, as in the body"""
        self.left_out: list[str] = []
        """Types of the others"""
        self.called: dict[str, CalledTool] = {}
        """By the name of the chat's function: those that the output names in another way"""
        self._paths: list[str] = []
        """Of the chat's functions in the body"""
        self._each: list[_ChatTool] = []
        for index, tool in enumerate(tools):
            self._add(f"tools[{index}]", tool)

    @property
    def json(self) -> bytes:
        """`tools` of the chat"""
        return msgspec.json.encode(self._each)

    def _add(self, at: str, tool: ResponseTool) -> None:
        match tool.type:
            case "function" | "custom":
                self._add_one(at, tool, None)
            case "namespace":
                if tool.name is None:
                    raise invalid(f"{at}.name", f"'{at}.name' is required")
                if not tool.tools:
                    raise invalid(f"{at}.tools", f"'{at}.tools' is required: the functions of the namespace")
                for index, one in enumerate(tool.tools):
                    if one.type not in ("function", "custom"):
                        param = f"{at}.tools[{index}].type"
                        raise unsupported(param, f"'{shown(one.type)}' is not function or custom")
                    self._add_one(f"{at}.tools[{index}]", one, tool.name, tool.description if index == 0 else None)
            case _ if tool.name is None:
                self.left_out.append(shown(tool.type))
                return
            case other:
                what = f"'{shown(other)}' is not one of function, custom and namespace, which have a name"
                raise unsupported(f"{at}.type", what)
        self.shown.append(tool)

    def _add_one(self, at: str, tool: FunctionTool, namespace: str | None, about: str | None = None) -> None:
        """`about`: describes the namespace; its first tool tells it."""
        if tool.name is None:
            raise invalid(f"{at}.name", f"'{at}.name' is required")
        name = tool.name if namespace is None else chat_name(tool.name, namespace)
        is_custom = tool.type == "custom"
        if is_custom or namespace is not None:
            self.called.setdefault(name, CalledTool(tool.name, namespace, is_custom))
        texts = [text for text in (about, tool.description, _format_text(tool) if is_custom else None) if text]
        function = _ChatFunction(name, "\n\n".join(texts) if texts else UNSET)
        if is_custom:
            function.parameters = INPUT_SCHEMA
        else:
            if tool.description is not None and not texts:
                function.description = tool.description
            if bytes(tool.parameters) not in (b"", b"null"):
                function.parameters = tool.parameters
            if tool.strict is not None:
                function.strict = tool.strict
        self._paths.append(at)
        self._each.append(_ChatTool(function))

    def choice(self, choice: str | FunctionChoice | None) -> Any:
        """`tool_choice` of the chat. Raises ApiError, also if it names a tool that was left out."""
        match choice:
            case None | "none" | "auto" | "required":
                return choice
            case str():
                words = 'none, auto, required or {"type": "function", "name": …}'
                raise invalid("tool_choice", f"'tool_choice' must be {words}", "invalid_value")
        if choice.type == "allowed_tools":
            return self._restricted(choice)
        if choice.type not in ("function", "custom"):
            what = f"'{shown(choice.type)}' is not available, use function, custom or allowed_tools"
            raise unsupported("tool_choice.type", what)
        if choice.name is None:
            raise invalid("tool_choice.name", "'tool_choice.name' is required")
        names = [one.function.name for one in self._each]
        found = [name for name in names if self._named(name) == (choice.name, choice.type == "custom")]
        if len(set(found)) != 1:
            how = "several" if found else "none"
            message = f"'tool_choice' names {shown(choice.name)!r}, and {how} of 'tools' of its type has this name"
            raise invalid("tool_choice", message, "invalid_value")
        return {"type": "function", "function": {"name": found[0]}}

    def _restricted(self, choice: FunctionChoice) -> str:
        """Keep the tools that the choice allows. Those that the model does not have anyway may be among them."""
        if choice.mode not in ("auto", "required"):
            raise invalid("tool_choice.mode", "'tool_choice.mode' must be auto or required", "invalid_value")
        if choice.tools is None:
            raise invalid("tool_choice.tools", "'tool_choice.tools' is required")
        by_name: dict[tuple[str, str | None], set[int]] = {}
        for index, one in enumerate(self._each):
            name, is_custom = self._named(one.function.name)
            by_name.setdefault(("custom" if is_custom else "function", name), set()).add(index)
            if (called := self.called.get(one.function.name)) is not None and called.namespace is not None:
                by_name.setdefault(("namespace", called.namespace), set()).add(index)
        left_out = set(self.left_out)
        chosen: dict[tuple[str, str | None], set[int]] = {}
        for index, tool in enumerate(choice.tools):
            if shown(tool.type) in left_out and tool.name is None:
                continue
            # Each set once: a namespace of thousands of tools may be named thousands of times.
            found = by_name.get((tool.type, tool.name), set())
            if not found or (len(found) > 1 and tool.type != "namespace"):
                how = "several" if found else "none"
                what = f"{shown(tool.type)} {shown(tool.name or '')!r}"
                message = f"'tool_choice.tools[{index}]' is {what}, and {how} of 'tools' is this one"
                raise invalid(f"tool_choice.tools[{index}]", message, "invalid_value")
            chosen[tool.type, tool.name] = found
        allowed = {index for found in chosen.values() for index in found}
        self._each = [one for index, one in enumerate(self._each) if index in allowed]
        self._paths = [one for index, one in enumerate(self._paths) if index in allowed]
        return choice.mode

    def _named(self, name: str) -> tuple[str, bool]:
        """How the body names the chat's function, and whether it is custom."""
        called = self.called.get(name)
        return (name, False) if called is None else (called.name, called.is_custom)

    def renamed(self, error: ApiError) -> ApiError:
        """The error with the place of a function in the body, where it names a chat's."""
        param, message = error.param and self.path(error.param), self.path(error.message)
        if (param, message) == (error.param, error.message):
            return error
        return ApiError(error.status, message, param, error.code)

    def path(self, text: str) -> str:
        """A path or a text with paths, as in the body."""

        def of(found: "re.Match[str]") -> str:
            index = int(found[1])
            return self._paths[index] if index < len(self._paths) else found[0]

        return _OF_CHAT.sub(of, text)


def chat_name(name: str, namespace: str) -> str:
    """The name of a chat's function for a tool in a namespace: `crm__find`. The same for the same names."""
    between = "" if namespace.endswith("_") or name.startswith("_") else "__"
    whole = f"{namespace}{between}{name}"
    if len(whole) <= MAX_NAME_CHARS:
        return whole
    digest = hashlib.blake2b(whole.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{whole[: MAX_NAME_CHARS - 1 - len(digest)]}_{digest}"


def _format_text(tool: FunctionTool) -> str | None:
    return None if tool.format is None else format_text(tool.format.syntax, tool.format.definition)


def tools_json(tools: Iterable[ResponseTool]) -> str:
    """The tools as a response repeats them"""
    return msgspec.json.encode(list(tools)).decode()
