"""What each API key has used: counters since the server's start, and the requests and tokens of the last minute.

They are in shared memory that the supervisor owns, so they survive the death of a gateway: its successor goes on with
the same numbers, and no counter goes back. Each gateway writes its own part only; the sum over all is what counts.

    gateway.0 ──writes──► part 0 ┐
    gateway.1 ──writes──► part 1 ┼──sum──► the supervisor's stats; each gateway, for its limits
    a gateway that is gone: part 2 ┘

    memory: for each part, whether it is used │ parts
    part:   for each slot │ counters │ seconds: a ring, by the second's number
    second: its number │ requests │ tokens

Times are by time.monotonic(), which all processes of a host share. An entry of the ring is valid if it has the number
of its second. A number is 8 bytes, aligned, so a reader never gets half of one.
"""

import mmap

from pipeline.metrics.stats import KeyUsage
from pipeline.runtime.security.api_keys import MAX_SLOTS
from pipeline.shm import segment

MAX_PARTS = 64
"""Gateways that a server may have: the limit of gateway.replicas."""
WINDOW_S = 60
NUM_SECONDS = 64
"""A power of two above `WINDOW_S`."""
COUNTERS = KeyUsage.__struct_fields__[1:]
NUM_COUNTERS = 8
_SECOND = 3
"""Numbers of a second, as those below: 8 bytes each."""
_SLOT = NUM_COUNTERS + NUM_SECONDS * _SECOND
_PART = MAX_SLOTS * _SLOT
NUM_BYTES = 8 * (MAX_PARTS + MAX_PARTS * _PART)
"""Of which only pages that were touched take memory: one or two for each slot and part that is used."""

assert len(COUNTERS) <= NUM_COUNTERS


class Window:
    """What one key has used in the last `WINDOW_S` seconds, at all gateways."""

    def __init__(self, seconds: list[tuple[int, int, int]], now_s: float) -> None:
        """`seconds` are the number, requests and tokens of each second in which there are some."""
        self._seconds, self._now_s = seconds, now_s
        self.requests = sum(one[1] for one in seconds)
        self.tokens = sum(one[2] for one in seconds)

    def free_after_s(self, requests: float, tokens: float) -> float:
        """How long until so many requests and tokens are older than the window; infinite numbers are all of them."""
        last = None
        for second, num_requests, num_tokens in sorted(self._seconds):
            if requests <= 0 and tokens <= 0:
                break
            requests -= num_requests
            tokens -= num_tokens
            last = second
        return 0.0 if last is None else max(0.0, last + WINDOW_S - self._now_s)


def create() -> int:
    """The descriptor of new memory, in which all is 0. The caller owns it."""
    return segment.create_sparse("key-usage", NUM_BYTES)


class UsageMemory:
    """The memory, for one gateway, which writes its `part`, or for a reader. `close` unmaps it."""

    def __init__(self, fd: int, part: int | None = None) -> None:
        """`fd` as of `create`."""
        self._map = mmap.mmap(fd, NUM_BYTES)
        self._view = memoryview(self._map).cast("q")
        self._part = part
        if part is not None:
            self._view[part] = 1

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def usage(self, slots: dict[str, int]) -> list[KeyUsage]:
        """The counters of these names, which have these slots."""
        view, parts, num = self._view, self._parts(), len(COUNTERS)
        found = []
        for name, slot in slots.items():
            starts = [_start(part, slot) for part in parts]
            of_parts = [view[start : start + num].tolist() for start in starts]
            found.append(KeyUsage(name, *(map(sum, zip(*of_parts, strict=True)) if of_parts else ())))
        return found

    def count(self, slot: int, counter: int, num: int = 1) -> None:
        """Add to a counter of this part: its index in `COUNTERS`."""
        assert self._part is not None
        self._view[_start(self._part, slot) + counter] += num

    def correct(self, slot: int, at_s: float, tokens: int) -> None:
        """Add tokens to the second in which an estimate of them was added: negative ones, if it was too high. Nothing
        happens if that second is not remembered any more."""
        assert self._part is not None
        second = int(at_s)
        start = _start(self._part, slot) + NUM_COUNTERS + second % NUM_SECONDS * _SECOND
        if self._view[start] == second:
            self._view[start + 2] += tokens

    def add(self, slot: int, now_s: float, *, requests: int = 0, tokens: int = 0) -> None:
        """Add to the current second of this part."""
        assert self._part is not None
        view, second = self._view, int(now_s)
        start = _start(self._part, slot) + NUM_COUNTERS + second % NUM_SECONDS * _SECOND
        if view[start] != second:
            view[start + 1] = view[start + 2] = 0
            view[start] = second
        view[start + 1] += requests
        view[start + 2] += tokens

    def window(self, slot: int, now_s: float) -> "Window":
        """What was added at all gateways in the last minute."""
        first = int(now_s) - WINDOW_S
        found: list[tuple[int, int, int]] = []
        for part in self._parts():
            start = _start(part, slot) + NUM_COUNTERS
            ring = self._view[start : start + NUM_SECONDS * _SECOND].tolist()
            entries = zip(ring[::_SECOND], ring[1::_SECOND], ring[2::_SECOND], strict=True)
            found += [entry for entry in entries if entry[0] > first]
        return Window(found, now_s)

    def _parts(self) -> list[int]:
        """Those that are used."""
        return [part for part, is_used in enumerate(self._view[:MAX_PARTS].tolist()) if is_used]


def _start(part: int, slot: int) -> int:
    return MAX_PARTS + part * _PART + slot * _SLOT
