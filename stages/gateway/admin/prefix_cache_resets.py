"""POST /reset_prefix_cache: has schedule forget what it could find again.

client ──► gateway ──ResetPrefixCache──► schedule ──PrefixCacheReset──► detokenize ──► gateway ──► client
"""

import asyncio
import itertools
from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.errors import ApiError, overloaded

ANSWER_S = 10.0
"""Longest that the answer may take. Schedule never waits for a step, but a busy machine may keep it waiting."""
MAX_ASKED = 16
"""Questions that may be out at once: what is answered takes room on edges that requests have been promised."""


class Reset(msgspec.Struct):
    """What it answers."""

    num_blocks: int
    """KV blocks that were forgotten."""


class ResetDesk:
    """Passes questions on, and answers to who asked."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        self._nonces = itertools.count()
        self._unanswered: set[int] = set()
        """Also those whose clients have left."""
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def reset(self) -> Reset:
        """Returns when it is done. Raises ApiError, 503, where schedule takes no more messages or does not answer in
        time; then it may be done later."""
        nonce = self.begin()
        self._waiting[nonce] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_S):
                return Reset(await self._waiting[nonce])
        except TimeoutError:
            message = "schedule has not answered in time; the prefix cache may be reset later"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="late") from None
        finally:
            del self._waiting[nonce]

    def begin(self) -> int:
        """Ask schedule. Returns the question's nonce. Raises ApiError as `reset`."""
        if len(self._unanswered) >= MAX_ASKED:
            raise overloaded(f"{MAX_ASKED} resets of the prefix cache are waiting for their answers")
        self._stage.replay_context.event("reset")
        nonce = next(self._nonces)
        if not self._stage.outbox("schedule").send(m.ResetPrefixCache(self._stage.replica, nonce)):
            raise overloaded("its stages take no more messages")
        self._unanswered.add(nonce)
        return nonce

    def answered(self, message: m.PrefixCacheReset) -> None:
        """The answer, perhaps too late."""
        self._unanswered.discard(message.nonce)
        if (waiting := self._waiting.get(message.nonce)) is not None and not waiting.done():
            waiting.set_result(message.num_blocks)
