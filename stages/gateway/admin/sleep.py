"""POST /sleep, POST /wake_up and GET /is_sleeping, as in vLLM: the executor ends and frees its memory, and comes back.

client ──► gateway ──SetSleep, AskSleep──► supervisor ──SleepSet──► gateway ──► client
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import ONLY_PEER, PendingReplies
from pipeline.stages.gateway.errors import ApiError, invalid, overloaded, shown

TIMEOUT_S = 600.0
"""How long to wait for the reply. A large model takes a while to load."""
ASK_TIMEOUT_S = 5.0
MAX_PENDING = 16
LEVEL = "1"
MODE = "keep"
FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Sleeping(msgspec.Struct):
    """GET /is_sleeping"""

    is_sleeping: bool
    """Whether the executor is away, or about to leave or to come back."""


class SleepControl:
    """Asks the supervisor."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._supervisor = stage.supervisor
        self._is_enabled = stage.settings.gateway.enable_sleep_mode
        self._pending: PendingReplies[m.SleepSet] = PendingReplies(TIMEOUT_S)

    async def sleep(self, query: Mapping[str, str]) -> None:
        """Put the server to sleep. Returns when the executor has ended. Raises ApiError: 400 for a query that it does
        not take, 409 if the server can't sleep now."""
        level, mode = query.get("level", LEVEL), query.get("mode", MODE)
        if level != LEVEL:
            why = "the weights are read again from their file, and open requests keep their KV cache"
            raise invalid("level", f"'level' must be {LEVEL} ({why}), got {shown(level)!r}", "invalid_value")
        if mode != MODE:
            why = "open requests go on when the server is awake"
            raise invalid("mode", f"'mode' must be {MODE!r} ({why}), got {shown(mode)!r}", "invalid_value")
        flag = query.get("wake_on_request", "false")
        if flag not in FLAGS:
            problem = f"'wake_on_request' must be true or false, got {shown(flag)!r}"
            raise invalid("wake_on_request", problem, "invalid_value")
        await self.set(sleeps=True, wakes_on_request=FLAGS[flag])

    async def wake_up(self, query: Mapping[str, str]) -> None:
        """Wake the server. Returns when steps go on. Raises ApiError as `sleep`."""
        if (tags := query.get("tags")) is not None:
            problem = f"'tags' must be left out, because all is loaded at once, got {shown(tags)!r}"
            raise invalid("tags", problem, "invalid_value")
        await self.set(sleeps=False)

    async def is_sleeping(self) -> Sleeping:
        """Whether the server sleeps. Raises ApiError, 503, if there is no answer."""
        return Sleeping((await self._ask(m.AskSleep(0), ASK_TIMEOUT_S)).is_sleeping)

    def handle_reply(self, message: m.SleepSet) -> None:
        self._pending.handle(message.nonce, message)

    async def set(self, *, sleeps: bool, wakes_on_request: bool = False) -> None:
        """Put the server to sleep, or wake it. Returns when that is done. Raises ApiError: 403 if clients may not, 409
        if the server can't now."""
        reply = await self._ask(m.SetSleep(0, sleeps, wakes_on_request), TIMEOUT_S)
        if reply.problem:
            raise ApiError(HTTPStatus.CONFLICT, reply.problem, code="conflict")

    async def _ask(self, message: m.SetSleep | m.AskSleep, timeout_s: float) -> m.SleepSet:
        if isinstance(message, m.SetSleep) and not self._is_enabled:
            problem = "this server can't be put to sleep: it needs gateway.enable_sleep_mode = true"
            raise ApiError(HTTPStatus.FORBIDDEN, problem, code="forbidden")
        if len(self._pending) >= MAX_PENDING:
            raise overloaded(f"{MAX_PENDING} such requests are pending")
        send = self._supervisor.send
        nonce = self._pending.send(lambda nonce, _: send(msgspec.structs.replace(message, nonce=nonce)))
        if nonce is None:
            raise overloaded("the queue to the supervisor is full")
        replies, _ = await self._pending.collect(nonce, timeout_s)
        if not replies:
            message_of = "Timed out waiting for the supervisor"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message_of, code="stage_unresponsive")
        return replies[ONLY_PEER]
