"""Forms of a conversation that some templates refuse or shorten although their models write such replies. Pure.

    an empty reply     an assistant's message without text and calls, such as one that ended within its reasoning. A
                       template that refuses it may take it with an empty part
    a system message   behind others, as Codex and Claude Code send it. If a template refuses it, or leaves it out, all
                       system messages become one at the start
    several calls      in one message. If a template refuses them, or writes only the first, each call becomes a message
                       with its own results behind it
    text, reasoning    and calls in one message. If a template refuses them, the text becomes the end of the reasoning

What a template does is found out by a try, with these chats.
"""

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits

USER = ChatMessage("user", "Hi")
LAST_WORDS = "last_words"
"""At the end of each of the chats, so that it shows whether a template writes all of it."""
CALL, LAST_CALL = ToolCall("call00001", "f", "{}"), ToolCall("call00002", LAST_WORDS, "{}")
RESULT = ChatMessage("tool", "a", CALL.name, tool_call_id=CALL.id)
LAST_RESULT = ChatMessage("tool", LAST_WORDS, LAST_CALL.name, tool_call_id=LAST_CALL.id)

EMPTY_REPLY = ChatPrompt([USER, ChatMessage("assistant", ""), ChatMessage("user", LAST_WORDS)])
LATER_SYSTEM = ChatPrompt(
    [ChatMessage("system", "a"), USER, ChatMessage("assistant", "b"), ChatMessage("system", LAST_WORDS), USER]
)
SEVERAL_CALLS = ChatPrompt([USER, ChatMessage("assistant", None, tool_calls=[CALL, LAST_CALL]), RESULT, LAST_RESULT])
REASONED_CALL = ChatPrompt([USER, ChatMessage("assistant", "a", tool_calls=[LAST_CALL], reasoning="b"), LAST_RESULT])


def has_reasoned_call(prompt: ChatPrompt) -> bool:
    return any(map(_is_reasoned_call, prompt.messages))


def _is_reasoned_call(message: ChatMessage) -> bool:
    return bool(message.tool_calls and message.reasoning and message.content)


def with_one_text(prompt: ChatPrompt) -> ChatPrompt:
    """The chat with the text of calls that have reasoning at the end of the reasoning."""
    messages = [
        msgspec.structs.replace(one, content=None, parts=None, reasoning=f"{one.reasoning}\n\n{one.content}")
        if _is_reasoned_call(one)
        else one
        for one in prompt.messages
    ]
    return msgspec.structs.replace(prompt, messages=messages)


def has_empty_reply(prompt: ChatPrompt) -> bool:
    return any(one.role == "assistant" and not one.content and not one.tool_calls for one in prompt.messages)


def has_later_system(prompt: ChatPrompt) -> bool:
    return any(one.role in ("system", "developer") for one in prompt.messages[1:])


def with_one_system(traits: TemplateTraits) -> TemplateTraits:
    """The traits of a template that gets all system messages as one at the start."""
    return dataclasses.replace(traits, one_system=True)


def has_several_calls(prompt: ChatPrompt) -> bool:
    return any(len(one.tool_calls) > 1 for one in prompt.messages)


def with_empty_parts(traits: TemplateTraits) -> TemplateTraits:
    """The traits of a template that gets empty replies as an empty part."""
    return dataclasses.replace(traits, empty_parts=True)


def with_calls_apart(prompt: ChatPrompt) -> ChatPrompt:
    """The chat with one call in each message, and the results of the call behind it. Other results follow the last."""
    messages: list[ChatMessage] = []
    index = 0
    while index < len(prompt.messages):
        message = prompt.messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            messages.append(message)
            continue
        end = index
        while end < len(prompt.messages) and prompt.messages[end].role == "tool":
            end += 1
        messages += _apart(message, prompt.messages[index:end])
        index = end
    return msgspec.structs.replace(prompt, messages=messages)


def _apart(message: ChatMessage, results: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Of calls with the same id, each but the last one gets one result."""
    by_id: dict[str | None, deque[ChatMessage]] = {}
    for result in results:
        by_id.setdefault(result.tool_call_id, deque()).append(result)
    left = Counter(call.id for call in message.tool_calls)
    found: list[ChatMessage] = []
    for index, call in enumerate(message.tool_calls):
        first = msgspec.structs.replace(message, tool_calls=[call])
        found.append(first if index == 0 else ChatMessage("assistant", None, tool_calls=[call]))
        left[call.id] -= 1
        if left[call.id] == 0:
            found += by_id.pop(call.id, ())
        elif answers := by_id.get(call.id):
            found.append(answers.popleft())
    return [*found, *(result for rest in by_id.values() for result in rest)]
