"""Which messages to other stages wake them at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests.stage_sender import MOST_QUIET, StageSender


class Edge:
    """An outbox: what has arrived, and what the peer does not know of yet."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.quiet: list[Any] = []

    def send_all(self, messages: Sequence[Any], *, wakes: bool = True) -> bool:
        self.quiet += messages
        if wakes:
            self.notify()
        return True

    def send(self, message: Any) -> bool:
        return self.send_all([message])

    def notify(self) -> None:
        self.known += self.quiet
        self.quiet.clear()


def test_schedule_is_woken_for_many_closed_requests_and_at_a_heartbeat() -> None:
    schedule, ingest = Edge(), Edge()
    stage: Any = SimpleNamespace(outboxes_of=lambda name: [ingest], outbox=lambda name, replica=0: schedule)
    sender = StageSender(stage)
    sender.close(1, 1)
    with sender.together():
        sender.close(2, 1)
        sender.close(3, 1)
    assert schedule.known == [] and len(schedule.quiet) == 3
    sender.notify()  # a heartbeat
    assert schedule.known == [m.Closed(number, 1) for number in (1, 2, 3)]
    for number in range(MOST_QUIET):
        assert len(schedule.known) == 3
        sender.close(number, 1)
    assert len(schedule.known) == 3 + MOST_QUIET
    sender.close(50, 1)
    sender.abort_anywhere(51, 1)
    assert schedule.known[-2:] == [m.Closed(50, 1), m.Abort(51, 1)], "in order"
