"""The request whose message ends schedule's process is named in the black box."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.process import black_box
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from tests.rig import Rig
from tests.stages.schedule.neighbours import FACTS, Neighbours


@pytest.fixture
def box() -> Iterator[m.BlackBox]:
    boxes = BlackBoxes(Settings())
    yield boxes.create("schedule.0", 1)
    boxes.close()


@pytest.mark.parametrize(("method", "message"), [("admit", None), ("abort", m.Abort(7, 1)), ("close", m.Closed(7, 1))])
def test_the_request_that_ends_the_process_is_named(
    box: m.BlackBox, monkeypatch: pytest.MonkeyPatch, method: str, message: Any
) -> None:
    really = getattr(Scheduler, method)

    def fails(scheduler: Scheduler, message: Any) -> Any:
        if message.request_id == 7:
            raise MemoryError("fatal")
        return really(scheduler, message)

    monkeypatch.setattr(Scheduler, method, fails)
    rig = Rig("schedule")
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box)
    with pytest.raises(MemoryError, match="fatal"), rig:
        rig.start(FACTS)
        neighbours = Neighbours(rig)
        neighbours.admit(5, [1, 2, 3], max_tokens=1)
        neighbours.until_finished(1)
        rig.load()
        assert black_box.suspect_of(box) is None
        if message is None:
            neighbours.admit(7, [1, 2, 3])
        else:
            rig.send(message, "gateway.0")
        rig.receive("supervisor", m.Drained)  # raises what the stage raised
    assert black_box.suspect_of(box) == (7, 1)


def test_the_request_whose_sequence_starts_when_a_plan_fails_is_named(
    box: m.BlackBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = SequenceLifecycle.start

    def start(lifecycle: SequenceLifecycle, sequence: Sequence, spare: int) -> Any:
        if sequence.request.request_id == 7:
            raise MemoryError("fatal")
        return really(lifecycle, sequence, spare)

    monkeypatch.setattr(SequenceLifecycle, "start", start)
    rig = Rig("schedule")
    rig.launch = msgspec.structs.replace(rig.launch, black_box=box)
    with pytest.raises(MemoryError, match="fatal"), rig:
        rig.start(FACTS)
        neighbours = Neighbours(rig)
        neighbours.admit(5, [1, 2, 3], max_tokens=100)
        neighbours.step()
        neighbours.admit(7, [1, 2, 3])
        neighbours.until_finished(2)
    assert black_box.suspect_of(box) == (7, 1)
