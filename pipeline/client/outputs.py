"""What comes of a request, in vLLM's shapes."""

from typing import Literal

import msgspec

from pipeline.client.logprobs import Logprob

OutputKind = Literal["cumulative", "delta", "final"]
"""What each output of a stream holds: all so far, what is new, or, once, everything."""


class CompletionOutput(msgspec.Struct):
    """One sequence of a request."""

    index: int
    """Its place among the n that were asked for."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """`stop`, `length` or `abort` where it has ended, None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the id of `stop_token_ids`, that ended it."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids` its own and those of the likeliest ids in its place; None where they were not asked for.
    So is the next."""
    cumulative_logprob: float | None = None
    """Sum of those of the ids themselves, all so far."""

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """One prompt, and what has come of it."""

    request_id: str
    prompt: str | None
    """The prompt's text; None where ids or a chat were given."""
    prompt_token_ids: list[int]
    """What the server made of it: for a chat, what the model's template wrote."""
    outputs: list[CompletionOutput]
    """In the order of their index, as many as `n` asked for."""
    finished: bool
    """Whether all sequences have ended."""
    num_cached_tokens: int | None = None
    """Of the prompt's ids, those that were found in the prefix cache, and not computed; None until it is
    finished, and where no sequence got an id."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each of the prompt's ids what `CompletionOutput.logprobs` has, and None for the first, before which there is
    nothing. None before all are known, and where they were not asked for."""
