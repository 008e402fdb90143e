"""Which messages to other stages wake them at once."""

import asyncio
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


def submit_of(request_id: int) -> Any:
    return SimpleNamespace(request_id=request_id)


async def test_requests_that_begin_in_one_turn_of_the_loop_wake_ingest_once() -> None:
    ingest = Edge()
    stage: Any = SimpleNamespace(outboxes_of=lambda name: [ingest], outbox=lambda name, replica=0: Edge())
    sender = StageSender(stage)
    assert [sender.submit([submit_of(1), submit_of(2)]), sender.submit([submit_of(3)])] == [[0, 0], [0]]
    assert ingest.known == [] and len(ingest.quiet) == 3
    await asyncio.sleep(0)
    assert [one.request_id for one in ingest.known] == [1, 2, 3]
    sender.submit([submit_of(4)])
    await asyncio.sleep(0)
    assert [one.request_id for one in ingest.known] == [1, 2, 3, 4]


async def test_an_ingest_that_gets_no_new_requests_is_woken_for_those_it_has() -> None:
    ingests = [Edge(), Edge()]
    stage: Any = SimpleNamespace(outboxes_of=lambda name: list(ingests), outbox=lambda name, replica=0: Edge())
    sender = StageSender(stage)
    each = [submit_of(number) for number in range(8)]
    sender.submit(each)
    leaving = ingests.pop()
    sender.rescaled()
    await asyncio.sleep(0)
    assert leaving.known and len(ingests[0].known) + len(leaving.known) == len(each)
