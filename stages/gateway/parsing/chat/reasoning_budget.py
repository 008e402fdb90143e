"""The limit of a reply's reasoning, and what it is not combined with. Pure.

Clients write it as `thinking_token_budget` (vLLM), `reasoning_budget_tokens` or `thinking_budget_tokens` (llama.cpp),
`thinking.budget_tokens` (Anthropic). Ingest and execute: pipeline/text/formats/reasoning_budget.py.
"""

from collections.abc import Sequence

import msgspec

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import ChatBody
from pipeline.text.formats.chat_formats import ChatFormats

BUDGET, MESSAGE = "thinking_token_budget", "reasoning_budget_message"
ALIASES = ("reasoning_budget_tokens", "thinking_budget_tokens")


def with_aliases(chat: ChatBody) -> ChatBody:
    """The body with llama.cpp's names of the field as vLLM's, which takes precedence."""
    given = next((value for name in ALIASES if (value := getattr(chat, name)) is not None), None)
    if given is None or chat.thinking_token_budget is not None:
        return chat
    return msgspec.structs.replace(chat, thinking_token_budget=given)


def check_budget(options: m.GenerationOptions, prompts: Sequence[m.Prompt], formats: ChatFormats) -> None:
    """Raises ApiError if the reply has no reasoning that could be limited, or if the message could end it by itself."""
    values = {BUDGET: options.thinking_token_budget, MESSAGE: options.reasoning_budget_message}
    given = [name for name, value in values.items() if value is not None]
    if not given or options.thinking_token_budget == -1:
        return
    if not all(isinstance(prompt, m.ChatPrompt) for prompt in prompts):
        message = f"'{given[0]}' is only allowed for chats: other replies are not divided into reasoning and answer"
        raise invalid(given[0], message, "invalid_value")
    if formats.reasoning is None:
        what = 'this model writes no reasoning that the server knows (chat.reasoning_parser: "auto" found none)'
        raise unsupported(given[0], what)
    text = options.reasoning_budget_message or ""
    marks = [token.content for token in formats.added.values() if token.special and token.content in text]
    marks += [mark for pair in formats.reasoning.pairs for mark in pair if mark in text]
    if marks:
        message = f"'{MESSAGE}' must be plain text, without the model's mark {marks[0]!r}"
        raise invalid(MESSAGE, message, "invalid_value")
