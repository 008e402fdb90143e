"""A replay of schedule plans the same steps, at the same depths."""

from pathlib import Path
from typing import Literal

import pytest

from pipeline.config.settings import ScheduleSettings, Settings
from pipeline.replay import format as f
from pipeline.replay.compare import compare
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.replays import entries, order, replay_partial, replays_alike
from tests.stages.schedule.neighbours import FACTS, Neighbours


@pytest.mark.parametrize("depth", [1, 2])
def test_a_replay_of_schedule_plans_the_same_steps(tmp_path: Path, depth: Literal[1, 2]) -> None:
    recording = tmp_path / "schedule.rec"
    limits = ScheduleSettings(max_steps_in_flight=depth, max_num_batched_tokens=64)
    with Rig("schedule", Settings(schedule=limits), record=recording) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(2000)))  # its ids are in shared memory, to schedule and to execute
        for request_id in range(2, 12):
            around.admit(request_id, list(range(request_id, request_id + 40)), n=2)
        rig.load()
        rig.send(m.Abort(3, 1), "gateway.0")
        rig.send(m.Abort(77, 1), "gateway.0")
        rig.load()
        around.admit(77, [1, 2, 3])
        around.until_finished(1 + 2 * 10)
        for request_id in range(1, 12):
            rig.send(m.Closed(request_id, 1), "gateway.0")
        rig.load()
    comparison = replays_alike("schedule", recording)
    assert {"execute.0", "detokenize.0", "ingest.0"} == set(comparison.sent)
    assert any(len(array) > 4096 for one in entries(recording) if isinstance(one, f.Sent) for array in one.arrays)


def test_a_replay_of_schedule_tries_the_same_depths(tmp_path: Path) -> None:
    recording = tmp_path / "auto.rec"
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight="auto")), record=recording) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        for request_id in (1, 2, 3, 4):
            around.admit(request_id, [request_id, 2, 3], max_tokens=320)
        rig.until(lambda load: load.num_running + load.num_waiting == 4)
        used = [1]
        while (load := rig.load()).num_running:
            used += [load.depth] if load.depth != used[-1] else []
            around.compute_s, around.wait_s = (0.010, 0.002) if load.depth == 1 else (0.011, 0.0)
            around.step()
        around.until_finished(4)
        assert used == [1, 2, 1, 2, 1, 2, 1, 2]
    replays_alike("schedule", recording)


def test_a_schedule_recording_started_in_the_middle_replays_with_a_fake_executor(tmp_path: Path) -> None:
    recording = tmp_path / "late.rec"
    with Rig("schedule", Settings()) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(50)), max_tokens=40)
        for _ in range(5):
            around.step()
        rig.send(order(recording, FACTS))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        around.admit(2, list(range(60)), max_tokens=20)
        rig.send(m.Abort(1, 1), "gateway.0")
        around.until_finished(2)
        rig.send(m.Closed(1, 1), "gateway.0")
        rig.load()
    counts = replay_partial("schedule", recording).counts
    assert counts["ends of earlier requests"] == 2
    assert counts["replaced results"] > 10
    assert compare(recording.with_suffix(".out0"), None).sent["execute.0"] >= 15
