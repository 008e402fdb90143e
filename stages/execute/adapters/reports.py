"""Tells schedule which LoRA adapters are loaded, so that it plans no row whose adapter a step would have to wait for.

    UseAdapters ──► `AdapterLoader`'s thread reads and packs them ──► its descriptor wakes the loop ──► AdaptersLoaded

What is loaded at a turn is no message, so a recording has it (`ReplayContext.observe`).
"""

from typing import TYPE_CHECKING

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage

if TYPE_CHECKING:
    from pipeline.stages.execute.adapters.slots import AdapterSlots

EVENT = "adapters"


class Report(msgspec.Struct, array_like=True, frozen=True):
    """The content of an event in a recording."""

    incarnation: int
    adapter_ids: list[str]


class AdapterReports:
    """Owns what schedule knows. `slots` are None if adapters are off."""

    def __init__(self, stage: "Stage[m.ExecuteInbox]", slots: "AdapterSlots | None") -> None:
        self._stage, self._slots = stage, slots
        self._last: m.UseAdapters | None = None
        self._reported: list[str] | None = None
        if stage.inbox.is_replayed:
            stage.replay_context.perform(EVENT, lambda number, data: self._send(number, data))
        elif slots is not None:
            stage.inbox.wake_by(slots.loader.fd)

    def use(self, message: m.UseAdapters) -> None:
        """Load these adapters. The answer follows at the next turn, which is at once."""
        assert self._slots is not None, "adapters are off"
        self._last, self._reported = message, None
        self._slots.use(message.adapter_ids)
        self._slots.loader.wake()

    def forget(self) -> None:
        """The scheduler has died."""
        self._last = None

    def poll(self) -> None:
        """Report what was loaded since the last report. In a replay, what was reported then. Call it at each turn,
        before its messages are handled."""
        if self._stage.inbox.is_replayed:
            self._stage.replay_context.catch_up()
            return
        if self._slots is None:
            return
        self._slots.loader.clear()
        if self._last is not None and (loaded := self._slots.used_and_loaded()) != self._reported:
            self._reported = loaded
            self._send(self._last.number, msgspec.msgpack.encode(Report(self._last.incarnation, loaded)))

    def _send(self, number: int, data: bytes) -> None:
        report = msgspec.msgpack.decode(self._stage.replay_context.observe(EVENT, number, data), type=Report)
        message = m.AdaptersLoaded(report.incarnation, number, report.adapter_ids)
        sent = self._stage.outbox("schedule").send(message)
        assert sent, "the edge to schedule is full, though it waits for few messages"
