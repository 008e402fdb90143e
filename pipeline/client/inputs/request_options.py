"""Request options besides the prompt and the sampling parameters: priority, cache salt and timeout."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeline.client.inputs.checks import MAX_INT32, check_integer, shown
from pipeline.client.protocol import MAX_SALT_CHARS, MAX_TIMEOUT_S
from pipeline.errors import PromptError


class RequestOptions(NamedTuple):
    """The options as they are sent."""

    priority: int = 0
    """Lower goes first if the server's policy is `priority`. Other policies accept only 0."""
    cache_salt: str | None = None
    """Only prompts with the same salt share cached prefixes."""
    timeout_s: float | None = None
    """Maximum time from the arrival at the server to the end; None uses the server's setting."""
    adapter: str | None = None
    """The name of a LoRA adapter; None for the model itself."""

    def wire_fields(self) -> dict[str, Any]:
        """The fields of the protocol's `Request`."""
        fields = self._asdict()
        return fields | {"model": fields.pop("adapter"), "priority": self.priority or None}


def checked(priority: Any = 0, cache_salt: Any = None, timeout_s: Any = None, adapter: Any = None) -> RequestOptions:
    """Check the options. Raises TypeError or ValueError that names the option and the valid values."""
    check_integer("priority", priority, -MAX_INT32 - 1, MAX_INT32)
    if cache_salt is not None:
        if not isinstance(cache_salt, str):
            raise TypeError(f"cache_salt must be a string, not {shown(cache_salt)}")
        if not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
            raise ValueError(f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, not {len(cache_salt)}")
        try:
            cache_salt.encode()
        except UnicodeEncodeError:
            raise ValueError("cache_salt contains a lone surrogate, which is not a valid character") from None
    if timeout_s is not None:
        if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
            raise TypeError(f"timeout_s must be a number, not {shown(timeout_s)}")
        if not (math.isfinite(timeout_s) and 0 < timeout_s <= MAX_TIMEOUT_S):
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:,}, not {timeout_s:g}")
    if adapter is not None and not (isinstance(adapter, str) and adapter):
        raise TypeError(f"adapter must be the name of a LoRA adapter, not {shown(adapter)}")
    return RequestOptions(priority, cache_salt, timeout_s, adapter)


def options_of(priority: Any, cache_salt: Any, timeout_s: Any, adapter: Any = None) -> RequestOptions:
    """The options of one request. Raises PromptError."""
    try:
        return checked(0 if priority is None else priority, cache_salt, timeout_s, adapter)
    except (TypeError, ValueError) as error:
        raise PromptError(str(error)) from error


def options_for(
    priority: Any, cache_salt: Any, timeout_s: Any, num_prompts: int | None, adapter: Any = None
) -> Iterator[RequestOptions]:
    """The options of each prompt of a batch. `priority` is one for all, or a list with one for each. `num_prompts` is
    None for an iterator. Raises PromptError."""
    if priority is None or isinstance(priority, int) or not isinstance(priority, Sequence) or isinstance(priority, str):
        return _same(options_of(priority, cache_salt, timeout_s, adapter))
    if num_prompts is not None and len(priority) != num_prompts:
        raise PromptError(f"priority has {len(priority)} entries for {num_prompts} prompts: give one, or one for each")
    each = []
    for index, one in enumerate(priority):
        try:
            each.append(checked(one, cache_salt, timeout_s, adapter))
        except (TypeError, ValueError) as error:
            raise PromptError(f"{error} (prompt {index})") from error
    return _each(each)


def _same(options: RequestOptions) -> Iterator[RequestOptions]:
    while True:
        yield options


def _each(each: list[RequestOptions]) -> Iterator[RequestOptions]:
    yield from each
    raise PromptError(f"priority has {len(each)} entries, but there are more prompts: give one, or one for each")
