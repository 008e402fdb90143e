"""The server's sleep as schedule sees it: the executor leaves and comes back, and everything else stays.

    FallAsleep ──► no more steps ──in flight: none──► SaveKV ──► the executor saves, and ends
                                                                          │
    steps go on ◄── WakeUp ◄── its successor is ready ◄── … ◄── PeerRestarted: it has all rows' KV blocks

Requests that come meanwhile wait in the queue. Those that end free their rows and blocks as always. If the executor
dies before it has saved everything, its sequences are computed again, as after any other death.
"""

from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.runtime.topology import among
from pipeline.runtime.transport.outbox import Outbox, RankOutboxes
from pipeline.stages.schedule.scheduler import Scheduler


class Sleep:
    """Owns whether the server sleeps, or is about to."""

    def __init__(
        self, stage: "Stage[m.ScheduleInbox]", scheduler: Scheduler, execute: Outbox[Any] | RankOutboxes[Any]
    ) -> None:
        self._stage, self._scheduler, self._execute = stage, scheduler, execute
        self.is_on = False
        """No steps are planned."""
        self._number = 0
        """Of the `FallAsleep`; 0 if it says that there is nothing to save."""
        self._saves = False
        """The executor has yet to save its KV cache."""
        self._wakes_on_request = False

    def handle(self, message: m.FallAsleep | m.WakeUp) -> None:
        """Plan no more steps, or plan them again."""
        if isinstance(message, m.WakeUp):
            self.is_on = self._saves = False
            return
        self.is_on, self._number, self._wakes_on_request = True, message.number, message.wakes_on_request
        self._saves = message.number > 0

    def executor_lost(self) -> None:
        """The executor has died before it had saved everything: its successor has nothing to save, and says so."""
        self._saves = self.is_on and self._number > 0

    def turn(self) -> None:
        """The end of a turn: if no step is in flight any more, have the executor save its KV cache."""
        if not self._saves or self._scheduler.in_flight:
            return
        self._saves = False
        blocks, slots = (np.array(ids, np.int32) for ids in self._scheduler.choose_saved())
        ranks = among(self._stage.outboxes, "execute")
        blocks_put, slots_put = (self._stage.arrays.put(ids, readers=ranks) for ids in (blocks, slots))
        sent = self._execute.send(m.SaveKV(self._number, blocks_put, slots_put))
        assert sent, "the edge to the executor is full, though no step is in flight"

    def admitted(self) -> None:
        """A request has come."""
        if self.is_on and self._wakes_on_request:
            self._wakes_on_request = False
            self._stage.supervisor.send(m.WakeRequested())
