"""Finds out from a chat template's output whether the reply begins inside of its reasoning. Pure.

A prompt may have marks such as `<think>` anywhere: in a document, in an earlier turn, in a system message that explains
them. Only what the template writes behind the last message counts, or behind the message before one that the output
continues. To find this place, the chat is rendered again with a sentinel behind the text of each message:

    text     …<|im_start|>user\\nWhat is </think>?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n
    again    …<|im_start|>user\\nWhat is </think>?TEXT_ENDS_HERE<|im_end|>\\n<|im_start|>assistant\\n<think>\\n
                                                 └ this place ┘
"""

import re
from typing import Any

from pipeline.runtime.messages import ChatPrompt
from pipeline.stages.ingest.prompts.content_specials import with_masks
from pipeline.text.formats.parsing.marks import pattern_of
from pipeline.text.formats.reasoning import ReasoningFormat, ReasoningStage

SENTINEL = "TEXT_ENDS_HERE"

END_CHARS = 256
"""A template ends a prompt with less white space than this."""

CLEAR_CHARS = 16
"""A message of so many characters is none of the words that a template writes behind marks."""

TEXTS = ("role", "content", "reasoning", "reasoning_content", "thinking")
"""Fields of a message that have no marks behind the sentinel. Templates look for words in them, so they stay as they
are."""


def evident(text: str, variables: dict[str, Any], prompt: ChatPrompt, form: ReasoningFormat) -> ReasoningStage | None:
    """How the reply to a prompt's text begins, if this is clear without another rendering, as it mostly is."""
    if not any(mark in text for mark in form.stage_marks):
        return stage_of(text, prompt, form)
    if prompt.continue_final_message:
        return None
    if text[-END_CHARS:].rstrip().endswith(form.prompt_ends) and not _contain(variables, form.stage_marks):
        return form.stage_of(text)
    rest = text[max(text.rfind(mark) + len(mark) for mark in form.stage_marks) :]
    last = variables["messages"][-1]
    said = "" if last.get("tool_calls") else _last_text(last).strip()
    return form.stage_of("") if len(said) >= CLEAR_CHARS and said in rest else None


def with_sentinels(variables: dict[str, Any], prompt: ChatPrompt, form: ReasoningFormat) -> dict[str, Any]:
    """The template's variables with a sentinel behind the text of each message, except of one that the output
    continues. Marks in others of the client's texts are masked: in tools, documents and calls, which a template may
    write behind the last message."""
    pattern = _pattern(form)
    changed = {name: with_masks(variables[name], pattern) for name in ("tools", "documents")}
    messages = [
        {name: value if name in TEXTS else with_masks(value, pattern) for name, value in message.items()}
        for message in variables["messages"]
    ]
    for index, message in enumerate(messages[:-1] if prompt.continue_final_message else messages):
        _mark(message, is_last=index == len(messages) - 1)
    return {**variables, **changed, "messages": messages}


def num_chars_added(prompt: ChatPrompt) -> int:
    """The most characters that the sentinels add to the text of a chat."""
    return len(SENTINEL) * (len(prompt.messages) + 1)


def behind_sentinel(text: str, again: str, prompt: ChatPrompt, form: ReasoningFormat) -> str:
    """The part of a prompt's text behind the last sentinel of the second rendering."""
    index = again.rfind(SENTINEL)
    if index < 0:  # the template shows no message
        return text
    text = text.replace(SENTINEL, "")  # the client's own
    before, behind = again[:index].replace(SENTINEL, ""), again[index + len(SENTINEL) :]
    if text == before + behind or prompt.messages[-1].tool_calls:
        return behind
    # The texts differ where the client's marks are masked, and there the second one is right. But the template may also
    # write something else because a message ends with the sentinel, and there the first one is right.
    pattern = _pattern(form)
    masked = with_masks(text, pattern)
    is_same = not masked.startswith(with_masks(before, pattern)) or masked[len(before) :] == with_masks(behind, pattern)
    return behind if is_same else text[len(before) :]


def stage_of(opening: str, prompt: ChatPrompt, form: ReasoningFormat) -> ReasoningStage:
    """How the reply begins. `opening` is the prompt's text behind the last message, or behind the one before that which
    the output continues."""
    if not prompt.continue_final_message:
        return form.stage_of(opening)
    message = prompt.messages[-1]
    said = ((message.parts[-1] if message.parts else message.content) or "").strip()
    rest = opening.rstrip()
    return form.stage_after(rest.removesuffix(said), said) if rest.endswith(said) else form.stage_of(opening)


def _last_text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, list):
        return str(content)
    return str(content[-1]["text"])


def _mark(message: dict[str, Any], *, is_last: bool) -> None:
    """Put the sentinel behind the text of a message, or into its last call if nothing follows."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and content:
        message["content"] = [*content[:-1], content[-1] | {"text": _marked(content[-1]["text"])}]
    elif isinstance(content, str) and (content or not calls):
        message["content"] = _marked(content)
    elif not calls:
        message["content"] = SENTINEL if content is None else [{"type": "text", "text": SENTINEL}]
    if calls and is_last:
        function = calls[-1]["function"]
        last = calls[-1] | {"function": function | {"name": function["name"] + SENTINEL}}
        message["tool_calls"] = [*calls[:-1], last]


def _marked(text: str) -> str:
    """The sentinel stands before white space at the end, which many templates strip."""
    said = text.rstrip()
    return f"{said}{SENTINEL}{text[len(said) :]}"


def _contain(value: Any, marks: tuple[str, ...]) -> bool:
    match value:
        case str():
            return any(mark in value for mark in marks)
        case dict():
            return any(_contain(key, marks) or _contain(each, marks) for key, each in value.items())
        case list():
            return any(_contain(each, marks) for each in value)
    return False


def _pattern(form: ReasoningFormat) -> "re.Pattern[str]":
    pattern = pattern_of(form.stage_marks)
    assert pattern is not None
    return pattern
