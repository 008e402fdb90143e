"""The outputs of a request, with vLLM's names."""

from typing import Literal

import msgspec

from pipeline.client.logprobs import Logprob

OutputKind = Literal["cumulative", "delta", "final"]
"""The contents of a stream's outputs: everything so far, only new output, or one output at the end."""


class CompletionOutput(msgspec.Struct):
    """One sequence of a request."""

    index: int
    """Its index among the request's n."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """`stop`, `length` or `abort`; None until it ends."""
    stop_reason: int | str | None = None
    """The stop string, or the id of `stop_token_ids`, that ended it."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids`, its own log probability and those of the likeliest ids; None if not requested."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of all its ids so far; None if not requested."""

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct):
    """The output of one prompt."""

    request_id: str
    prompt: str | None
    """The prompt's text; None for ids and chats."""
    prompt_token_ids: list[int]
    """The prompt's ids, after the chat template and truncation."""
    outputs: list[CompletionOutput]
    """The n sequences, in the order of their index."""
    finished: bool
    """Whether all sequences have ended."""
    num_cached_tokens: int | None = None
    """Number of prompt ids found in the prefix cache; None until the request is finished, and if no sequence got an
    id."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each of the prompt's ids, as in `CompletionOutput.logprobs`, and None for the first. None until all are
    known, and if not requested."""
