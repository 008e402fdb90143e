"""How long a prompt may be that a client sends, and how much of it is kept."""

from collections.abc import Iterator, Sequence

from pipeline import messages as m
from pipeline.stages.gateway.errors import invalid


def check_prompt_bytes(prompts: Sequence[m.Prompt], max_bytes: int) -> None:
    """That the text of each is short enough to be looked at. Raises ApiError."""
    for place, prompt in enumerate(prompts):
        size = sum(map(_num_bytes, _texts(prompt)))
        if size > max_bytes:
            param = "messages" if isinstance(prompt, m.ChatPrompt) else "prompt"
            param += f"[{place}]" if len(prompts) > 1 else ""
            message = f"'{param}' has {size} bytes of text, and at most {max_bytes} are taken: limits.max_prompt_bytes"
            raise invalid(param, message, "invalid_value")


def check_truncate(truncate: int | None, max_prompt_tokens: int | None) -> int:
    """How many of a prompt's last ids are kept, as `PromptOptions.truncate` has it. Raises ApiError."""
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
        case m.TextPrompt(text):
            yield text
        case m.ChatPrompt():
            yield from (prompt.tools, prompt.documents, prompt.template_kwargs)
            for message in prompt.messages:
                yield from (message.content or "", message.reasoning or "")
                yield from (call.arguments for call in message.tool_calls)


def _num_bytes(text: str) -> int:
    """Of UTF-8"""
    return len(text) if text.isascii() else len(text.encode())
