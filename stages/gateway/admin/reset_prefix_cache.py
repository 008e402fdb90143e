"""POST /reset_prefix_cache: schedule forgets all cached blocks.

client ──► gateway ──ResetPrefixCache──► schedule ──PrefixCacheReset──► detokenize ──► gateway ──► client
"""

from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import ONLY_PEER, PendingReplies
from pipeline.stages.gateway.errors import ApiError, overloaded

TIMEOUT_S = 10.0
"""How long to wait for the reply. Schedule never waits for a step, but the machine may be busy."""
MAX_PENDING = 16
"""Resets without a reply. Replies need room on edges whose capacity is reserved for requests."""


class Reset(msgspec.Struct):
    """The reply."""

    num_blocks: int
    """KV blocks that were dropped from the cache."""


class PrefixCacheResetter:
    """Sends resets to schedule."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        self._pending: PendingReplies[int] = PendingReplies(TIMEOUT_S, counts_unanswered=True)

    async def reset(self) -> Reset:
        """Reset the cache. Raises ApiError, 503, if the queue to schedule is full, or if it does not reply in time; in
        that case the reset may still happen later."""
        replies, missing = await self._pending.collect(self.begin())
        if missing:
            message = "Timed out waiting for the scheduler; the prefix cache may be reset later"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="stage_unresponsive")
        return Reset(replies[ONLY_PEER])

    def begin(self) -> int:
        """Send a reset. Returns its nonce. Raises ApiError as `reset`."""
        if len(self._pending) >= MAX_PENDING:
            raise overloaded(f"{MAX_PENDING} resets of the prefix cache are pending")
        self._stage.replay_context.event("reset")
        outbox = self._stage.outbox("schedule")
        nonce = self._pending.send(lambda nonce, _: outbox.send(m.ResetPrefixCache(self._stage.replica, nonce)))
        if nonce is None:
            raise overloaded("the queue to its stages is full")
        return nonce

    def repeat(self) -> None:
        """Send the resets without a reply again: a stage that had one of them, or its reply, has died."""
        for nonce in self._pending.nonces:
            self._stage.outbox("schedule").send(m.ResetPrefixCache(self._stage.replica, nonce))

    def handle_reply(self, message: m.PrefixCacheReset) -> None:
        self._pending.handle(message.nonce, message.num_blocks)
