"""Bounds the memory of bodies that are being received, so that no sender holds up the others.

    budget.upload(stop) ──► grow(num_bytes) … ──► complete() ──► release()
                                  └──► stop(), why_given_up ───────┘

Only bytes that have arrived count: a length that a client declares and never sends takes no room from others. If the
budget is used up, bodies that arrive too slowly are given up first, the slowest first. So a client can fill the budget
only as long as it sends fast, and then its bodies are soon complete. If an API key has less than its share of the
budget, which is the same for all keys that have large bodies, it gets room from keys that have more: the last bodies of
these are given up, also complete ones that wait for their parsing.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from pipeline.http_server.errors import overloaded

NUM_BODIES = 16
"""Bodies of the largest size that may be received at once. Parsing is serial, so more would not be served sooner. At
4 MiB each, which are copied once, they take at most 128 MiB."""
SMALL_BYTES = 65536
"""Bodies up to this size are not counted, so slow large bodies don't block them. A connection may buffer as much
anyway."""
NUM_MEDIA_BODIES = 4
"""The same of bodies with images that are larger than those without may be: 128 MiB, copied once."""
GRACE_S = 1.0
"""A body is not slow in this time, whatever has arrived."""
MIN_BYTES_PER_S = 256 * 1024
"""A body that arrives slower than this, on average, is given up when another one needs its room."""


WhyGivenUp = Literal["slow", "share"]
"""It arrived too slowly, or its API key had more than its share."""


class UploadBudget:
    """A budget of one gateway."""

    def __init__(self, max_body_bytes: int, num_bodies: int = NUM_BODIES) -> None:
        self.max_bytes = num_bodies * max_body_bytes
        self.num_bytes = 0
        self._uploads: dict[int, Upload] = {}
        """Those that count, by id()."""

    def upload(self, stop: Callable[[], object], scope: str = "") -> "Upload":
        """A new body of a scope. `stop` ends its receiving or its waiting, and then `why_given_up` says why. The caller
        must release it."""
        return Upload(self, stop, scope)

    def check_room(self, num_bytes: int, scope: str = "") -> None:
        """Raises ApiError, 503, if there is no room for a body of this size even without those that would be given
        up for it."""
        if num_bytes > SMALL_BYTES:
            now_s = time.monotonic()
            slow = sum(upload.num_counted for upload in self._uploads.values() if upload.is_slow(now_s))
            num_left = self.max_bytes - self.num_bytes + slow
            if num_bytes > num_left and not self._is_due(num_bytes, scope):
                self._check(num_bytes, num_left)

    def take(self, upload: "Upload", num_bytes: int) -> None:
        """Count `num_bytes` in all for an upload. Raises ApiError, 503."""
        num_more = num_bytes - upload.num_counted
        if num_more > self.max_bytes - self.num_bytes:
            self._give_up_slow(num_more, upload)
        if num_more > self.max_bytes - self.num_bytes and self._is_due(num_more, upload.scope):
            self._give_up_of_larger(num_more, upload.scope)
        self._check(num_more, self.max_bytes - self.num_bytes)
        self.num_bytes += num_more
        upload.num_counted = num_bytes
        self._uploads[id(upload)] = upload

    def release(self, upload: "Upload") -> None:
        """Stop counting an upload. Idempotent."""
        self._uploads.pop(id(upload), None)
        self.num_bytes -= upload.num_counted
        upload.num_counted = 0

    def _give_up_slow(self, num_more: int, asking: "Upload") -> None:
        now_s = time.monotonic()
        slow = [one for one in self._uploads.values() if one is not asking and one.is_slow(now_s)]
        for upload in sorted(slow, key=lambda one: one.bytes_per_s(now_s)):
            if num_more <= self.max_bytes - self.num_bytes:
                return
            self.release(upload)
            upload.give_up("slow")

    def _is_due(self, num_more: int, scope: str) -> bool:
        """Whether a scope stays within its share with so many bytes more, so that others must make room."""
        num_of_scope = self._num_of_scope()
        num_of_scope[scope] += num_more
        return num_of_scope[scope] * len(num_of_scope) <= self.max_bytes

    def _give_up_of_larger(self, num_more: int, scope: str) -> None:
        """Make room: the last bodies of whichever scope has most."""
        num_of_scope = self._num_of_scope()
        del num_of_scope[scope]
        while num_more > self.max_bytes - self.num_bytes and num_of_scope.total():
            (largest, _), *_ = num_of_scope.most_common(1)
            last = [one for one in self._uploads.values() if one.scope == largest][-1]
            num_of_scope[largest] -= last.num_counted
            self.release(last)
            last.give_up("share")

    def _num_of_scope(self) -> "Counter[str]":
        """Bytes by scope."""
        found: Counter[str] = Counter()
        for upload in self._uploads.values():
            found[upload.scope] += upload.num_counted
        return found

    def _check(self, num_more: int, num_left: int) -> None:
        if num_more > num_left:
            raise overloaded(
                f"{num_left} of {self.max_bytes} bytes are free for large bodies that are being received, and this "
                f"body needs {num_more} more",
                by_size=True,
            )


class Upload:
    """One body. Times are by time.monotonic()."""

    def __init__(self, budget: UploadBudget, stop: Callable[[], object], scope: str) -> None:
        self._budget = budget
        self._stop = stop
        self.scope = scope
        self._began_s = time.monotonic()
        self.num_counted = 0
        self.why_given_up: WhyGivenUp | None = None
        self.is_complete = False

    def grow(self, num_bytes: int) -> None:
        """`num_bytes` have arrived in all. Raises ApiError, 503."""
        if num_bytes > SMALL_BYTES and self.why_given_up is None:
            self._budget.take(self, num_bytes)

    def change_budget(self, budget: UploadBudget) -> None:
        """Count in another budget from now on, when the body grows next."""
        self._budget.release(self)
        self._budget = budget

    def complete(self) -> None:
        """The body has arrived, and only its parsing remains."""
        self.is_complete = True

    def release(self) -> None:
        """It has been parsed, or it failed."""
        self._budget.release(self)

    def is_slow(self, now_s: float) -> bool:
        return not self.is_complete and now_s >= self._began_s + GRACE_S and self.bytes_per_s(now_s) < MIN_BYTES_PER_S

    def bytes_per_s(self, now_s: float) -> float:
        return self.num_counted / max(now_s - self._began_s, 1e-9)

    def give_up(self, why: WhyGivenUp) -> None:
        self.why_given_up = why
        self._stop()
