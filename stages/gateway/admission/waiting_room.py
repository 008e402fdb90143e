"""What requests keep that wait before they are open: until their models are loaded, or their images fetched. A model's
own limits count a request once it is open."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from pipeline.config.settings import GatewaySettings
from pipeline.runtime.security.api_keys import NO_SCOPE, Keys
from pipeline.stages.gateway.admission.shares import FREE_PARTS
from pipeline.stages.gateway.errors import overloaded

MESSAGE_PARTS = 2
"""A message over ZeroMQ is kept as it came, and decoded."""


class WaitingRoom:
    """Has room for `gateway.max_open_sequences` requests, and `gateway.max_open_bytes` of their bodies. A key of
    several has at most seven times what it leaves free, beyond its first request."""

    def __init__(
        self, settings: GatewaySettings, keys: Keys | None, wait: str = "wait for models that are not loaded"
    ) -> None:
        """`wait`: what requests do here, in words."""
        self._max_requests, self._max_bytes = settings.max_open_sequences, settings.max_open_bytes
        self._keys, self._wait = keys, wait
        self._num_requests: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        """By the scope of the API key."""

    @contextlib.contextmanager
    def hold(self, num_bytes: int, scope: str) -> Iterator[None]:
        """A request waits. Raises ApiError, 503, if too much waits already."""
        self._check(num_bytes, scope)
        self._num_requests[scope] += 1
        self._num_bytes[scope] += num_bytes
        try:
            yield
        finally:
            self._num_requests[scope] -= 1
            self._num_bytes[scope] -= num_bytes
            if not self._num_requests[scope]:
                del self._num_requests[scope], self._num_bytes[scope]

    def _check(self, num_bytes: int, scope: str) -> None:
        free = self._max_requests - self._num_requests.total() - 1
        free_bytes = self._max_bytes - self._num_bytes.total() - num_bytes
        if free < 0 or free_bytes < 0:
            raise overloaded(f"{self._num_requests.total()} requests with {self._num_bytes.total()} bytes {self._wait}")
        if self._keys is None or scope == NO_SCOPE or len(self._keys.all) < 2 or scope not in self._num_requests:
            return
        own, own_bytes = self._num_requests[scope] + 1, self._num_bytes[scope] + num_bytes
        if own > FREE_PARTS * free or own_bytes > FREE_PARTS * free_bytes:
            raise overloaded(
                f"{own} requests of this API key would {self._wait}, and what is left of gateway.max_open_sequences "
                "and gateway.max_open_bytes is for other keys",
                by_size=True,
            )
