"""The executor's loop on a GPU, between a fake supervisor and a fake scheduler; kernels are interpreted."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.replay.compare import compare
from pipeline.runtime import messages as m
from pipeline.stages.execute.cuda.launched_step import LaunchedStep
from pipeline.stages.execute.cuda.steps import seconds_of
from tests.rig import Rig
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.driver import Driver, make_step, row_add
from tests.stages.execute.test_stage import begin, continues_for_a_restarted_schedule, ids_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

PROMPT = [5, 9, 200, 31, 7]
SCHEDULE = "schedule.0"


def test_steps_planned_ahead_continue_from_ids_the_scheduler_has_not_seen(
    slight_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A replay of the recording publishes results at the same points."""
    sampled_ids = m.GenerationOptions(temperature=2.0, seed=4, ignore_eos=True)
    greedy = m.GenerationOptions(temperature=0.0, ignore_eos=True)
    config = on_device()
    cpu = Driver(slight_dir, on_cpu(config))
    expected = [cpu.generate([PROMPT], 4, options=options)[0] for options in (sampled_ids, greedy)]
    assert len(set(expected[0][:3])) == 3
    stop = msgspec.structs.replace(sampled_ids, stop_token_ids=[expected[0][2]])
    adds = [row_add(0, PROMPT, [3], stop), row_add(1, PROMPT, [4])]
    recording, out = tmp_path / "execute.rec", tmp_path / "out.rec"
    with Rig("execute", config, slight_dir, record=recording) as rig:
        facts = begin(rig)
        assert (facts.block_size, facts.max_model_len, facts.is_batch_invariant) == (16, 96, False)
        assert "not batch-invariant" in caplog.text
        assert rig.load() == m.ExecuteLoad(0)
        rig.send(make_step([(0, 0, 5, True), (1, 0, 5, True)], adds=adds, step_id=1), SCHEDULE)
        for ahead in range(3):
            rig.send(make_step([(0, 5 + ahead, 1, True), (1, 5 + ahead, 1, True)], step_id=2 + ahead), SCHEDULE)
        results = [rig.receive("schedule", m.StepResult) for _ in range(4)]
        rig.send(make_step(drops=[0, 1], step_id=5), SCHEDULE)
        results.append(rig.receive("schedule", m.StepResult))
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5]
    # The last step was planned before the third step's stop of the first row was known.
    ended = [*expected[0][:3], -1]
    assert [ids_of(rig, result) for result in results] == [*map(list, zip(ended, expected[1], strict=True)), []]
    none, stopped = int(m.Finish.NONE), int(m.Finish.STOP)
    finishes = [list(rig.bytes_of(result.finishes)) for result in results]
    assert finishes == [[none, none], [none, none], [stopped, none], [none, none], []]
    assert all(result.compute_s > 0 and result.wait_s >= 0 for result in results)
    replay("execute", recording, out, paced=False, inline=True)
    found = compare(out, recording)
    assert (found.difference, found.num_same) == ("", 5)


def test_a_restarted_schedule_begins_without_rows(slight_dir: Path) -> None:
    options = m.GenerationOptions(temperature=2.0, seed=4, ignore_eos=True)
    config = on_device()
    expected = Driver(slight_dir, on_cpu(config)).generate([PROMPT], 4, options=options)[0]
    with Rig("execute", config, slight_dir) as rig:
        continues_for_a_restarted_schedule(rig, expected, options)


def test_blocks_are_copied_to_the_segment_and_back(slight_dir: Path) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 16 * 4
    config = on_device(swap_bytes=3 * block_bytes + 5)
    expected = Driver(slight_dir, on_cpu(config)).generate([PROMPT], 3)[0]
    with Rig("execute", config, slight_dir) as rig:
        facts = begin(rig)
        assert facts.num_swap_blocks == 3
        swap = np.frombuffer(rig.memory("swap"), np.uint8)
        slot = facts.num_blocks + 1
        rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3])], step_id=1), SCHEDULE)
        first = rig.receive("schedule", m.StepResult)
        assert first.copy_s == 0 and not swap.any()
        rig.send(make_step(drops=[0], copies=[(3, slot)], step_id=2), SCHEDULE)
        out = rig.receive("schedule", m.StepResult)
        assert out.copy_s > 0 and len(rig.bytes_of(out.rows)) == 0
        assert swap[block_bytes : 2 * block_bytes].any()
        assert not swap[:block_bytes].any() and not swap[2 * block_bytes :].any()
        ids = [*PROMPT, expected[0]]
        adds = [row_add(row, ids, [8 + row], num_prompt=5, generation=2) for row in (2, 3)]
        copies = [(slot, 10), (slot, 11)]
        rig.send(make_step([(2, 5, 1, True), (3, 5, 1, True)], adds=adds, copies=copies, step_id=3), SCHEDULE)
        made = [ids_of(rig, first), ids_of(rig, rig.receive("schedule", m.StepResult))]
        rig.send(make_step([(2, 6, 1, True), (3, 6, 1, True)], step_id=4), SCHEDULE)
        made.append(ids_of(rig, rig.receive("schedule", m.StepResult)))
        del swap
    assert made == [[expected[0]], [expected[1]] * 2, [expected[2]] * 2]


def flight_of(start_ns: int, end_ns: int) -> LaunchedStep:
    none: Any = None
    return LaunchedStep(1, 1, none, 1, *(none,) * 4, num_rows=1, num_tokens=1, start_ns=start_ns, end_ns=end_ns)


def test_the_gpu_time_of_a_step_includes_its_copies() -> None:
    """The scheduler subtracts them to learn the time of computing."""
    step = flight_of(5_000_000_000, 5_020_000_000)
    assert seconds_of(step, 0, 0.0) == pytest.approx((0.02, 0.0))
    assert seconds_of(step, 4_990_000_000, 0.0) == pytest.approx((0.02, 0.01))
    assert seconds_of(step, 4_990_000_000, 0.004) == pytest.approx((0.024, 0.006))
    assert seconds_of(step, 4_990_000_000, 0.5) == pytest.approx((0.52, 0.0)), "copies also overlap the previous step"
