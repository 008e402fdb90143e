"""Chats: messages, tools, and arguments of the chat template. Pure.

    messages   system, developer, user: content · assistant: content, tool_calls or both, reasoning · tool: the result
               of a tool call, with tool_call_id
    tools      see tools.py

`chat_template_kwargs`, `documents`, `reasoning_effort`, `continue_final_message`, `add_generation_prompt` are for the
template, as in vLLM. Ingest checks the schemas of functions when it compiles their grammar.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.client.protocol.conversation import (
    ROLE,
    ROLES,
    ContentPart,
    Conversation,
    ImageUrl,
    MessageParam,
    ReasoningEffort,
    ToolCallParam,
)
from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import invalid, unsupported
from pipeline.stages.gateway.parsing.chat.content_parts import Audio, Document, Image, PartTypes, Video
from pipeline.stages.gateway.parsing.chat.custom_tools import arguments_of
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.chat.tool_call_ids import with_ids
from pipeline.stages.gateway.parsing.chat.tools import chat_tools, checked
from pipeline.text.formats.chat_formats import ChatFormats, SchemasTooLarge
from pipeline.text.formats.tool_format import ToolSpec

_NOT_GIVEN = (b"", b"null", b"\xc0")
"""The last is null in MessagePack."""
_PARTS = PartTypes(
    {"text": "text", "refusal": "refusal"},
    {
        "image_url": Image,
        "image_embeds": Image,
        "input_audio": Audio,
        "audio_url": Audio,
        "video_url": Video,
        "file": Document,
    },
)
_TEXTS, _TEXTS_OF_ASSISTANT = ("text",), ("text", "refusal")


class _Documents(msgspec.Struct):
    documents: list[dict[str, Any]] | None = None


class _Kwargs(msgspec.Struct):
    chat_template_kwargs: dict[str, Any] | None = None


class ReplyParsing(msgspec.Struct, frozen=True):
    """What to parse in the reply to a chat."""

    tool_choice: str = "none"
    """As in `ChatPrompt`"""
    tools: dict[str, str] = {}
    """The tools' names, with the JSON schemas of their arguments if the model's format needs them"""
    parallel: bool = True
    shows_specials: bool = False
    """Special tokens stay in the content."""
    with_reasoning: bool = True
    """The reply has the reasoning."""
    custom: list[str] = []
    """Names of functions that stand for custom tools: the reply has their input."""


def chat_prompt(body: Conversation, messages: Sequence[MessageParam], caps: Caps, images: ChatImages) -> m.ChatPrompt:
    """The prompt of a chat, whose images are added to `images`. Raises ApiError."""
    if is_given(body.chat_template):
        raise unsupported("chat_template", "only the model's own template is run")
    generate, goes_on = body.add_generation_prompt, bool(body.continue_final_message)
    if generate and goes_on:
        message = "'continue_final_message' and 'add_generation_prompt' cannot both be true"
        raise invalid("continue_final_message", message, "invalid_value")
    tools, choice, name = chat_tools(body.tools, body.tool_choice, caps)
    return m.ChatPrompt(
        [chat_message(index, message, images) for index, message in enumerate(with_ids(messages))],
        not goes_on if generate is None else generate,
        continue_final_message=goes_on,
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        documents=_json(body.documents) if _documents(body.documents) else "",
        template_kwargs=_kwargs(body.chat_template_kwargs, body.reasoning_effort),
    )


def given_of_chat(body: Conversation) -> str | None:
    """The first field of the body that only chats may have; None if there is none."""
    for name in Conversation.__annotations__:
        value = getattr(body, name)
        if is_given(value) if isinstance(value, Raw) else value is not None:
            return name
    return None


def is_given(raw: Raw) -> bool:
    """Whether a field that is not decoded is there and not null."""
    return bytes(raw) not in _NOT_GIVEN


def num_parts(messages: Sequence[MessageParam]) -> int:
    """Number of messages, tool calls and parts of contents: templates write about a token for each at least."""
    return sum(map(_num_parts, messages))


def _num_parts(message: MessageParam) -> int:
    num_texts = len(message.content) if isinstance(message.content, list) else 1
    return max(1, num_texts) + len(message.tool_calls or ())


def reply_parsing(
    prompt: m.ChatPrompt, formats: ChatFormats, *, shows_specials: bool, with_reasoning: bool
) -> ReplyParsing | None:
    """What to parse in the reply; None for nothing. Raises ApiError if tool calls are not parsed."""
    choice = prompt.tool_choice if prompt.tools else "none"
    if choice == "auto" and formats.tools is None:
        what = (
            'no tool calls are parsed: chat.tool_call_parser is "none", or the model has no chat template; tool_choice '
            '"required" or a named function works without one'
        )
        raise unsupported("tools", what)
    functions = [] if choice == "none" else [tool.function for tool in _decoded_tools(prompt.tools)]
    is_typed = formats.tools is not None and formats.tools.is_typed
    tools = {one.name: one.schema if is_typed else "" for one in functions}
    if choice == "none" and formats.reasoning is None:
        return None
    return ReplyParsing(choice, tools, prompt.parallel_tool_calls, shows_specials, with_reasoning)


def calls_grammar(prompt: m.ChatPrompt, formats: ChatFormats, output: m.Grammar | None, caps: Caps) -> m.Grammar | None:
    """The grammar of the reply: `output`, which the client set, or tool calls if they are required or strict. Raises
    ApiError if `output` is set and calls are required, or if the tools' schemas are too large."""
    try:
        return _calls_grammar(prompt, formats, output, caps.max_grammar_bytes)
    except SchemasTooLarge as error:
        raise invalid("tools", f"'tools': {error}", "invalid_grammar") from None


def _calls_grammar(
    prompt: m.ChatPrompt, formats: ChatFormats, output: m.Grammar | None, max_bytes: int
) -> m.Grammar | None:
    if prompt.tool_choice not in ("required", "named"):
        return output or _strict_calls(prompt, formats, max_bytes)
    if output is not None:
        message = f"'{output.param}' is not allowed with this tool_choice: the reply has tool calls and no content"
        raise invalid(output.param, message, "invalid_value")
    written = formats.calls(
        prompt.tool_choice,
        prompt.tool_name,
        prompt.tools,
        parallel=prompt.parallel_tool_calls,
        max_bytes=max_bytes,
    )
    param = "tools"
    if prompt.tool_choice == "named":  # only its schema is used
        names = [tool.function.name for tool in _decoded_tools(prompt.tools)]
        param = f"tools[{names.index(prompt.tool_name)}].function.parameters"
    return m.Grammar("calls", msgspec.json.encode(written).decode(), param)


def _strict_calls(prompt: m.ChatPrompt, formats: ChatFormats, max_bytes: int) -> m.Grammar | None:
    """The grammar of a reply that may call strict functions; None if there are none. With a response format, ingest
    makes one of both."""
    if not prompt.tools or prompt.tool_choice != "auto":
        return None
    written = formats.strict_calls(prompt.tools, parallel=prompt.parallel_tool_calls, max_bytes=max_bytes)
    return None if written is None else m.Grammar("calls", msgspec.json.encode(written).decode(), "tools")


# --------------------------------------------------------------------------------------------------------- messages


def chat_message(index: int, message: MessageParam, images: ChatImages) -> m.ChatMessage:
    """One message of a chat. Raises ApiError."""
    at, role = f"messages[{index}]", message.role
    if role == "function":
        raise invalid(f"{at}.role", f"'{at}.role' function is deprecated: use tool, and tool_call_id", "invalid_value")
    if not ROLE.fullmatch(role):
        kinds = f"{', '.join(ROLES)}, or a role of the model's chat template: 1 to 64 letters, digits, _, - and ."
        raise invalid(f"{at}.role", f"'{at}.role' must be one of {kinds}", "invalid_value")
    for name in ("function_call", "audio"):
        if is_given(getattr(message, name)):
            raise unsupported(f"{at}.{name}")
    calls = _calls(at, message)
    if role == "tool" and not message.tool_call_id:
        raise invalid(f"{at}.tool_call_id", f"'{at}.tool_call_id' is required: the id of the tool call that it answers")
    content, parts, offsets = _content(at, message, images)
    if content is None and not calls:
        if role != "assistant":
            raise invalid(f"{at}.content", f"'{at}.content' is required")
        content = ""  # a reply that ended within its reasoning has no content
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    return m.ChatMessage(
        role,
        content,
        message.name,
        parts=parts,
        tool_calls=calls,
        tool_call_id=message.tool_call_id if role == "tool" else None,
        reasoning=reasoning if role == "assistant" else None,
        image_offsets=offsets,
    )


def _content(at: str, message: MessageParam, images: ChatImages) -> tuple[str | None, list[str] | None, list[int]]:
    """The content as one text, and as a list if it has parts; and the places of its images, as in `ChatMessage`."""
    match message.content:
        case None:
            return (message.refusal if message.role == "assistant" else None), None, []
        case str(content):
            return content, None, []
        case parts:
            types = _TEXTS_OF_ASSISTANT if message.role == "assistant" else _TEXTS
            texts: list[str] = []
            offsets: list[int] = []
            for j, part in enumerate(parts):
                if part.type == "image_url":
                    _add_image(f"{at}.content[{j}]", message.role, part, images)
                    offsets.append(len(texts))
                else:
                    texts.append(_PARTS.text_of(f"{at}.content[{j}]", part, types))
            return "\n".join(texts), texts, offsets


def _add_image(at: str, role: str, part: ContentPart, images: ChatImages) -> None:
    images.check(at, role, '{"type": "text", "text": "…"}')
    match part.image_url:
        case None:
            raise invalid(f"{at}.image_url", f"'{at}.image_url' is required")
        case str(url):
            images.add_url(f"{at}.image_url", url)
        case ImageUrl(url, detail):
            images.add_url(f"{at}.image_url.url", url, detail, f"{at}.image_url.detail")


def _calls(at: str, message: MessageParam) -> list[m.ToolCall]:
    if not message.tool_calls:
        return []
    if message.role != "assistant":
        raise invalid(f"{at}.tool_calls", f"'{at}.tool_calls' is only allowed if role is assistant", "invalid_value")
    for index, call in enumerate(message.tool_calls):
        if call.type not in ("function", "custom"):
            raise unsupported(f"{at}.tool_calls[{index}].type", "tools are functions or custom tools")
    return [_call(f"{at}.tool_calls[{index}]", call) for index, call in enumerate(message.tool_calls)]


def _call(at: str, call: ToolCallParam) -> m.ToolCall:
    if call.type == "custom" and call.custom is not None:
        return m.ToolCall(call.id or "", call.custom.name, arguments_of(call.custom.input))
    if call.type == "custom" or call.function is None:
        raise invalid(f"{at}.{call.type}", f"'{at}.{call.type}' is required")
    return m.ToolCall(call.id or "", call.function.name, call.function.arguments)


# ------------------------------------------------------------------------------------------------------------ tools


def _decoded_tools(tools: str) -> list[ToolSpec]:
    return msgspec.json.decode(tools, type=list[ToolSpec])


# --------------------------------------------------------------------------------------------------------- template


def _documents(raw: Raw) -> bool:
    return bool(checked(raw, "documents", _Documents).documents)


def _kwargs(raw: Raw, effort: ReasoningEffort | None) -> str:
    """The template's arguments as JSON. Some templates have no reasoning_effort, only enable_thinking."""
    kwargs = checked(raw, "chat_template_kwargs", _Kwargs).chat_template_kwargs or {}
    if effort is not None:
        own: dict[str, Any] = {"reasoning_effort": effort}
        if effort == "none":
            own["enable_thinking"] = False
        kwargs = own | kwargs
    return msgspec.json.encode(kwargs).decode() if kwargs else ""


def pair_kwargs(raw: Raw, instruction: str | None) -> str:
    """The arguments of a template of pairs as JSON; empty if there are none. Those in `raw`, `chat_template_kwargs`,
    count more, as in vLLM. Raises ApiError."""
    kwargs = checked(raw, "chat_template_kwargs", _Kwargs).chat_template_kwargs or {}
    if instruction is not None:
        kwargs.setdefault("instruction", instruction)
    return msgspec.json.encode(kwargs).decode() if kwargs else ""


def _json(raw: Raw) -> str:
    """The client's JSON, which has been validated."""
    return bytes(raw).decode()
