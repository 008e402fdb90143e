"""Translates the conversation of a Messages request to the prompt that chats have. Pure.

    system                    a message of role system, the first; without Claude Code's billing header
    text                      the content of its message; consecutive messages of a role are one message
    thinking                  the reasoning of the assistant's message; redacted_thinking is dropped
    image                     an image of its message, or of the result that has it
    tool_use, tool_result     a tool call, a message of role tool
    server_tool_use …         dropped, with their results: no chat has calls that the server runs
    last message assistant    the reply continues it

Every error has the path of the client's field, such as `messages[0].content[1].input`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic import bodies as b
from pipeline.stages.gateway.apis.anthropic.tools import choice_of, object_text, tools_json
from pipeline.stages.gateway.errors import invalid, unsupported
from pipeline.stages.gateway.parsing.chat.content_parts import Document, Media, not_text
from pipeline.stages.gateway.parsing.chat.images import ChatImages

ERROR_PREFIX = "Error: "
CALL_ID_PREFIX = "toolu_"
"""Ids of tool calls begin with it outside. Templates get the rest: some refuse ids that are not in their own format."""
BILLING_PREFIX = "x-anthropic-billing-header:"
"""Claude Code's first system block begins with it. It is not part of the prompt: it differs by conversation and agent,
so the prefix cache would find none of the tools and instructions after it."""

_MEDIA: dict[type, type[Media]] = {
    b.DocumentBlockParam: Document,
    b.SearchResultBlockParam: Document,
}
_TEXT = '{"type": "text", "text": "…"}'
MARKABLE = (b.TextBlockParam, b.ImageBlockParam, b.ToolUseBlockParam, b.ToolResultBlockParam)
"""Blocks whose `cache_control` says where a conversation may go on in another way."""


class _Turn(msgspec.Struct):
    """A message of the prompt while its blocks are added. Of an assistant's text that calls or reasoning interrupt, the
    rest follows without a line break, as in a chat."""

    role: str
    texts: list[str] = []
    has_parts: bool = False
    image_offsets: list[int] = []
    calls: list[m.ToolCall] = []
    reasoning: list[str] = []
    tool_call_id: str | None = None
    is_cache_mark: bool = False
    last: type | None = None
    """The type of the block that was added last; None if that was in another message of the client's."""

    def add_text(self, text: str) -> None:
        if self.role == "assistant" and self.texts and (not text or self.last not in (None, b.TextBlockParam)):
            self.texts[-1] += text
        elif text or self.role != "assistant":
            self.texts.append(text)

    def add_image(self) -> None:
        self.has_parts = True
        self.image_offsets.append(len(self.texts))

    def add_reasoning(self, text: str) -> None:
        if self.reasoning and self.last not in (None, b.ThinkingBlockParam):
            self.reasoning[-1] += text
        else:
            self.reasoning.append(text)

    def message(self) -> m.ChatMessage:
        has_content = bool(self.texts) or not self.calls
        return m.ChatMessage(
            self.role,
            "\n".join(self.texts) if has_content else None,
            parts=self.texts if self.has_parts else None,
            tool_calls=self.calls,
            tool_call_id=self.tool_call_id,
            reasoning="\n".join(self.reasoning) if self.reasoning else None,
            is_cache_mark=self.is_cache_mark,
            image_offsets=self.image_offsets,
        )


def num_parts(messages: Sequence[b.InputMessage]) -> int:
    """Number of messages, their blocks, and the blocks of results: templates write about a token for each at least."""
    return sum(map(_num_parts, messages))


def _num_parts(message: b.InputMessage) -> int:
    if isinstance(message.content, str):
        return 1
    results = [one.content for one in message.content if isinstance(one, b.ToolResultBlockParam)]
    return max(1, len(message.content) + sum(len(content) for content in results if isinstance(content, list)))


def prompt_of(body: b.CountTokensBody, caps: Caps, images: ChatImages) -> m.ChatPrompt:
    """The prompt of a request, whose images are added to `images`. Raises ApiError."""
    turns = _turns(body, images)
    goes_on = body.messages[-1].role == "assistant"
    if goes_on and turns[-1].calls:
        at = f"messages[{len(body.messages) - 1}].content"
        message = f"'{at}' must not have tool calls: it is the last message, so the reply continues it"
        raise invalid(at, message, "invalid_value")
    choice, name, parallel = choice_of(body, caps)
    return m.ChatPrompt(
        [turn.message() for turn in turns],
        not goes_on,
        continue_final_message=goes_on,
        tools=tools_json(body.tools or []),
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=parallel,
        template_kwargs=_template_kwargs(body),
    )


def _template_kwargs(body: b.CountTokensBody) -> str:
    """The template's arguments as JSON: those that `reasoning_effort` sets in a chat request."""
    kwargs: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    match body.thinking:
        case b.ThinkingEnabled():
            kwargs["enable_thinking"] = True
        case b.ThinkingDisabled():
            kwargs = {"reasoning_effort": "none", "enable_thinking": False}
    return msgspec.json.encode(kwargs).decode() if kwargs else ""


# --------------------------------------------------------------------------------------------------------- messages


def _turns(body: b.CountTokensBody, images: ChatImages) -> list[_Turn]:
    turns: list[_Turn] = []
    match body.system:
        case str(text) if text:
            turns.append(_Turn("system", [text]))
        case [*blocks] if texts := [one.text for one in blocks if not one.text.startswith(BILLING_PREFIX)]:
            turns.append(_Turn("system", texts, has_parts=True))
    for index, message in enumerate(body.messages):
        at = f"messages[{index}]"
        if message.role not in b.ROLES:
            raise invalid(f"{at}.role", f"'{at}.role' must be one of {', '.join(b.ROLES)}", "invalid_value")
        if not isinstance(message.content, str) and not message.content and message.role != "assistant":
            raise invalid(f"{at}.content", f"'{at}.content' must not be an empty array", "invalid_value")
        _add(turns, at, message, images)
    return turns


def _add(turns: list[_Turn], at: str, message: b.InputMessage, images: ChatImages) -> None:
    """Append a message to `turns`, or to the last of them if it has the same role."""
    role = message.role
    if role == "assistant":
        _turn_of(turns, role).last = None
    if isinstance(message.content, str):
        turn = _turn_of(turns, role)
        turn.has_parts |= bool(turn.texts)
        turn.add_text(message.content)
        return
    for index, block in enumerate(message.content):
        where = f"{at}.content[{index}]"
        match block:
            case b.TextBlockParam(text=text):
                turn = _turn_of(turns, role)
                turn.has_parts = True
                turn.add_text(text)
            case b.ImageBlockParam():
                _add_image(where, role, block, images)
                _turn_of(turns, role).add_image()
            case b.ToolResultBlockParam():
                _check_role(where, "tool_result", role, "user")
                turns.append(_result(where, block, images))
            case b.ToolUseBlockParam():
                _check_role(where, "tool_use", role, "assistant")
                arguments = object_text(block.input, f"{where}.input")
                _turn_of(turns, role).calls.append(m.ToolCall(_own_id(block.id), block.name, arguments))
            case b.ThinkingBlockParam(thinking):
                _check_role(where, "thinking", role, "assistant")
                _turn_of(turns, role).add_reasoning(thinking)
            case b.RedactedThinkingBlockParam():
                _check_role(where, "redacted_thinking", role, "assistant")
                _turn_of(turns, role)
            case b.LeftOutBlockParam():
                _check_role(where, str(block.__struct_config__.tag), role, "assistant")
                _turn_of(turns, role)
            case _:
                raise not_text(where, _MEDIA[type(block)], _TEXT)
        if isinstance(block, MARKABLE) and block.cache_control is not None:
            turns[-1].is_cache_mark = True
        if role == "assistant":
            turns[-1].last = type(block)


def _turn_of(turns: list[_Turn], role: str) -> _Turn:
    """The turn that a block of this role belongs to."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _add_image(at: str, role: str, block: b.ImageBlockParam, images: ChatImages) -> None:
    images.check(at, role, _TEXT)
    match block.source:
        case b.ImageSource(type="base64", data=str(data)):
            images.add_base64(f"{at}.source.data", data)
        case b.ImageSource(type="base64"):
            raise invalid(f"{at}.source.data", f"'{at}.source.data' is required")
        case None:
            raise invalid(f"{at}.source", f"'{at}.source' is required")
        case _:
            raise unsupported(f"{at}.source.type", "it must be base64: this server fetches no URLs and has no files")


def _result(at: str, block: b.ToolResultBlockParam, images: ChatImages) -> _Turn:
    turn = _Turn("tool", tool_call_id=_own_id(block.tool_use_id))
    match block.content:
        case None:
            turn.texts = [""]
        case str(text):
            turn.texts = [text]
        case blocks:
            turn.has_parts = True
            for index, one in enumerate(blocks):
                if isinstance(one, b.ToolReferenceBlockParam):
                    turn.texts.append(one.tool_name)
                elif isinstance(one, b.TextBlockParam):
                    turn.texts.append(one.text)
                elif isinstance(one, b.ImageBlockParam):
                    _add_image(f"{at}.content[{index}]", turn.role, one, images)
                    turn.add_image()
                else:
                    raise not_text(f"{at}.content[{index}]", _MEDIA[type(one)], _TEXT)
    if block.is_error and not "".join(turn.texts[:1]).lower().startswith("error"):
        turn.texts[:1] = [ERROR_PREFIX + "".join(turn.texts[:1])]
    return turn


def _own_id(call_id: str) -> str:
    return call_id.removeprefix(CALL_ID_PREFIX) or call_id


def _check_role(at: str, kind: str, role: str, allowed: str) -> None:
    if role != allowed:
        message = f"'{at}.type' {kind} is only allowed if the message's role is {allowed}"
        raise invalid(f"{at}.type", message, "invalid_value")
