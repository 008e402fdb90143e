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


class RequestStateStats(msgspec.Struct):
    """When a request got where, with the names of vLLM's metrics. `…_ts` are on the scale of this process's
    time.monotonic(); a server on another machine has another clock, whose difference is in all of them."""

    arrival_time: float
    """Unix time at which the gateway received the request, in seconds."""
    queued_ts: float
    """When the first of its sequences entered the scheduler's waiting queue."""
    scheduled_ts: float
    """When the first step of the first sequence was planned."""
    first_token_ts: float
    """When the first token was sampled."""
    last_token_ts: float
    """When the last token of all sequences was sampled."""
    first_token_latency: float
    """Seconds from the arrival until the gateway had the first token's text."""
    num_generation_tokens: int
    """Of all sequences, those that were not returned included."""


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
    metrics: RequestStateStats | None = None
    """Set at the end if the `LLM` was made with `disable_log_stats=False`, unless the request was aborted."""
