"""What an API key may still use, and what it has used: the rules of `rpm`, `tpm` and `models` in `[[keys]]`.

    arrive ──429?──► body is read ──► take_tokens ──429?──► open ──► add_tokens, count, as they come

A request counts when it arrives, also if it is invalid, unless it gets a 429 then. Its prompt counts when it is opened,
by an estimate until it is tokenized, and its output while it is generated. What counted in the last 60 seconds is
compared with the limits. Requests that run are not cut.
"""

import math
import os
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from aiohttp import web

from pipeline.http_server.apis.openai import LimitUse, duration
from pipeline.http_server.apis.table import family_of
from pipeline.http_server.errors import ApiError
from pipeline.metrics.stats import KeyUsage
from pipeline.runtime.security import key_usage
from pipeline.runtime.security.api_keys import ApiKey, Keys
from pipeline.runtime.security.key_usage import COUNTERS, UsageMemory

REQUESTS, PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS, RATE_LIMITED, OVERLOADED, INVALID = range(len(COUNTERS))
_REFUSALS: dict[int, int] = {
    HTTPStatus.TOO_MANY_REQUESTS: RATE_LIMITED,
    HTTPStatus.SERVICE_UNAVAILABLE: OVERLOADED,
}
CODE = "rate_limit_exceeded"


class RateLimited(ApiError):
    """429, in OpenAI's words. `what` is "requests" or "tokens"."""

    def __init__(self, what: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, message, code=CODE)
        self.what = what
        self.retry_after_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))

    @property
    def kind(self) -> str:
        return self.what


class Account:
    """Of one key, or of several that have one name."""

    def __init__(self, key: ApiKey, memory: UsageMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._memory = memory
        self._clock = clock

    @property
    def is_limited(self) -> bool:
        return bool(self.key.rpm or self.key.tpm)

    def check(self) -> None:
        """Raises RateLimited if no request is admitted now."""
        if self.is_limited:
            self._check(0)

    def arrive(self) -> None:
        """Count a request, before its body is read. Raises RateLimited as `check`; then it does not count."""
        if self.is_limited:
            now_s = self._check(0)
            self._memory.add(self.key.slot, now_s, requests=1)

    def take_tokens(self, num: int) -> float:
        """Count an estimate of the prompt tokens of a request that is being opened. Returns when, for `correct_tokens`.
        Raises RateLimited if they are too many now."""
        if not self.key.tpm:
            return 0.0
        now_s = self._check(num, has_arrived=True)
        self._memory.add(self.key.slot, now_s, tokens=num)
        return now_s

    def correct_tokens(self, taken_s: float, num_more: int) -> None:
        """The prompt tokens are known: there are more than the estimate, or fewer."""
        if self.key.tpm and num_more:
            self._memory.correct(self.key.slot, taken_s, num_more)

    def add_tokens(self, num: int) -> None:
        """Count output of an open request."""
        if self.key.tpm:
            self._memory.add(self.key.slot, self._clock(), tokens=num)

    def count(self, counter: int, num: int = 1) -> None:
        """Add to a counter."""
        self._memory.count(self.key.slot, counter, num)

    def refused(self, status: int) -> None:
        """Count a request that got an error before it was opened."""
        self.count(_REFUSALS.get(status, INVALID))

    def _check(self, num_tokens: int, *, has_arrived: bool = False) -> float:
        """Returns the time. Raises RateLimited."""
        key, now_s = self.key, self._clock()
        used = self._memory.window(key.slot, now_s)
        if key.rpm and used.requests >= key.rpm and not has_arrived:
            wait_s = used.free_after_s(used.requests - key.rpm + 1, 0)
            raise self._limited("requests", "RPM", key.rpm, used.requests, 1, wait_s)
        if key.tpm and num_tokens > key.tpm:
            message = (
                f"Request too large for '{key.name}' on tokens per min (TPM): Limit {key.tpm}, Requested {num_tokens}. "
                "The prompt must be shorter"
            )
            raise RateLimited("tokens", message, None)
        if key.tpm and used.tokens + max(1, num_tokens) > key.tpm:
            wait_s = used.free_after_s(0, used.tokens + max(1, num_tokens) - key.tpm)
            raise self._limited("tokens", "TPM", key.tpm, used.tokens, num_tokens, wait_s)
        return now_s

    def _limited(self, what: str, short: str, limit: int, used: int, requested: int, wait_s: float) -> RateLimited:
        message = (
            f"Rate limit reached for '{self.key.name}' on {what} per min ({short}): Limit {limit}, Used {used}, "
            f"Requested {requested}. Please try again in {duration(wait_s)}"
        )
        return RateLimited(what, message, wait_s)

    def uses(self) -> list[LimitUse]:
        """What the key may still use, of each thing that it has a limit of."""
        if not self.is_limited:
            return []
        key, used = self.key, self._memory.window(self.key.slot, self._clock())
        return [
            LimitUse(what, limit, max(0, limit - num), used.free_after_s(*free) if num else 0.0)
            for what, limit, num, free in (
                ("requests", key.rpm, used.requests, (math.inf, 0.0)),
                ("tokens", key.tpm, used.tokens, (0.0, math.inf)),
            )
            if limit
        ]


class KeyAccounts:
    """The accounts of a server's keys, in one of its gateways. `close` frees the memory."""

    def __init__(self, keys: Keys | None, usage_fd: int = -1, part: int = 0, *, counts_tokens: bool = True) -> None:
        """`usage_fd` as of `key_usage.create`, of which `part` is this process's; -1 for memory that it alone has. If
        it does not count tokens, they have no limit here."""
        self.keys = keys
        self._counts_tokens = counts_tokens
        self._accounts: dict[str, Account] = {}
        self._memory: UsageMemory | None = None
        if keys is not None:
            fd = key_usage.create() if usage_fd < 0 else usage_fd
            try:
                self._memory = UsageMemory(fd, part)
            finally:
                if usage_fd < 0:
                    os.close(fd)

    @classmethod
    def inherited(cls, keys_fd: int, usage_fd: int, part: int) -> "KeyAccounts":
        """Those of the keys in `keys_fd`, as of `Keys.share`; none if it is -1."""
        return cls(Keys.inherited(keys_fd) if keys_fd >= 0 else None, usage_fd, part)

    def of_scope(self, scope: str) -> Account | None:
        """The account of the key with this scope; None without a key."""
        if (found := self._accounts.get(scope)) is not None:
            return found
        key = None if self.keys is None else self.keys.of_scope(scope)
        if key is None or self._memory is None:
            return None
        if not self._counts_tokens:
            key = msgspec.structs.replace(key, tpm=0)
        return self._accounts.setdefault(scope, Account(key, self._memory))

    def usage(self) -> list[KeyUsage]:
        """What each key has used, at this process alone if the memory is its own."""
        if self.keys is None or self._memory is None:
            return []
        return self._memory.usage({one.name: one.slot for one in self.keys.all})

    def name_of(self, scope: str) -> str:
        """The name of the key with this scope; empty without a key."""
        key = None if self.keys is None else self.keys.of_scope(scope)
        return "" if key is None else key.name

    def use(self, keys: Keys) -> None:
        """Accept these keys from now on. Open requests keep their account."""
        assert self.keys is not None
        self.keys.use(keys)
        self._accounts.clear()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


ACCOUNT = web.RequestKey("account", Account)
"""Of a request that counts against the limits of its key."""
COUNTED = web.RequestKey("counted", bool)
"""Of a request that has arrived at its account: it counts once, however often it is tried."""


async def add_limit_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Say in a response what its key may still use."""
    if isinstance(request, web.Request) and (account := request.get(ACCOUNT)) is not None:
        response.headers.update(family_of(request.rel_url.raw_path).limit_headers(account.uses()))
