"""Looks up hosts that clients name, in threads of its own.

The loop's own lookups share a few threads with others, and the process ends only when they have an answer. A lookup
can't be stopped: it takes as long as the host's name servers, or the system's patience, half a minute. So it keeps its
thread, and its part of its API key's threads, also if no request waits for it any more.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable

from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.stages.gateway.errors import overloaded

NUM_THREADS = 32
NUM_OF_SCOPE = 24
"""Threads that the requests of one API key take at most."""

Addresses = list[tuple[int, str]]
"""Families and addresses."""


class Lookups:
    """Of one gateway. Belongs to the loop that fetches."""

    def __init__(self, look: Callable[[str, int], Addresses] | None = None) -> None:
        """`look` is called in a thread. Raises OSError, UnicodeError."""
        self._look = _look if look is None else look
        self._pool = WorkPool("looking up hosts of images", max_threads=NUM_THREADS)
        self._tasks: dict[tuple[str, str, int], asyncio.Task[Addresses]] = {}
        """By scope, host and port."""
        self._num_of: Counter[str] = Counter()

    async def find(self, host: str, port: int, scope: str) -> Addresses:
        """The addresses of a host. Requests of one key for the same host share a lookup. Raises OSError, UnicodeError,
        or ApiError, 503, if too many lookups have no answer yet."""
        key = scope, host, port
        if (task := self._tasks.get(key)) is None:
            if self._num_of[scope] >= NUM_OF_SCOPE or len(self._tasks) >= NUM_THREADS:
                raise overloaded("the name servers of too many hosts of images have not answered yet")
            self._num_of[scope] += 1
            self._tasks[key] = task = asyncio.create_task(self._pool.run(self._look, host, port))
            task.add_done_callback(lambda task: self._ended(key, task))
        return await asyncio.shield(task)

    def _ended(self, key: tuple[str, str, int], task: "asyncio.Task[Addresses]") -> None:
        del self._tasks[key]
        self._num_of[key[0]] -= 1
        if not self._num_of[key[0]]:
            del self._num_of[key[0]]
        if not task.cancelled():
            task.exception()  # perhaps no request waits for it any more


def _look(host: str, port: int) -> Addresses:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [(family, str(address[0])) for family, _, _, _, address in found]
