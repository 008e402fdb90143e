"""Every request progresses, and preemptions are useful. Random histories always end, so they cannot test this."""

import time

import numpy as np
import pytest

from pipeline.stages.schedule.policies.policy import MAX_SKIPPED
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.stages.schedule.bench import Bench, config


def turn(bench: Bench, steps: int = 1) -> None:
    for _ in range(steps):
        bench.fill()
        if bench.steps:
            bench.answer()
        bench.report()


def with_known_costs(chosen: SchedulerConfig, depth: int = 1) -> Bench:
    """A bench that has learned the cost of steps."""
    bench = Bench(chosen, depth)
    for number in range(12):
        bench.admit(range(number * 7, number * 7 + 40), max_tokens=30)
        bench.run()
    return bench


def steps_until_first(bench: Bench, request: int, most: int = 500) -> int:
    """Steps until a request's first id arrives."""
    (seq,) = (opening.seq for opening in bench.opened.values() if opening.request_id == request)
    for steps in range(most):
        turn(bench)
        if bench.received[seq]:
            return steps
    return most


def ids(number: int, length: int) -> list[int]:
    """A prompt that shares no prefix with others."""
    return [int(value) for value in np.random.default_rng(number).integers(0, 900, length)]


def long_limits(**changes: object) -> SchedulerConfig:
    values = {"num_blocks": 2000, "max_model_len": 3000, "long_prompt_tokens": 500, "long_prompt_max_slowdown": 1.3}
    return config(**(values | changes))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_swap_blocks", [0, 300])
def test_no_row_is_preempted_for_a_long_prompt_that_waits_for_another_one(depth: int, num_swap_blocks: int) -> None:
    bench = with_known_costs(long_limits(max_num_seqs=3, policy="priority", num_swap_blocks=num_swap_blocks), depth)
    bench.admit(range(10), max_tokens=400)
    victim = bench.admit(range(100, 200), max_tokens=360, priority=1)
    turn(bench, 5)
    bench.admit(ids(1, 2000), max_tokens=5)
    turn(bench, 3)
    bench.admit(ids(2, 2000), max_tokens=5)
    (seq,) = (opening.seq for opening in bench.opened.values() if opening.request_id == victim)
    before = len(bench.received[seq])
    turn(bench, 40)
    assert bench.scheduler.load().num_preemptions == 0
    assert len(bench.received[seq]) >= before + 38, "it continues meanwhile"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 1, "once, when the second can start"


def test_shared_blocks_need_no_preemption() -> None:
    bench = Bench(config(num_blocks=70, max_model_len=1024, policy="priority"), depth=1)
    prompt = ids(1, 480)
    bench.admit(prompt, max_tokens=300)
    turn(bench, 10)
    for number in range(2):
        bench.admit(ids(10 + number, 200), max_tokens=100, priority=1)
    turn(bench, 10)
    bench.admit(prompt[:470], max_tokens=4)
    bench.fill()
    assert len(bench.steps[-1].adds) == 1
    assert bench.scheduler.load().num_preemptions == 0


def test_no_row_is_preempted_whose_blocks_others_hold() -> None:
    bench = Bench(config(num_blocks=60, max_model_len=1024, policy="priority"), depth=1)
    prompt = ids(1, 480)
    bench.admit(prompt, max_tokens=300)
    turn(bench, 10)
    for number in range(3):
        bench.admit([*prompt, number], max_tokens=100, priority=1)
    turn(bench, 4)
    running = bench.scheduler.num_running
    assert running == 4
    head = bench.admit(ids(3, 800), max_tokens=4)
    turn(bench, 20)
    assert bench.scheduler.num_running == 4
    assert bench.scheduler.load().num_preemptions == 0, "all three would give six blocks, and it lacks fifty"
    bench.run()
    bench.check_outputs()
    assert head in {bench.opened[seq].request_id for seq in bench.finished}


def test_a_suspect_ends_the_wait_for_those_that_rows_were_preempted_for() -> None:
    """They are held back, too: no other could preempt rows until they start."""
    bench = Bench(config(num_blocks=40, max_model_len=512, max_num_seqs=4, policy="priority"), depth=2)
    bench.admit(ids(1, 500), max_tokens=10, priority=5)
    turn(bench, 4)
    bench.admit(ids(2, 500), max_tokens=2)
    preemptor = bench.scheduler.lifecycle.preemptor
    while not preemptor.preempted_for:
        bench.fill()
        assert not preemptor.preempted_for or bench.steps
        if not preemptor.preempted_for:
            bench.answer()
            bench.report()
    bench.admit(range(9), num_crashes=1)
    assert not preemptor.preempted_for
    bench.run()
    bench.check_outputs()


def test_no_row_is_preempted_while_the_budget_is_used_up() -> None:
    bench = Bench(config(num_blocks=400, max_model_len=1024, max_num_seqs=2, policy="priority"), depth=1)
    bench.admit(range(10), max_tokens=500, priority=1)
    turn(bench, 3)
    bench.admit(ids(1, 900), max_tokens=2)
    turn(bench, 2)
    bench.admit(ids(2, 100), max_tokens=2)
    while not bench.scheduler.load().num_preemptions:
        bench.fill()
        bench.answer()
        bench.report()
    bench.fill()
    assert bench.scheduler.load().num_running == 2
    assert not bench.scheduler.lifecycle.preemptor.preempted_for, (
        "the request that triggered the preemption has started"
    )
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_lower_priority_value_does_not_wait_for_a_prompt_with_a_higher_one(depth: int) -> None:
    bench = Bench(config(num_blocks=400, max_model_len=2048, policy="priority"), depth)
    bench.admit(ids(1, 1500), max_tokens=2, priority=5)
    turn(bench, 3)
    urgent = bench.admit(ids(2, 50), max_tokens=2, priority=0)
    assert steps_until_first(bench, urgent) <= depth
    bench.run()
    bench.check_outputs()


def test_a_cached_prompt_is_not_long() -> None:
    bench = with_known_costs(long_limits())
    prompt = ids(1, 1000)
    bench.admit(prompt, max_tokens=2)
    bench.run()
    for number in range(4):
        bench.admit([number] * 3, max_tokens=1000)
    turn(bench, 10)
    bench.admit(ids(2, 2000), max_tokens=2)
    turn(bench, 3)
    again = bench.admit([*prompt, 5, 6], max_tokens=2)
    assert steps_until_first(bench, again) == 0, "only ten tokens need computing"


@pytest.mark.parametrize("num_long", [3, 70, 200])
def test_a_short_prompt_overtakes_any_number_of_long_ones(num_long: int) -> None:
    bench = with_known_costs(long_limits(max_num_batched_tokens=96, max_num_seqs=100))
    for number in range(4):
        bench.admit([number] * 3, max_tokens=2000)
    turn(bench, 10)
    for number in range(num_long):
        bench.admit(ids(number, 600), max_tokens=2)
    turn(bench, 3)
    short = bench.admit(ids(999, 5), max_tokens=2)
    assert steps_until_first(bench, short) <= 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_prompt_overtakes_a_long_one_without_decoding_rows(policy: str) -> None:
    bench = Bench(long_limits(policy=policy), depth=1)
    bench.admit(ids(1, 2000), max_tokens=2)
    turn(bench, 3)
    short = bench.admit(ids(2, 40), max_tokens=2)
    assert steps_until_first(bench, short) <= 1


def test_a_short_prompt_progresses_if_decoding_rows_leave_almost_no_budget() -> None:
    bench = Bench(long_limits(max_num_seqs=16, max_num_batched_tokens=16), depth=1)
    for number in range(14):
        bench.admit([number] * 3, max_tokens=2000)
    turn(bench, 20)
    bench.admit(ids(1, 1800), max_tokens=2)
    turn(bench, 3)
    short = bench.admit(ids(2, 5), max_tokens=2)
    assert steps_until_first(bench, short) <= 6


def test_a_long_prompt_is_overtaken_a_limited_number_of_times() -> None:
    bench = with_known_costs(long_limits(max_num_batched_tokens=64, max_num_seqs=30))
    for number in range(6):
        bench.admit([number] * 10, max_tokens=2500)
    turn(bench, 20)
    bench.admit(ids(1, 2500), max_tokens=2)
    turn(bench, 3)
    second = bench.admit(ids(2, 700), max_tokens=2)
    for number in range(1000):
        bench.admit(ids(100 + number, 40), max_tokens=1)
        turn(bench)
        if any(sequence and sequence.request.request_id == second for sequence in bench.scheduler.rows.sequences):
            break
    assert number <= 2 * MAX_SKIPPED


def test_overtaking_is_counted_when_the_sequence_has_started() -> None:
    bench = Bench(config(num_blocks=16, max_num_seqs=8, max_model_len=200, policy="longest-prefix-match"), depth=1)
    bench.admit(range(64), max_tokens=1)
    bench.run()
    bench.admit(ids(1, 150), max_tokens=50)  # fills the memory while it runs
    turn(bench, 3)
    for number in range(3):
        bench.admit(ids(20 + number, 120), max_tokens=1)
    matching = bench.admit([*range(48), 7], max_tokens=1)
    turn(bench, 30)
    waiting = [
        sequence for request in bench.scheduler.requests.values() for sequence in request.open_sequences.values()
    ]
    assert all(sequence.num_skipped == 0 for sequence in waiting if sequence.row < 0) or matching in {
        bench.opened[seq].request_id for seq in bench.finished
    }
    bench.run()
    bench.check_outputs()


def test_parallel_samples_get_another_leader_if_theirs_is_aborted() -> None:
    bench = Bench(config(max_num_batched_tokens=16), depth=1)
    request = bench.admit(range(60), max_tokens=3, n=3)
    turn(bench)
    bench.abort(request, 0)
    bench.run()
    bench.check_outputs()
    assert len(bench.finished) == 3
    assert bench.scheduler.load().num_forks == 1


@pytest.mark.parametrize("aligned", [True, False])
def test_preempting_many_rows_is_cheap(aligned: bool) -> None:
    """A thousand rows run out of memory at once. Measures the cost of a plan; one plan may be slow because of noise."""
    num_rows = 1024
    bench = Bench(
        config(
            num_blocks=num_rows * 2, max_num_seqs=num_rows, max_num_batched_tokens=65536, prefix_caching=False,
            num_swap_blocks=500,
        ),
        depth=1,
    )  # fmt: skip
    for number in range(num_rows):
        bench.admit([number % 900] * (10 if aligned else 10 + number % 14), max_tokens=60)
    plans = []
    while bench.scheduler.load().num_preemptions < 300:
        begun = time.perf_counter()
        step = bench.scheduler.plan()
        plans.append(time.perf_counter() - begun)
        assert step is not None
        bench.scheduler.settle(bench.executor.run(step))
        bench.report()
    assert sorted(plans[1:])[-3] < 0.02


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_preempted_prompt_frees_only_its_row(depth: int) -> None:
    bench = Bench(long_limits(max_num_seqs=4, max_num_batched_tokens=96, policy="priority"), depth)
    for number in range(3):
        bench.admit(ids(number, 10), max_tokens=500)
    bench.admit(ids(9, 2900), max_tokens=5, priority=5)
    turn(bench, 3)
    bench.admit(ids(8, 300), max_tokens=5)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 1


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [10, 30, 40])
def test_preempted_blocks_suffice_although_other_rows_grow_meanwhile(depth: int, num_blocks: int) -> None:
    bench = Bench(
        config(num_blocks=64 * 2, max_num_seqs=64, max_model_len=1000, max_num_batched_tokens=1024, policy="priority"),
        depth,
    )
    for number in range(16):
        bench.admit(ids(number, 5 + number), max_tokens=800)
    for number in range(48):
        bench.admit(ids(100 + number, 5 + number % 16), max_tokens=100, priority=1)
    turn(bench, 12)
    urgent = bench.admit(ids(999, num_blocks * 16 - 8), max_tokens=2)
    assert steps_until_first(bench, urgent) <= 3 * depth
    later = bench.admit(ids(998, 10), max_tokens=2)
    assert steps_until_first(bench, later) <= 3 * depth


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_many_requests_with_a_lower_priority_value_preempt_in_one_step(depth: int) -> None:
    bench = Bench(config(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=1024, policy="priority"), depth)
    for number in range(32):
        bench.admit(ids(number, 10), max_tokens=100, priority=3)
    turn(bench, 4)
    urgent = [bench.admit(ids(100 + number, 10), max_tokens=4) for number in range(32)]
    turn(bench, 2)
    running = {sequence.request.request_id for sequence in bench.scheduler.rows.sequences if sequence is not None}
    assert running == set(urgent)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 32


def test_no_more_rows_are_preempted_than_the_step_has_tokens_for() -> None:
    bench = Bench(config(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=64, policy="priority"), depth=1)
    for number in range(32):
        bench.admit(ids(number, 10), max_tokens=100, priority=3)
    turn(bench, 10)
    for number in range(32):
        bench.admit(ids(100 + number, 30), max_tokens=4)
    bench.fill()
    assert bench.scheduler.load().num_preemptions == 2


def test_no_row_is_preempted_if_a_row_is_about_to_be_free() -> None:
    bench = Bench(config(num_blocks=200, max_num_seqs=2, policy="priority"), depth=2)
    bench.admit(range(10), max_tokens=100, priority=2)
    bench.admit(range(50, 60), max_tokens=12, priority=3)
    while not any(sequence and len(bench.received[2]) == 11 for sequence in bench.scheduler.rows.sequences):
        bench.fill()
        bench.answer()
        bench.report()
    urgent = bench.admit(range(200, 210), max_tokens=3)
    assert steps_until_first(bench, urgent) <= 4
    assert bench.scheduler.load().num_preemptions == 0


@pytest.mark.parametrize("other", [2500, 40])
def test_a_long_prompt_does_not_wait_for_prompts_with_a_higher_priority_value(other: int) -> None:
    steps = []
    for beside in (False, True):
        bench = with_known_costs(long_limits(max_num_batched_tokens=64, policy="priority", max_num_seqs=20))
        for number in range(4):
            bench.admit([number] * 3, max_tokens=1000)
        turn(bench, 10)
        if beside:
            for number in range(1 if other > 500 else 60):
                bench.admit(ids(50 + number, other), max_tokens=2, priority=9)
            turn(bench, 3)
        steps.append(steps_until_first(bench, bench.admit(ids(7, 900), max_tokens=2)))
    assert steps[1] <= steps[0] + 3


@pytest.mark.parametrize("caching", [True, False])
def test_parallel_samples_start_together_if_their_leader_ends_with_its_first_id(caching: bool) -> None:
    bench = Bench(config(num_blocks=600, max_num_seqs=64, max_num_batched_tokens=2048, prefix_caching=caching), depth=1)
    bench.admit(ids(1, 30), max_tokens=1, n=64)
    assert bench.run() <= 3
    bench.check_outputs()
