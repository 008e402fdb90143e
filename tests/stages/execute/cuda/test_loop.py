"""The executor's loop on a GPU, between fakes of the supervisor and the scheduler; kernels are interpreted."""

import gc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline import messages as m
from pipeline.recording.compare import compare
from pipeline.recording.replaying import replay
from tests.rig import Rig
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.driver import Driver, make_step, row_add
from tests.stages.execute.test_stage import begin, ids_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

PROMPT = [5, 9, 200, 31, 7]
SCHEDULE = "schedule.0"


def test_steps_planned_ahead_go_on_from_ids_the_scheduler_has_not_seen(slight_dir: Path, tmp_path: Path) -> None:
    """And a recording of it is replayed: results are published when they were."""
    sampling = m.Sampling(temperature=2.0, seed=4, ignore_eos=True)
    config = on_device()
    expected = Driver(slight_dir, on_cpu(config)).generate([PROMPT], 3, sampling=sampling)[0]
    assert len(set(expected)) == 3
    stop = msgspec.structs.replace(sampling, stop_token_ids=[expected[2]])
    recording, out = tmp_path / "execute.rec", tmp_path / "out.rec"
    with Rig("execute", config, slight_dir, record=recording) as rig:
        facts = begin(rig)
        assert (facts.block_size, facts.max_model_len) == (16, 96)
        assert rig.load() == m.PlainLoad(0)
        rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3], stop)], step_id=1), SCHEDULE)
        for ahead in range(4):
            rig.send(make_step([(0, 5 + ahead, 1, True)], step_id=2 + ahead), SCHEDULE)
        results = [rig.receive("schedule", m.StepResult) for _ in range(5)]
        rig.send(make_step(drops=[0], step_id=6), SCHEDULE)
        results.append(rig.receive("schedule", m.StepResult))
    gc.unfreeze()
    assert [result.step_id for result in results] == [1, 2, 3, 4, 5, 6]
    assert [ids_of(rig, result) for result in results] == [
        *([token] for token in expected),
        [-1],
        [-1],
        [],
    ]
    finishes = [list(rig.bytes_of(result.finishes)) for result in results]
    none, stopped = [m.Finish.NONE], [m.Finish.STOP]
    assert finishes == [none, none, stopped, none, none, []]
    assert all(result.compute_s > 0 and result.wait_s >= 0 for result in results)
    replay("execute", recording, out, paced=False, inline=True)
    gc.unfreeze()
    found = compare(out, recording)
    assert (found.difference, found.num_same) == ("", 6)


def test_blocks_go_out_to_the_segment_and_come_back(slight_dir: Path) -> None:
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
        ids = [*PROMPT, *ids_of(rig, first)]
        add = row_add(2, ids, [8], num_prompt=5, generation=2)
        rig.send(make_step([(2, 5, 1, True)], adds=[add], copies=[(slot, 8)], step_id=3), SCHEDULE)
        made = ids_of(rig, first) + ids_of(rig, rig.receive("schedule", m.StepResult))
        rig.send(make_step([(2, 6, 1, True)], step_id=4), SCHEDULE)
        made += ids_of(rig, rig.receive("schedule", m.StepResult))
        del swap
    gc.unfreeze()
    assert made == expected
