"""A replay of execute samples the same ids."""

from pathlib import Path

import msgspec
import pytest

from pipeline.replay import format as f
from pipeline.runtime import messages as m
from tests.rig import Rig
from tests.stages.execute import checkpoints, recurrent_models
from tests.stages.execute.driver import make_step, row_add, settings
from tests.stages.replays import entries, order, replay_partial, replays_alike


def run_steps(rig: Rig, row: int, first_step: int, num: int = 4) -> None:
    prompt = list(range(7, 47))
    add = row_add(row, prompt, [3 * row, 3 * row + 1, 3 * row + 2], m.GenerationOptions(temperature=2.0, seed=5))
    rig.send(make_step([(row, 0, 40, True)], adds=[add], step_id=first_step), "schedule.0")
    rig.receive("schedule", m.StepResult)
    for i in range(num):
        rig.send(make_step([(row, 40 + i, 1, True)], step_id=first_step + 1 + i), "schedule.0")
        rig.receive("schedule", m.StepResult)


def test_a_late_replay_of_execute_leaves_out_states_of_earlier_rows(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A new row continues the state of one that was added before the recording."""
    folder, _ = recurrent_models.write(tmp_path_factory.mktemp("recurrent"), recurrent_models.VARIANTS["qwen3_5"])
    late, ids = tmp_path / "late.rec", list(range(7, 55))
    with Rig("execute", settings(), folder) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        steps = [
            make_step([(1, 0, 32, False)], adds=[row_add(1, ids, [0, 1, 2])], states=[(-1, 4)], step_id=1),
            make_step(
                [(1, 32, 16, True), (0, 32, 16, True)],
                adds=[row_add(0, ids, [0, 1, 3])],
                states=[(4, 5), (4, 6)],
                step_id=2,
            ),
            make_step(
                [(1, 48, 1, True), (0, 48, 1, True)], blocks=[(1, 4), (0, 5)], states=[(5, 5), (6, 6)], step_id=3
            ),
        ]
        for step in steps:
            rig.send(step, "schedule.0")
            rig.receive("schedule", m.StepResult)
            if step.step_id == 1:
                rig.send(order(late, facts))
                assert rig.receive("supervisor", m.Answer).error == ""
            rig.load()
    counts = replay_partial("execute", late).counts
    assert counts["earlier rows in steps"] == 2


def test_a_replay_of_execute_samples_the_same_ids(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    checkpoints.write(folder, checkpoints.config_of())
    recording, late = tmp_path / "execute.rec", tmp_path / "late.rec"
    with Rig("execute", settings(), folder, record=recording) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        run_steps(rig, 0, 1)
        rig.load()
    assert replays_alike("execute", recording).sent == {"schedule.0": 5}
    with Rig("execute", settings(), folder) as rig:
        facts = rig.receive("supervisor", m.Ready).facts
        rig.send(m.Start(facts))
        run_steps(rig, 1, 1)
        rig.send(order(late, facts))
        assert rig.receive("supervisor", m.Answer).error == ""
        rig.load()
        rig.load()
        rig.send(make_step([(1, 44, 1, True)], step_id=6), "schedule.0")
        rig.receive("schedule", m.StepResult)
        run_steps(rig, 0, 7)
        rig.load()
    counts = replay_partial("execute", late).counts
    assert counts["steps with only earlier rows"] == 1

    def ids(path: Path) -> list[bytes]:
        sent = [one for one in entries(path) if isinstance(one, f.Sent)]
        results = [msgspec.msgpack.decode(one.body, type=m.StepResult) for one in sent]
        return [result.ids for result in results if isinstance(result.ids, bytes)]

    assert ids(late.with_suffix(".out0")) == ids(recording)
