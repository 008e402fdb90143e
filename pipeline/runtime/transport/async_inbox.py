"""An inbox for stages with an asyncio loop. The other stages start faster without importing asyncio."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from pipeline.runtime.transport.inbox import Inbox

T = TypeVar("T")


MAX_AT_ONCE = 256
"""Messages that are taken before other tasks get a turn."""


class AsyncInbox(Generic[T]):
    """An inbox for an asyncio stage. One wake takes all queued messages: a task receives them, or a function handles
    them in the loop's callback, which saves a switch to a task."""

    def __init__(self, inbox: Inbox[T]) -> None:
        self._inbox = inbox
        self._waiter: asyncio.Future[None] | None = None
        self._woken_s = 0.0
        """When the first message that was not taken was noticed; 0 if there is none."""
        self._handle: Callable[[list[T]], bool] | None = None
        self._handled: asyncio.Future[None] | None = None
        """Done when `handle_all` ends."""
        self._loop = asyncio.get_running_loop()
        if not inbox.is_replayed:
            for fd in inbox.filenos():
                self._loop.add_reader(fd, self._wake, fd)
            inbox.on_filenos_changed = self._watch

    def _watch(self, before: int, fd: int) -> None:
        if before >= 0:
            self._loop.remove_reader(before)
        if fd >= 0:
            self._loop.add_reader(fd, self._wake, fd)

    def _wake(self, fd: int) -> None:
        # `notice` also makes the descriptor unreadable. Otherwise the loop would keep calling this while the receiver
        # is busy.
        self._inbox.notice(fd)
        if self._inbox.is_ready():
            self._woken_s = self._woken_s or time.monotonic()
            if self._handled is not None:
                self._handle_ready()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def handle_all(self, handle: Callable[[list[T]], bool]) -> None:
        """Have the messages of each turn handled, at most `MAX_AT_ONCE` at a time, until `handle` returns False. Raises
        what `handle` raises. The wait has no deadline, as in `receive_all`."""
        if self._inbox.is_replayed:
            while handle(await self.receive_all()):
                pass
            return
        self._handle, self._handled = handle, self._loop.create_future()
        try:
            self._handle_ready()  # what has arrived before
            await self._handled
        finally:
            self._handled = None

    def _handle_ready(self) -> None:
        """Handle the messages that were noticed. If more are left, other tasks get a turn before. A descriptor may be
        readable without a message: then there is no turn, for a recording has none either."""
        if self._handled is None or self._handled.done() or not self._inbox.is_ready():
            return
        assert self._handle is not None
        if not (messages := self._take(MAX_AT_ONCE)):
            self._woken_s = 0.0
            return
        try:
            goes_on = self._handle(messages)
        except BaseException as error:  # noqa: BLE001 - `handle_all` raises it
            self._handled.set_exception(error)
            return
        if not goes_on:
            self._handled.set_result(None)
        elif self._inbox.is_ready():
            self._loop.call_soon(self._handle_ready)

    def run(self, work: Callable[[], None]) -> None:
        """Do further work of the function that handles messages: `handle_all` raises what it raises."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - as above
            if self._handled is not None and not self._handled.done():
                self._handled.set_exception(error)

    def _take(self, limit: int) -> list[T]:
        """At most `limit` of the messages that were noticed."""
        messages: list[T] = []
        while len(messages) < limit and (message := self._inbox.take()) is not None:
            messages.append(message)
        if messages:
            if self._woken_s:
                self._inbox.wait_s += time.monotonic() - self._woken_s
                self._woken_s = 0.0
            self._inbox.num_wakes += 1
            self._inbox.end_turn()
        return messages

    async def receive_all(self, limit: int = MAX_AT_ONCE) -> list[T]:
        """Wait for a message, then return the queued messages, at most `limit`. Other tasks get a turn before each
        receive, even if messages are queued. Cancellation loses no message.

        The wait has no deadline, because an idle server receives nothing. The supervisor's death and `Stop` end it.
        """
        if self._inbox.is_replayed:
            await asyncio.sleep(0)
            return await self._inbox.replayed()
        if self._inbox.is_ready():
            await asyncio.sleep(0)
        while True:
            if messages := self._take(limit):
                return messages
            self._woken_s = 0.0
            self._waiter = self._loop.create_future()
            await self._waiter

    def close(self) -> None:
        if not self._inbox.is_replayed:
            for fd in self._inbox.filenos():
                self._loop.remove_reader(fd)
        self._inbox.close()
