"""The end of a gateway's service: requests are refused, open ones have time to finish, and then they fail."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.apis.responses.handlers import ResponsesApi
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.replayed import ENDS

FAIL_S = 1.5
"""After the deadline of a drain: time for streams to send their error, and for the stages to close them."""
LINGER_S = 1.0
"""A gateway that leaves accepts connections for this long: the kernel gives new ones to others, and these are those
whose handshake had begun."""


class Draining:
    """Owns the task that waits for the open requests."""

    def __init__(
        self,
        stage: "Stage[m.GatewayInbox]",
        readiness: Readiness,
        requests: RequestTable,
        responses: ResponsesApi,
        fail_streams: Callable[[ApiError], None],
        stop_listening: Callable[[], Awaitable[None]],
        leave_sockets: Callable[[], Awaitable[None]],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`fail_streams` ends those over ZeroMQ. `stop_listening` closes the listener for clients, `leave_sockets` all
        listeners, and the connections that nothing is open on. `create_task` starts a task whose failure ends the
        stage."""
        self._stage = stage
        self._readiness = readiness
        self._requests = requests
        self._responses = responses
        self._fail_streams = fail_streams
        self._stop_listening = stop_listening
        self._leave_sockets = leave_sockets
        self._create_task = create_task
        self._task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """The stage ends."""
        if self._task is not None:
            self._task.cancel()

    def end_service(self, *, is_leaving: bool) -> None:
        """Refuse requests. A gateway that leaves accepts them until nothing is open, but ends its connections."""
        if is_leaving:
            self._readiness.is_leaving = True
        else:
            self._readiness.is_draining = True
            self._cancel_background(ENDS[self._name])

    @property
    def _name(self) -> bytes:
        """Of the error that requests get."""
        return b"unloaded" if self._readiness.ends_alone else b""

    def _cancel_background(self, error: ApiError) -> None:
        """End background responses: no client could fetch them after this process has ended."""
        if num_cancelled := self._responses.cancel_background(error):
            self._stage.log.info("cancelled background responses", extra={"fields": {"responses": num_cancelled}})

    def start(self, deadline_s: float, *, again: bool = True, has_successor: bool = False) -> None:
        """Start to drain. With `again`, a running drain is replaced: the new deadline is earlier. With `has_successor`,
        another server listens at the same sockets."""
        if self._stage.replay_context.is_replaying:
            return  # its effects are in the recording
        if self._task is not None:
            if not again:
                return
            self._task.cancel()
        self._task = self._create_task(self._drain(deadline_s, has_successor=has_successor))

    async def _drain(self, deadline_s: float, *, has_successor: bool) -> None:
        """Wait until the deadline for open streams to finish, fail the rest, then report that nothing is open."""
        shown = "none" if deadline_s == m.NO_LIMIT_S else deadline_s
        self._stage.log.info("draining", extra={"fields": {"open": self._requests.num_open, "deadline_s": shown}})
        name = self._name
        if self._requests.num_requests and deadline_s and (has_successor or not self._readiness.is_leaving):
            self._stage.supervisor.send(m.WakeRequested())
        if has_successor:
            await self._leave_sockets()
        if self._readiness.is_leaving:
            name = b"replaced" if has_successor else b"leaving"
            linger_s = min(LINGER_S, deadline_s)
            await asyncio.sleep(linger_s)
            await self._idle_within(deadline_s - linger_s)
            deadline_s, self._readiness.is_draining = 0.0, True
            self._cancel_background(ENDS[name])
        if not await self._idle_within(deadline_s):
            self._requests.fail_all(ENDS[name], name)
            self._fail_streams(ENDS[name])
            await self._idle_within(FAIL_S)
        if self._readiness.failure is None and not has_successor:  # else keep answering with the reason
            await self._stop_listening()
        self._stage.supervisor.send(m.Drained())

    async def _idle_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._requests.idle()
                return True
        return False
