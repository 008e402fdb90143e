"""The schedule stage at each depth: what it plans ahead of results, and the depth that it chooses."""

from typing import Literal

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS
from pipeline.metrics.stats import ScheduleCounts, StageCounts
from pipeline.runtime import messages as m
from tests.fakes import expected
from tests.rig import Rig
from tests.stages.schedule.neighbours import FACTS, Neighbours


def counts_of(rig: Rig) -> ScheduleCounts:
    rig.send(m.Count(1))
    counts = msgspec.msgpack.decode(rig.receive("supervisor", m.Answer).body, type=StageCounts)
    assert isinstance(counts.own, ScheduleCounts)
    return counts.own


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_waits_for_a_plan_are_counted_and_waits_for_requests_are_not(depth: Literal[1, 2, 4]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.wait_s, around.compute_s = 0.25, 0.5
        for request_id in (1, 2, 3):  # the server is idle when each request arrives
            around.admit(request_id, [request_id, 2, 3], max_tokens=5)
            around.until_finished(request_id)
            rig.until(lambda load: load.num_running == 0)
        counts = counts_of(rig)
        assert (counts.num_steps, counts.depth) == (15, depth)
        assert sum(counts.plan_wait_s.counts) == 3 * 4, "the first step of each waited for its request"
        assert counts.plan_wait_s.total == pytest.approx(3 * 4 * 0.25)
        (gaps,) = counts.gaps
        assert (BATCH_SIZE_BUCKETS[gaps.batch], sum(gaps.gap_s.counts), gaps.step_s) == (
            "1",
            3 * 4,
            pytest.approx(3 * 4 * 0.5),
        )


@pytest.mark.parametrize(("device", "better"), [("cpu", 1), ("cpu", 2), ("cuda", 2), ("cuda", 3)])
def test_depth_auto_finds_the_better_depth_and_every_id_is_right(device: Literal["cpu", "cuda"], better: int) -> None:
    with Rig(
        "schedule",
        Settings(execute=ExecuteSettings(device=device), schedule=ScheduleSettings(max_steps_in_flight="auto")),
    ) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        prompts = {number: list(range(number, number + 10)) for number in (1, 2, 3, 4)}
        for number, prompt in prompts.items():
            around.admit(number, prompt, max_tokens=330)
        rig.until(lambda load: load.num_running + load.num_waiting == 4)
        used = set()
        while (load := rig.load()).num_running:
            used.add(load.depth)
            around.compute_s = 0.010 if load.depth == better else 0.011
            around.step()
        assert used == ({1, 2} if device == "cpu" else {2, 3}), "both depths were tried"
        assert rig.load().depth == better
        around.until_finished(4)
        for seq, opening in around.opened.items():
            number = opening.request_id
            assert around.received[seq] == expected(prompts[number], m.GenerationOptions(), 0, 330)[0]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_at_greater_depths_later_steps_are_sent_before_the_first_result(depth: Literal[2, 3, 4]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, [1, 2, 3], max_tokens=9)
        steps = [rig.receive("execute", m.Step) for _ in range(depth)]
        assert [step.step_id for step in steps] == list(range(1, depth + 1))
        starts = [np.frombuffer(step.starts, np.int32).tolist() for step in steps]
        assert starts == [[0], *([index] for index in range(3, depth + 2))], "their input ids are not known yet"
        assert rig.nothing("execute")
        rig.send(around.executor.run(steps[0]), "execute.0")
        assert rig.receive("execute", m.Step).step_id == depth + 1
        assert rig.nothing("execute")


@pytest.mark.parametrize("depth", [1, 3])
def test_before_a_successor_takes_over_all_steps_are_settled_and_sent(depth: Literal[1, 3]) -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=depth))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(20)), max_tokens=60)
        for _ in range(6):
            around.step()
        steps = [rig.receive("execute", m.Step) for _ in range(depth)]
        rig.send(m.HandOver(), "supervisor.0")
        around.admit(2, list(range(30)))
        rig.load()
        assert rig.nothing("supervisor", 0), "steps are in flight"
        for step in steps:
            rig.send(around.executor.run(step), "execute.0")
        rig.receive("supervisor", m.Drained)
        while not rig.nothing("detokenize", 0):
            around.detokenize()
        assert rig.nothing("execute", 0)
        seq = next(seq for seq, opening in around.opened.items() if opening.request_id == 1)
        assert len(around.received[seq]) == 6 + depth and not around.finished
        rig.load()
        assert rig.nothing("supervisor", 0), "it answers once"


def test_on_a_gpu_the_default_depth_is_2() -> None:
    depths: tuple[tuple[Literal[0, 1, 3], int], ...] = ((0, 2), (1, 1), (3, 3))
    for depth, num_steps in depths:
        with Rig(
            "schedule",
            Settings(execute=ExecuteSettings(device="cuda"), schedule=ScheduleSettings(max_steps_in_flight=depth)),
        ) as rig:
            rig.start(FACTS)
            Neighbours(rig).admit(1, [1, 2, 3], max_tokens=9)
            for _ in range(num_steps):
                rig.receive("execute", m.Step)
            assert rig.nothing("execute")
            assert rig.load().depth == num_steps


def test_at_depth_1_the_next_step_waits_for_the_result() -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_steps_in_flight=1))) as rig:
        rig.start(FACTS)
        Neighbours(rig).admit(1, [1, 2, 3], max_tokens=5)
        rig.receive("execute", m.Step)
        assert rig.nothing("execute")
