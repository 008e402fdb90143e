"""Bounds the memory of large frames that are being received, so that no sender holds up the others. Pure.

    take(holder, bytes) ──room──► it receives ──► release() ──► granted: holders that waited, in fair order
              └──no room──► it waits, and `slow` may be given up

Only memory for what has arrived counts, or that which the next bytes need: a length that is announced and never sent
takes no room. A holder that waits keeps what it has. So that one can always go on, up to `MAX_OVERDRAFTS` of them, each
of another API key, receive the rest of their frame beyond the budget. Therefore no key waits for the frames of others,
unless as many keys exceed the budget.
"""

from typing import Generic, Protocol, TypeVar

from pipeline.runtime.queues.fair_queue import FairQueue

MAX_OVERDRAFTS = 4
GRACE_S = 1.0
"""A frame is not slow in this time, whatever has arrived."""
MIN_BYTES_PER_S = 256 * 1024
"""A frame that arrives slower than this, on average, is given up if another one waits for room: as over HTTP."""


class Holder(Protocol):
    """A connection. Time that it waits does not count."""

    @property
    def owner(self) -> str:
        """The scope of its API key, or its address."""

    @property
    def is_waiting(self) -> bool: ...

    def __hash__(self) -> int: ...

    @property
    def begun_s(self) -> float | None:
        """When its frame began to arrive."""

    @property
    def num_arrived(self) -> int:
        """Bytes of it."""


H = TypeVar("H", bound=Holder)


class FrameBudget(Generic[H]):
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[H, int] = {}
        self._overdrafts: dict[str, H] = {}
        """By owner. Their bytes don't count."""
        self._waiting: FairQueue[H, int] = FairQueue()
        """With the bytes that they need in all."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, holder: H, num_bytes: int) -> list[H]:
        """The holder needs `num_bytes` in all. Returns those that may go on: the holder, unless it must wait, and any
        others that waited."""
        if self._overdrafts.get(holder.owner) is holder or num_bytes <= self._held.get(holder, 0):
            return [holder]
        if holder not in self._waiting:
            self._waiting.push(holder, num_bytes, holder.owner, num_bytes)
        return self._grant()

    def release(self, holder: H) -> list[H]:
        """The holder has received its frame, or has ended. Returns holders that may have what they wait for."""
        self._waiting.remove(holder)
        self.num_bytes -= self._held.pop(holder, 0)
        if self._overdrafts.get(holder.owner) is holder:
            del self._overdrafts[holder.owner]
        return self._grant()

    def slowest(self, now_s: float) -> H | None:
        """A holder to give up, if some wait."""
        if not self._waiting:
            return None
        rates = [
            (rate, index) for index, one in enumerate(self._receiving()) if (rate := _rate(one, now_s)) is not None
        ]
        return self._receiving()[min(rates)[1]] if rates else None

    def _receiving(self) -> list[H]:
        return [*self._held, *self._overdrafts.values()]

    def _grant(self) -> list[H]:
        granted: list[H] = []
        while (turn := self._waiting.peek()) is not None:
            holder, num_bytes, _ = turn
            num_more = num_bytes - self._held.get(holder, 0)
            if self.num_bytes + num_more <= self.max_bytes:
                self._waiting.pop()
                self._held[holder] = num_bytes
                self.num_bytes += num_more
            elif len(self._overdrafts) < MAX_OVERDRAFTS and (first := self._waiting.pop(without=self._overdrafts)):
                holder, _, owner = first
                self.num_bytes -= self._held.pop(holder, 0)
                self._overdrafts[owner] = holder
            else:
                break
            granted.append(holder)
        return granted


def _rate(holder: Holder, now_s: float) -> float | None:
    """Bytes per second of a slow holder; None if it isn't one."""
    if holder.is_waiting or holder.begun_s is None or now_s < holder.begun_s + GRACE_S:
        return None
    rate = holder.num_arrived / max(now_s - holder.begun_s, 1e-9)
    return rate if rate < MIN_BYTES_PER_S else None
