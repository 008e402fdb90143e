"""Ends idle HTTP connections when there are many, so that they don't take the descriptors and the memory of others.

A connection is idle if no request of it is being read or answered: it is kept alive for another request, or sends the
head of one slowly. Only idle ones are ended, so no request fails; HTTP clients connect again.
"""

import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pipeline.http_server.sockets.descriptors import SPARE, num_open
from pipeline.http_server.sockets.receive_turns import Receiver, ReceiveTurns

MAX_CONNECTIONS = 16_384
"""Lower if the limit of open files is low."""
NUM_HANDSHAKES = 1
"""Steps of TLS handshakes in one turn of the loop. One takes 1 ms of CPU time with a key of RSA-2048, 10 ms with one of
RSA-4096, and a tenth of a millisecond with an elliptic curve."""
PARTS = 64
"""This fraction of the connections is ended at once, so that a flood does not make the gateway look for one each
time."""
SEARCH_INTERVAL_S = 0.1
"""Time until idle connections are looked for again if there were none. A look takes about 1 ms, and a flood would take
one for each new connection."""


class Connection(Receiver, Protocol):
    @property
    def is_idle(self) -> bool: ...

    @property
    def is_kept_alive(self) -> bool:
        """Whether it has sent nothing of a request since the last one was answered."""

    def end(self) -> None:
        """Close at once."""


class HttpConnections:
    """The connections of one process."""

    def __init__(
        self,
        limit: int = MAX_CONNECTIONS,
        *,
        is_strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Above `limit`, idle connections are ended. If it `is_strict`, new ones are refused if there are none."""
        self._limit = limit
        self._is_strict = is_strict
        self._addresses: dict[Connection, str] = {}
        """Of open connections. The one that was silent for longest comes first."""
        self._num_of_address: Counter[str] = Counter()
        self.turns = ReceiveTurns()
        self.handshake_turns = ReceiveTurns(NUM_HANDSHAKES)
        self._clock = clock
        self._search_s = 0.0
        """Not before then are idle ones looked for."""

    def __len__(self) -> int:
        return len(self._addresses)

    def has_room(self) -> bool:
        """Whether another connection may be accepted. Ends idle ones for it if necessary."""
        if not self._is_strict or len(self._addresses) < self._limit:
            return True
        self._make_room()
        return len(self._addresses) < self._limit

    def add(self, connection: Connection) -> None:
        if len(self._addresses) >= self._limit:
            self._make_room()
        self._addresses[connection] = connection.address
        self._num_of_address[connection.address] += 1

    def heard(self, connection: Connection) -> None:
        """Bytes have arrived from its client."""
        if (address := self._addresses.pop(connection, None)) is not None:
            self._addresses[connection] = address

    def wait_turn(self, connection: Connection) -> None:
        """Have it read again when something has arrived, and it is its turn."""
        if connection in self._addresses:
            self.turns.wait(connection)

    def end_kept_alive(self) -> None:
        """End those that are kept alive for another request: clients connect again."""
        for connection in [one for one in self._addresses if one.is_kept_alive]:
            self.remove(connection)
            connection.end()

    def close(self) -> None:
        """Of the turns. Idempotent."""
        self.turns.close()
        self.handshake_turns.close()

    def remove(self, connection: Connection) -> None:
        self.turns.remove(connection)
        if (address := self._addresses.pop(connection, None)) is not None:
            self._num_of_address[address] -= 1
            if not self._num_of_address[address]:
                del self._num_of_address[address]

    def _make_room(self) -> None:
        """End some idle connections: those of the address that has most first."""
        if (now_s := self._clock()) < self._search_s:
            return
        idle = [one for one in self._addresses if one.is_idle]
        if not idle:
            self._search_s = now_s + SEARCH_INTERVAL_S
        idle.sort(key=lambda one: -self._num_of_address[self._addresses[one]])  # stable: the most silent first
        for connection in idle[: max(1, self._limit // PARTS)]:
            self.remove(connection)
            connection.end()


def limit_of(max_open_sequences: int, num_reserved: int) -> int:
    """The connections that a gateway may have, apart from open files and `num_reserved` further ones, so that each
    sequence can have one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(MAX_CONNECTIONS, 4 * max_open_sequences)
    if limit == resource.RLIM_INFINITY:
        return most
    return max(SPARE, min(most, limit - num_open() - num_reserved - SPARE))
