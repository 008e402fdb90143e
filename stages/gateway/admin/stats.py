"""GET /metrics: asks the supervisor for the whole server's stats, so that any gateway shows all of it."""

import asyncio

from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage

GRACE_S = 1.0
"""What the supervisor has, besides the time its stages have, to answer."""


class StatsDesk:
    """One question at a time, however many ask: who comes while it is out shares the next one, whose counts are newer
    than his request."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._supervisor = stage.supervisor
        self._timeout_s = stage.settings.supervisor.health_timeout_s + GRACE_S
        self._asked: asyncio.Future[ServerStats | None] | None = None
        self._next: asyncio.Future[ServerStats | None] | None = None
        self._nonce = 0

    async def ask(self) -> ServerStats | None:
        """The stats, or None where the supervisor does not answer in time."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        mine = self._next
        if self._asked is None:
            self._send()
        return await asyncio.shield(mine)

    def _send(self) -> None:
        self._asked, self._next = self._next, None
        self._nonce += 1
        if not self._supervisor.send(m.AskServerStats(self._nonce)):
            self._close(self._nonce, None)
            return
        asyncio.get_running_loop().call_later(self._timeout_s, self._close, self._nonce, None)

    def answered(self, message: m.StatsAnswer) -> None:
        self._close(message.nonce, message.stats)

    def _close(self, nonce: int, stats: ServerStats | None) -> None:
        if self._asked is not None and nonce == self._nonce:
            asked, self._asked = self._asked, None
            asked.set_result(stats)
            if self._next is not None:
                self._send()
