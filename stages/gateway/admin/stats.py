"""GET /metrics: asks the supervisor for the stats of the whole server, so any gateway can report them."""

import asyncio
import time

from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import ONLY_PEER, PendingReplies

GRACE_S = 1.0
"""Time for the supervisor itself, besides the time that its stages have to reply."""


class StatsQuery:
    """Sends one question at a time. Callers that arrive while it is pending share the next one, so that the stats they
    get are newer than their request."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._supervisor = stage.supervisor
        self._pending: PendingReplies[ServerStats] = PendingReplies(
            stage.settings.supervisor.health_timeout_s + GRACE_S
        )
        self._current: asyncio.Task[ServerStats | None] | None = None
        self._next: asyncio.Task[ServerStats | None] | None = None
        self._last: ServerStats | None = None
        self._last_s = 0.0

    async def fetch(self) -> ServerStats | None:
        """The stats, or None if the supervisor does not reply in time."""
        if self._next is None:
            self._next = asyncio.create_task(self._fetch_after(self._current))
        return await asyncio.shield(self._next)

    async def fetch_recent(self, max_age_s: float) -> ServerStats | None:
        """Stats that were collected at most `max_age_s` ago, or as `fetch`. It bounds what many pollers cost."""
        if self._last is not None and time.monotonic() - self._last_s <= max_age_s:
            return self._last
        return await self.fetch()

    async def _fetch_after(self, previous: "asyncio.Task[ServerStats | None] | None") -> ServerStats | None:
        if previous is not None:
            await asyncio.wait([previous])
        self._current, self._next = self._next, None
        nonce = self._pending.send(lambda nonce, _: self._supervisor.send(m.AskServerStats(nonce)))
        if nonce is None:
            return None
        replies, _ = await self._pending.collect(nonce)
        return replies.get(ONLY_PEER)

    def handle_reply(self, message: m.StatsAnswer) -> None:
        self._last, self._last_s = message.stats, time.monotonic()
        self._pending.handle(message.nonce, message.stats)
