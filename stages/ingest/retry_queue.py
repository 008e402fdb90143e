"""Messages that a full edge refused, refused in order until it accepts them."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.transport.outbox import Outbox

RETRY_S = 0.02


class RetryQueue:
    """Sends messages, and retries those that were refused. On one edge no message overtakes another.

    The gateway's credits bound the messages on an edge, so it is full only while its peer is slow or dead. They bound
    this queue too.
    """

    def __init__(self, replay_context: Callable[[], ReplayContext]) -> None:
        """`replay_context` returns the stage's current one: a replay retries when the recorded stage did."""
        self._replay_context = replay_context
        replay_context().perform("send again", lambda *_: self.retry())
        self._refused: dict[Outbox[Any], deque[Any]] = {}
        self._together: dict[Outbox[Any], list[Any]] | None = None
        """Messages of a `together` block."""
        self._woken: set[Outbox[Any]] = set()
        """The edges whose receivers such a block wakes."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_messages(self) -> int:
        return sum(len(refused) for refused in self._refused.values())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is sent inside of it at its end, to each edge as one message of the transport."""
        self._together = {}
        try:
            yield
        finally:
            messages, self._together = self._together, None
            woken, self._woken = self._woken, set()
            for outbox, each in messages.items():
                if outbox in self._refused or not outbox.send_all(each, wakes=outbox in woken):
                    self._refused.setdefault(outbox, deque()).extend(each)
                    self._start_timer()

    def send(self, outbox: Outbox[Any], message: Any, *, wakes: bool = True) -> None:
        """Send a message. In a `together` block, one that does not wake its receiver waits until that is awake."""
        if self._together is not None:
            self._together.setdefault(outbox, []).append(message)
            if wakes:
                self._woken.add(outbox)
            return
        refused = self._refused.get(outbox)
        if refused is None and outbox.send(message):
            return
        self._refused.setdefault(outbox, deque()).append(message)
        self._start_timer()

    def retry(self) -> None:
        """Send what the edges accept. Called in each turn, and by a timer while messages are left."""
        for outbox, refused in list(self._refused.items()):
            while refused and outbox.send(refused[0]):
                refused.popleft()
            if not refused:
                del self._refused[outbox]
        if self._refused:
            self._start_timer()

    def drop(self, outbox: Outbox[Any]) -> None:
        """Drop what was refused on the way to a process that has died."""
        self._refused.pop(outbox, None)

    def _start_timer(self) -> None:
        if self._timer is None and not self._replay_context().is_replaying:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._replay_context().event("send again")
        self.retry()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
