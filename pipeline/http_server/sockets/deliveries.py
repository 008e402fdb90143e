"""What waits for clients: who loses a connection when others need the room. The one rule for complete replies, the
backlogs of streams, and messages over ZeroMQ.

    begin ──client takes all of it──► end
      └── it takes less than MIN_BYTES_PER_S for GRACE_S, or its key has more than its share: stop() if others need it

A client that takes nothing, or little, keeps what it likes unless others need the room. Those without a key lose
first, if there are keys, then those of the key that has the most (without keys: of the address), and of these the ones
that take the least in a second.
"""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator

from pipeline.runtime.log.event_log import EventLog

GRACE_S = 5.0
"""A client is not slow in this time."""
MIN_BYTES_PER_S = 256 * 1024
"""A client that takes less than this, on average of the last GRACE_S at least, is slow."""
SHARE_GRACE_S = 1.0
"""A key that has more than its share keeps what waits for its clients for this time at least."""
SAMPLE_S = 0.5
"""How often it is noted what clients have taken."""
MAX_LATE_S = 1.0
"""If the sampling is later than this, this process did not run, or not send: clients are measured anew."""

Client = tuple[bool, str]
"""Whether it has a key, and the scope of the key or its address."""


def client_of(scope: str, address: str) -> Client:
    return bool(scope), scope or address


class Delivery:
    """What waits for one client. Times are by the event loop's clock."""

    def __init__(
        self,
        client: Client,
        num_sent: Callable[[], int],
        stop: Callable[[], object],
        num_bytes: Callable[[], int],
    ) -> None:
        """`num_sent` counts the bytes that the kernel has taken so far, from any start, and `num_bytes` those that
        `stop` would free. `stop` must give up the delivery at once, whatever else it still has to end."""
        self.client = client
        self.stop = stop
        self.num_bytes = num_bytes
        self._num_sent = num_sent
        self.begin_s = asyncio.get_running_loop().time()
        self._num_before = num_sent()
        self._older: tuple[float, int] | None = None
        self._newer: tuple[float, int] | None = None
        """Times, with what had been taken. The first is not the begin: the kernel takes much at once, read or not."""

    def sample(self, now_s: float, *, anew: bool) -> None:
        """Note what has been taken. `anew`: forget what was noted before."""
        if anew or self._newer is None:
            self._older = self._newer = now_s, self._num_sent()
        elif now_s >= self._newer[0] + GRACE_S:
            self._older, self._newer = self._newer, (now_s, self._num_sent())

    def is_slow(self, now_s: float) -> bool:
        return self._older is not None and now_s >= self._older[0] + GRACE_S and self.rate(now_s) < MIN_BYTES_PER_S

    def rate(self, now_s: float) -> float:
        """Bytes in a second."""
        if self._older is None:
            return (self._num_sent() - self._num_before) / (now_s - self.begin_s + 1.0)
        begin_s, num_before = self._older
        return (self._num_sent() - num_before) / max(now_s - begin_s, SAMPLE_S)


class Deliveries:
    """Those of one process, or of one model's stage in it."""

    def __init__(self, log: logging.Logger) -> None:
        self.on_sample: Callable[[], None] = lambda: None
        """Called after each sampling: some clients may be slow from now on."""
        self.num_given_up = 0
        self._log = EventLog(log, "gave up replies that clients took too slowly")
        self._all: dict[Delivery, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, delivery: Delivery) -> None:
        """It waits from now on."""
        self._all[delivery] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAMPLE_S, self._sample)

    def remove(self, delivery: Delivery) -> None:
        """The client has taken it, or has left. Idempotent."""
        self._all.pop(delivery, None)

    @contextlib.contextmanager
    def waiting(self, delivery: Delivery) -> Iterator[None]:
        self.add(delivery)
        try:
            yield
        finally:
            self.remove(delivery)

    def slow(self) -> list[Delivery]:
        """Those whose clients are slow, the first to lose first."""
        now_s = asyncio.get_running_loop().time()
        return in_turn([one for one in self._all if one.is_slow(now_s)], now_s)

    def old_of(self, has_too_much: Callable[[str], bool]) -> list[Delivery]:
        """Those of keys that have too much, by their scopes, which have waited for SHARE_GRACE_S."""
        now_s = asyncio.get_running_loop().time()
        each = (one for one in self._all if one.client[0] and now_s >= one.begin_s + SHARE_GRACE_S)
        return in_turn([one for one in each if has_too_much(one.client[1])], now_s)

    def give_up(self, delivery: Delivery) -> None:
        """Others need its room."""
        self.remove(delivery)
        self.num_given_up += 1
        self._log.add(1)
        delivery.stop()

    def _sample(self) -> None:
        assert self._timer is not None
        now_s = asyncio.get_running_loop().time()
        is_late = now_s > self._timer.when() + MAX_LATE_S
        self._timer = None
        for one in self._all:
            one.sample(now_s, anew=is_late)
        self._log.flush()
        self.on_sample()
        if self._all:
            self._timer = asyncio.get_running_loop().call_later(SAMPLE_S, self._sample)


def in_turn(deliveries: Iterable[Delivery], now_s: float) -> list[Delivery]:
    """In the order in which they lose: see above."""
    of_client: dict[Client, list[tuple[float, int, Delivery]]] = {}
    for index, one in enumerate(deliveries):
        of_client.setdefault(one.client, []).append((one.rate(now_s), index, one))
    for each in of_client.values():
        each.sort(reverse=True)
    # There may be as many clients as connections, so the first of them is not searched each time.
    queue = [(client[0], -sum(one.num_bytes() for _, _, one in each), client[1]) for client, each in of_client.items()]
    heapq.heapify(queue)
    found = []
    while queue:
        has_key, size, name = heapq.heappop(queue)
        one = of_client[has_key, name].pop()[-1]
        found.append(one)
        if of_client[has_key, name]:
            heapq.heappush(queue, (has_key, size + one.num_bytes(), name))
    return found
