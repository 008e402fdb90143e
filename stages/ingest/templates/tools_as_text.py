"""Writes tools, calls and results into the text of a chat's messages, for templates that don't show them. Pure.

tools                  a section of the system message, or of the first user's message if the template refuses system
                       messages
an assistant's calls   at the end of its content
tool messages          a user's message with the results of consecutive ones
"""

import itertools

import msgspec

from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates import conversation
from pipeline.text.formats.tool_parsers.generic import (
    RESPONSE_END,
    RESPONSE_START,
    call_text,
    result_text,
    tools_section,
)

BETWEEN = "\n\n"


def with_tools_as_text(prompt: ChatPrompt, *, takes_system: bool) -> ChatPrompt:
    """The chat without tools, calls and results, but with their text. Raises BadChat if the tools are no array of
    objects."""
    messages = _plain(prompt.messages)
    if conversation.has_tools(prompt):
        section = tools_section(
            conversation.array_of(prompt.tools, "tools") or [],
            choice=prompt.tool_choice,
            name=prompt.tool_name,
            parallel=prompt.parallel_tool_calls,
        )
        messages = _with_section(messages, section, "system" if takes_system else "user")
    return msgspec.structs.replace(prompt, messages=messages, tools="", tool_choice="none", tool_name="")


def _plain(messages: list[ChatMessage]) -> list[ChatMessage]:
    plain: list[ChatMessage] = []
    for is_result, run in itertools.groupby(messages, lambda message: message.role == "tool"):
        if is_result:
            plain.append(_results(list(run)))
            continue
        for message in run:
            if message.tool_calls:
                calls = "\n".join(_call(call) for call in message.tool_calls)
                message = msgspec.structs.replace(_appended(message, calls, "\n"), tool_calls=[])
            plain.append(message)
    return plain


def _results(run: list[ChatMessage]) -> ChatMessage:
    """A user's message with these results, whose images stand where they are in the results."""
    if not any(message.image_offsets for message in run):
        return ChatMessage("user", "\n".join(result_text(message.content or "") for message in run))
    texts: list[str] = []
    offsets: list[int] = []
    text = ""
    for message in run:
        text += f"\n{RESPONSE_START}" if text else RESPONSE_START
        given = [message.content or ""] if message.parts is None else message.parts
        for index in range(len(given) + 1):
            for _ in range(message.image_offsets.count(index)):
                if text:
                    texts.append(f"{text}\n")
                offsets.append(len(texts))
                text = ""
            if index < len(given):
                text += f"\n{given[index]}" if text else given[index]
        text += f"\n{RESPONSE_END}"
    texts.append(text)
    return ChatMessage("user", "".join(texts), parts=texts, image_offsets=offsets)


def _with_section(messages: list[ChatMessage], section: str, role: str) -> list[ChatMessage]:
    """Add the section to the end of the system message that begins the chat, or to the start of the first user's."""
    first = messages[0]
    if first.role in ("system", "developer"):  # the client's, so a template that refuses it refuses the chat
        return [_appended(first, section, BETWEEN), *messages[1:]]
    if role == "user" and first.role == "user":
        content = f"{section}{BETWEEN}{first.content or ''}"
        parts = None if first.parts is None else [section, *first.parts]
        offsets = [offset + 1 for offset in first.image_offsets]
        return [msgspec.structs.replace(first, content=content, parts=parts, image_offsets=offsets), *messages[1:]]
    return [ChatMessage(role, section), *messages]


def _appended(message: ChatMessage, text: str, between: str) -> ChatMessage:
    content = f"{message.content}{between}{text}" if message.content else text
    parts = message.parts
    if parts and len(parts) not in message.image_offsets:
        parts = [*parts[:-1], f"{parts[-1]}{between}{text}"]  # templates write parts with nothing between them
    elif parts is not None:
        parts = [*parts, text]
    return msgspec.structs.replace(message, content=content, parts=parts)


def _call(call: ToolCall) -> str:
    return call_text(call.name, call.arguments if conversation.arguments_of(call) else "{}")
