"""Counts what a request uses for its API key (see key_accounts.py): once a second while it is open, and at its end.

So a gateway that dies loses what its requests used since the last second, and tokens cost nothing when they come.
"""

from typing import TYPE_CHECKING

from pipeline.http_server.access.key_accounts import (
    CACHED_TOKENS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    Account,
    KeyAccounts,
)

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.request import Request
    from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest


def usage_of(accounts: KeyAccounts, parsed: "ParsedRequest", num_tokens: int) -> "RequestUsage | None":
    """Count a request with about `num_tokens` prompt tokens for its API key. Returns what counts the rest, if it has
    output and a key. Raises RateLimited."""
    if (account := accounts.of_scope(parsed.scope)) is None:
        return None
    if parsed.is_prompt_only:
        account.count(REQUESTS)
        return None
    return RequestUsage(account, num_tokens)


class RequestUsage:
    """Of one request for output."""

    __slots__ = ("_in_window", "_num_cached", "_num_output", "_num_prompt", "_taken_s", "account")

    def __init__(self, account: Account, estimate: int) -> None:
        """Opens it, with about `estimate` prompt tokens. Raises RateLimited."""
        self._taken_s = account.take_tokens(estimate)
        account.count(REQUESTS)
        self.account = account
        self._in_window = estimate
        """Prompt tokens that count in the minute: an estimate until all are known."""
        self._num_prompt = self._num_cached = self._num_output = 0

    def update(self, request: "Request", *, is_last: bool = False) -> None:
        """Count what the request has used since the last call. With `is_last` it is over."""
        account = self.account
        sequences = request.sequences
        prompt, output = request.num_prompt_tokens, request.num_generated
        # The number of cached tokens is final when each sequence has begun.
        has_begun = is_last or all(one.first is not None for one in sequences)
        cached = request.num_cached_tokens if has_begun else 0
        if prompt > self._num_prompt:
            account.count(PROMPT_TOKENS, prompt - self._num_prompt)
            self._num_prompt = prompt
        if cached > self._num_cached:
            account.count(CACHED_TOKENS, cached - self._num_cached)
            self._num_cached = cached
        if output > self._num_output:  # output that a preemption dropped is generated again
            account.count(OUTPUT_TOKENS, output - self._num_output)
            account.add_tokens(output - self._num_output)
            self._num_output = output
        if (is_last or request.is_accepted) and self._num_prompt != self._in_window:
            account.correct_tokens(self._taken_s, self._num_prompt - self._in_window)
            self._in_window = self._num_prompt
