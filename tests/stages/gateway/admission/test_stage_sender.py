"""Messages to the stages keep their order when sockets are full."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from pipeline.runtime import messages as m
from pipeline.stages.gateway.open_requests import stage_sender
from pipeline.stages.gateway.open_requests.stage_sender import StageSender


class Outbox:
    """Takes messages while there is room."""

    def __init__(self) -> None:
        self.sent = list[Any]()
        self.room = 1000

    def send(self, message: Any) -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(message)
        return True

    def send_all(self, messages: Sequence[Any], *, wakes: bool = True) -> bool:
        if len(self.sent) + len(messages) > self.room:
            return False
        self.sent += messages
        return True

    def notify(self) -> None: ...


class Stage:
    """Two ingests and schedule."""

    def __init__(self) -> None:
        self.outboxes = {"ingest.0": Outbox(), "ingest.1": Outbox(), "schedule": Outbox()}

    def outboxes_of(self, _: str) -> list[Outbox]:
        return [self.outboxes["ingest.0"], self.outboxes["ingest.1"]]

    def outbox(self, stage: str, replica: int = 0) -> Outbox:
        return self.outboxes[stage if stage == "schedule" else f"{stage}.{replica}"]


def test_nothing_overtakes_what_a_full_socket_has_refused() -> None:
    stage = Stage()
    sender = StageSender(cast(Any, stage))
    schedule, ingest = stage.outboxes["schedule"], stage.outboxes["ingest.1"]
    schedule.room = 0
    one: Any = SimpleNamespace(id=7, submit=SimpleNamespace(attempt=2), ingest=1, generates=True)
    sender.abort(one)
    sender.close(7, 2)
    assert sender.is_full and (ingest.sent, schedule.sent) == ([m.Abort(7, 2)], [])
    schedule.room = 1
    sender.close(8, 1)  # there is room again, and two wait
    assert schedule.sent == []
    sender.flush()
    assert schedule.sent == [m.Abort(7, 2)] and sender.is_full
    schedule.room = 9
    sender.flush()
    assert schedule.sent == [m.Abort(7, 2), m.Closed(7, 2), m.Closed(8, 1)] and not sender.is_full


def test_what_waits_for_a_dead_stage_is_dropped_and_what_waits_for_others_is_kept() -> None:
    stage = Stage()
    sender = StageSender(cast(Any, stage))
    for outbox in stage.outboxes.values():
        outbox.room = 0
    sender.abort_anywhere(5, 1)
    sender.drop_unsent("schedule")
    for outbox in stage.outboxes.values():
        outbox.room = 9
    sender.flush()
    assert [outbox.sent for outbox in stage.outboxes.values()] == [[m.Abort(5, 1)], [m.Abort(5, 1)], []]


def test_a_new_schedule_gets_the_last_closed_again() -> None:
    stage = Stage()
    sender = StageSender(cast(Any, stage))
    for request_id in range(stage_sender.MAX_REPEATED + 5):
        sender.close(request_id, 1)
    schedule = stage.outboxes["schedule"]
    schedule.sent.clear()
    sender.repeat_closed()
    assert schedule.sent == [m.Closed(5 + index, 1) for index in range(stage_sender.MAX_REPEATED)]
