"""Prompts of bodies: texts or ids, one or several; their lengths and truncation. Pure.

Too many or too long prompts are refused before they are converted.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.errors import invalid

Prompts = str | list[str | int | list[int]]
"""A text, texts, ids, or lists of ids."""


def num_prompts(prompt: Prompts) -> int:
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


def prompts_of(prompt: Prompts, max_ids: int | None, param: str = "prompt") -> list[m.Prompt]:
    """Convert the prompts. Raises ApiError if one has more than `max_ids` ids."""
    if isinstance(prompt, str):
        return [m.TextPrompt(prompt)]
    if not prompt:
        raise invalid(param, f"'{param}' must not be an empty array", "invalid_value")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise invalid(param, f"'{param}' must hold strings, ids or arrays of ids, not a mixture", "invalid_type")
    if kinds == {int}:
        check_num_ids(len(prompt), param, max_ids)
        return [m.IdsPrompt(packed(prompt))]
    for i, item in enumerate(prompt):
        if isinstance(item, list):
            check_num_ids(len(item), f"{param}[{i}]", max_ids)
    return [_prompt(f"{param}[{i}]", item) for i, item in enumerate(prompt)]


def _prompt(param: str, item: str | int | list[int]) -> m.Prompt:
    if isinstance(item, str):
        return m.TextPrompt(item)
    if not item:
        raise invalid(param, f"'{param}' must not be an empty array", "invalid_value")
    return m.IdsPrompt(packed(item))


def packed(ids: Any) -> bytes:
    return np.array(ids, "<i4").tobytes()


def most_ids(truncate: int | None, max_prompt_tokens: int | None) -> int | None:
    """The most ids that a prompt may have: more than the model takes if it is truncated."""
    return m.MAX_SHOWN_IDS if truncate and max_prompt_tokens is not None else max_prompt_tokens


def check_num_ids(num_ids: int, param: str, max_ids: int | None) -> None:
    """Raises ApiError."""
    if max_ids is not None and num_ids > max_ids:
        message = (
            f"this model's maximum context length is {max_ids} tokens, and the prompt has {num_ids}: "
            "there must be room for at least one output token"
        )
        raise invalid(param, message, "context_length_exceeded")


def check_prompt_bytes(prompts: Sequence[m.Prompt], max_bytes: int, dialect: Dialect, name: str = "prompt") -> None:
    """Check the length of each prompt's text, in the field `name`. Raises ApiError."""
    # A query is in the prompt of each of a thousand documents.
    num_bytes = functools.cache(_num_bytes) if len(prompts) > 1 else _num_bytes
    for index, prompt in enumerate(prompts):
        size = sum(map(num_bytes, _texts(prompt)))
        if size > max_bytes:
            param = "messages" if isinstance(prompt, m.ChatPrompt) else name
            param = dialect.prompt_name(param, index, len(prompts))
            message = f"'{param}' has {size} bytes of text, and the limit is {max_bytes} (limits.max_prompt_bytes)"
            raise invalid(param, message, "invalid_value")


def require_prompt(prompt: Prompts | None, *, may_be_empty: bool = False) -> Prompts:
    """Refuse a missing or empty prompt, in vLLM's words, which its clients look for. Raises ApiError."""
    if prompt is None or prompt == [] or (prompt == "" and not may_be_empty):
        message = "Either prompt or prompt_embeds must be provided and non-empty. This server supports only prompt."
        raise invalid("prompt", message)
    return prompt


def check_truncate(truncate: int | None, max_prompt_tokens: int | None) -> int:
    """Check truncate_prompt_tokens. Returns the value for `PromptOptions.truncate`. Raises ApiError."""
    if truncate is None:
        return 0
    param = "truncate_prompt_tokens"
    if truncate == 0:
        raise invalid(param, f"'{param}' must be -1 or at least 1, not 0", "invalid_value")
    if max_prompt_tokens is not None and truncate > max_prompt_tokens:
        message = f"'{param}' must be at most this model's maximum context length, {max_prompt_tokens} tokens"
        raise invalid(param, message, "invalid_value")
    return truncate


def _texts(prompt: m.Prompt) -> Iterator[str]:
    match prompt:
        case m.TextPrompt(text, pair, kwargs):
            yield from (text, pair or "", kwargs)
        case m.ChatPrompt():
            yield from (prompt.tools, prompt.documents, prompt.template_kwargs)
            for message in prompt.messages:
                yield from (message.content or "", message.reasoning or "")
                yield from (call.arguments for call in message.tool_calls)


def _num_bytes(text: str) -> int:
    """Length in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
