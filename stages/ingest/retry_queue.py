"""Messages that a full edge refused, kept in order until it takes them."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from pipeline.runtime.channels import Outbox
from pipeline.runtime.replay_context import ReplayContext

RETRY_S = 0.02


class RetryQueue:
    """Sends, and keeps what is refused. Nothing overtakes on one edge.

    Edges are bounded by what the gateway lets in, so one fills only while its peer is slow or gone: what is kept here
    has the same bound.
    """

    def __init__(self, replay_context: Callable[[], ReplayContext]) -> None:
        """`replay_context` is the stage's, as it is then: a replay sends again when the recorded stage did."""
        self._replay_context = replay_context
        replay_context().perform("send again", lambda *_: self.retry())
        self._kept: dict[Outbox[Any], deque[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_messages(self) -> int:
        return sum(len(kept) for kept in self._kept.values())

    def send(self, outbox: Outbox[Any], message: Any) -> None:
        kept = self._kept.get(outbox)
        if kept is None and outbox.send(message):
            return
        self._kept.setdefault(outbox, deque()).append(message)
        self._wake_later()

    def retry(self) -> None:
        """Send what now can be sent. Called at each wake, and by a timer while anything is left."""
        for outbox, kept in list(self._kept.items()):
            while kept and outbox.send(kept[0]):
                kept.popleft()
            if not kept:
                del self._kept[outbox]
        if self._kept:
            self._wake_later()

    def _wake_later(self) -> None:
        if self._timer is None and not self._replay_context().is_replaying:
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._replay_context().event("send again")
        self.retry()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
