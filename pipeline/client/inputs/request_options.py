"""What a client says of one request besides its prompt and how tokens are drawn: its place in the queue, with whom it
shares what is computed of its prompt, and how long it may take."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.client.protocol import MAX_SALT_CHARS, MAX_TIMEOUT_S
from pipeline.errors import PromptError

MAX_INT32 = 2**31 - 1
MAX_SHOWN_CHARS = 100


class RequestOptions(NamedTuple):
    """As they are sent."""

    priority: int = 0
    """Lower goes first, where the server's policy is `priority`; elsewhere it takes 0 alone."""
    cache_salt: str | None = None
    """Only prompts with the same salt share what is computed of them."""
    timeout_s: float | None = None
    """From its arrival at the server to its end; None takes the server's own limit."""


def checked(priority: Any = 0, cache_salt: Any = None, timeout_s: Any = None) -> RequestOptions:
    """Raises TypeError or ValueError that names the option and says what would be right."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority must be an integer, not {_shown(priority)}")
    if not -MAX_INT32 - 1 <= priority <= MAX_INT32:
        raise ValueError(f"priority must be from {-MAX_INT32 - 1} to {MAX_INT32}, not {priority}")
    if cache_salt is not None:
        if not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt must be a string, not {_shown(cache_salt)}")
        if not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
            raise ValueError(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, not {len(cache_salt)}")
        try:
            cache_salt.encode()
        except UnicodeEncodeError:
            raise ValueError("cache_salt contains a lone surrogate, which is not a valid character") from None
    if timeout_s is not None:
        if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
            raise TypeError(f"timeout_s must be a number, not {_shown(timeout_s)}")
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:,}, not {timeout_s:g}")
    return RequestOptions(priority, cache_salt, timeout_s)


def options_of(priority: Any, cache_salt: Any, timeout_s: Any) -> RequestOptions:
    """Those of one request. Raises PromptError."""
    try:
        return checked(0 if priority is None else priority, cache_salt, timeout_s)
    except (TypeError, ValueError) as error:
        raise PromptError(str(error)) from error


def options_for(priority: Any, cache_salt: Any, timeout_s: Any, num_prompts: int | None) -> Iterator[RequestOptions]:
    """Those of each prompt of a batch: `priority` is one for all, or a list with one for each; `num_prompts` is None
    where nobody knows it yet. Raises PromptError, for what is given at once."""
    if priority is None or isinstance(priority, int) or not isinstance(priority, Sequence) or isinstance(priority, str):
        return _same(options_of(priority, cache_salt, timeout_s))
    if num_prompts is not None and len(priority) != num_prompts:
        raise PromptError(f"priority has {len(priority)} entries for {num_prompts} prompts: give one, or one for each")
    each = []
    for place, one in enumerate(priority):
        try:
            each.append(checked(one, cache_salt, timeout_s))
        except (TypeError, ValueError) as error:
            raise PromptError(f"{error} (prompt {place})") from error
    return _each(each)


def _same(options: RequestOptions) -> Iterator[RequestOptions]:
    while True:
        yield options


def _each(each: list[RequestOptions]) -> Iterator[RequestOptions]:
    yield from each
    raise PromptError(f"priority has {len(each)} entries, and there are more prompts: give one, or one for each")


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= MAX_SHOWN_CHARS else words[: MAX_SHOWN_CHARS - 1] + "…"
