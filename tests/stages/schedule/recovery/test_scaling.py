"""What the stage does when the number of detokenizers changes."""

import threading
import time

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.schedule.stage import ScheduleStage
from tests.fakes import expected
from tests.rig import PATIENCE_S, Rig
from tests.stages.schedule.neighbours import FACTS, Neighbours

NUM_TOKENS = 20


def test_sequences_move_to_the_others_when_their_detokenize_goes() -> None:
    prompts = {number: list(range(number, number + 9)) for number in range(1, 5)}
    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.add("detokenize.1")
        for number in (1, 2):
            around.admit(number, prompts[number], max_tokens=NUM_TOKENS)
        openings = [rig.receive("detokenize", m.Open) for _ in range(2)]
        rig.rescale("detokenize", 2)
        for number in (3, 4):
            around.admit(number, prompts[number], max_tokens=NUM_TOKENS)
        openings.append(rig.receive("detokenize", m.Open))
        moved = rig.receive("detokenize.1", m.Open)
        while True:
            around.step()
            if not rig.nothing("detokenize.1", 0.001):
                break  # it has a token that is lost with it
        rig.rescale("detokenize", 1)
        rig.remove("detokenize.1")
        again = rig.receive("detokenize", m.Open)
        assert again == moved, "as it was sent the first time"
        for opening in (*openings, again):
            around.opened[opening.seq] = opening
        around.until_finished(4)
        for seq, opening in around.opened.items():
            ids, finish = expected(prompts[opening.request_id], m.GenerationOptions(), 0, NUM_TOKENS)
            assert (around.received[seq], around.finished[seq]) == (ids, finish)
        rig.add("detokenize.1")
        rig.rescale("detokenize", 2)
        around.admit(5, [1, 2, 3])
        around.admit(6, [1, 2, 4])
        rig.receive("detokenize.1", m.Open)


def test_a_refusal_moves_to_the_others_when_its_detokenize_goes() -> None:
    """It may be lost with the process, and its client would wait forever."""
    with Rig("schedule") as rig:
        rig.start(FACTS)
        rig.add("detokenize.1")
        rig.rescale("detokenize", 2)
        rig.send(m.Abort(1, 1))
        rig.load()  # uses the same edge, so the abort has been handled
        Neighbours(rig).admit(1, [1, 2])
        refusal = rig.receive("detokenize.1", m.Reject)
        rig.rescale("detokenize", 1)
        rig.remove("detokenize.1")
        assert rig.receive("detokenize", m.Reject) == refusal


def test_sequences_of_two_processes_that_go_in_one_wake_move_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of a turn are taken, which detaches both processes, before the first of them is handled."""
    really, is_busy, go_on = ScheduleStage._load, threading.Event(), threading.Event()

    def load(stage: ScheduleStage) -> m.ScheduleLoad:
        is_busy.set()
        assert go_on.wait(PATIENCE_S)
        return really(stage)

    with Rig("schedule") as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        rig.add("detokenize.1")
        rig.add("detokenize.2")
        rig.rescale("detokenize", 3)
        for number in range(1, 4):
            around.admit(number, [number, 2, 3], max_tokens=NUM_TOKENS)
        moved = [rig.receive(name, m.Open) for name in ("detokenize.1", "detokenize.2")]
        rig.receive("detokenize", m.Open)
        rig.rescale("detokenize", 1)
        monkeypatch.setattr(ScheduleStage, "_load", load)
        rig.send(m.Ping(1))
        assert is_busy.wait(PATIENCE_S)
        for epoch, name in ((101, "detokenize.2"), (102, "detokenize.1")):
            rig.send(m.PeerRestarted(epoch, m.PeerInbox(name, "", 1), rig._incarnations[name], [], is_removed=True))
        time.sleep(0.2)  # until both have arrived
        go_on.set()
        again = [rig.receive("detokenize", m.Open) for _ in range(2)]
        assert sorted(again, key=lambda one: one.seq) == sorted(moved, key=lambda one: one.seq)
