"""Steps, limits and preemption: every sequence generates exactly its ids."""

from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.shm.arrays import Array
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.state import SchedulerContext, from_inline
from tests.fakes import FakeExecutor, expected, inline, next_id
from tests.rig import raw
from tests.stages.schedule.bench import Bench, config


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_sequence_generates_exactly_its_ids(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(50), max_tokens=40)
    bench.run()
    bench.check_outputs()
    assert list(bench.finished.values()) == [Finish.LENGTH]
    assert len(bench.received[1]) == 40


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_stop_id_ends_a_sequence_and_later_steps_in_flight_add_nothing(depth: int) -> None:
    prompt = list(range(20))
    ids, _ = expected(prompt, m.GenerationOptions(), 0, 6)
    bench = Bench(config(), depth)
    bench.admit(prompt, max_tokens=40, stop=[ids[5]])
    assert bench.run() == 6 + depth - 1, "the steps in flight at that time"
    assert bench.received[1] == ids
    assert bench.finished[1] == Finish.STOP


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_length_stop_wastes_no_step_at_any_depth(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(10), max_tokens=5)
    assert bench.run() == 5


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    bench.admit(range(8), max_tokens=30)
    bench.fill()
    bench.answer()
    bench.admit(range(100, 300), max_tokens=2)
    for _ in range(6):
        bench.fill()
        step = bench.steps[0]
        counts = np.frombuffer(inline(step.counts), np.int32).tolist()
        assert counts == [1, 31], "the decoding row goes first, the prompt takes the rest of the budget"
        bench.answer()
        bench.report()
    bench.run()
    bench.check_outputs()


def test_no_step_exceeds_the_budget() -> None:
    bench = Bench(config(max_num_batched_tokens=16, max_num_seqs=8), depth=2)
    for number in range(20):
        bench.admit(range(number, number + 37), max_tokens=9)
    while True:
        bench.fill()
        if not bench.steps:
            break
        assert np.frombuffer(inline(bench.steps[-1].counts), np.int32).sum() <= 16
        bench.answer()
        bench.report()
    bench.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_when_blocks_run_out_the_youngest_is_preempted_and_ends_with_the_same_ids(depth: int) -> None:
    bench = Bench(config(num_blocks=10, max_num_seqs=4, max_model_len=160), depth)
    for number in range(4):
        bench.admit(range(number * 50, number * 50 + 20), max_tokens=90)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions > 0
    assert len(bench.finished) == 4
    assert bench.scheduler.load().num_blocks_held == 0


@pytest.mark.parametrize("depth", [2, 4])
def test_the_earliest_sequence_ends_first_although_memory_is_short(depth: int) -> None:
    bench = Bench(config(num_blocks=8, max_num_seqs=8, max_model_len=128), depth)
    for number in range(12):
        bench.admit(range(number, number + 30), max_tokens=60)
    bench.run()
    assert list(bench.finished) == sorted(bench.finished), "equal requests end in order of arrival"


def test_a_preempted_sequence_reports_its_ids_before_it_waits() -> None:
    bench = Bench(config(num_blocks=4, max_num_seqs=2, max_model_len=64), depth=1)
    bench.admit(range(14), max_tokens=40)
    bench.admit(range(100, 114), max_tokens=40)
    while bench.scheduler.load().num_preemptions == 0:
        bench.fill()
        bench.answer()
        bench.fill()
        bench.report()
        for seq, ids in bench.received.items():
            message, options = bench.admitted[seq]
            prompt = np.frombuffer(inline(message.prompt_ids), np.int32).tolist()
            assert ids == expected(prompt, options, 0, len(ids))[0]
    assert len(bench.received[2]) == len(bench.received[1])


def test_a_request_that_can_never_fit_is_rejected() -> None:
    bench = Bench(config(num_blocks=4, max_model_len=256), depth=1)
    bench.admit(range(60), max_tokens=60)
    assert "8 KV blocks" in bench.refused[0].failure.message
    assert bench.refused[0].failure.status == 400
    assert not bench.scheduler.requests


def test_output_refused_by_a_full_socket_is_sent_with_the_next_report() -> None:
    bench = Bench(config(), depth=1)
    bench.admit(range(10), max_tokens=9)
    for turn in range(9):
        bench.fill()
        bench.answer()
        bench.report(sent=turn % 4 == 3)
    bench.report()
    bench.check_outputs()
    assert bench.finished == {1: Finish.LENGTH}


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_row_is_reused_while_steps_of_its_previous_sequence_are_in_flight(depth: int) -> None:
    """Their samples are ignored, and they write only to blocks that no other sequence has."""
    bench = Bench(config(max_num_seqs=1, num_blocks=12, prefix_caching=False), depth)
    for number in range(5):
        request = bench.admit(range(number * 100, number * 100 + 20), max_tokens=60)
        bench.fill()
        bench.answer()
        bench.fill()
        bench.check()
        if number < 4:
            bench.abort(request)
            assert bench.scheduler.num_running == 0 and len(bench.steps) == depth
    bench.run()
    bench.check_outputs()
    assert [bench.finished[seq] for seq in range(1, 6)] == [Finish.ABORT] * 4 + [Finish.LENGTH]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_a_new_sequence_waits_only_for_the_steps_in_flight(depth: int) -> None:
    bench = Bench(config(), depth)
    bench.admit(range(10), max_tokens=60)
    bench.fill()
    late = bench.admit(range(100, 110), max_tokens=5)
    num_steps = 0
    while not bench.received[late]:
        bench.answer()
        bench.fill()
        bench.report()
        num_steps += 1
    assert num_steps == depth + 1
    bench.run()
    bench.check_outputs()


def test_an_id_for_the_wrong_step_fails_an_assertion() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(range(10))
    bench.fill()
    bench.executor.run(bench.steps.popleft())
    with pytest.raises(AssertionError, match="a result of step 2 came, step 1 is due"):
        bench.scheduler.settle(bench.executor.run(bench.steps.popleft()))


def test_a_fake_id_depends_on_every_id_before_it() -> None:
    assert next_id([1, 2, 3], 0, 0) != next_id([2, 2, 3], 0, 0)


def test_a_new_sequence_leaves_running_ones_their_next_blocks() -> None:
    bench = Bench(config(num_blocks=12, max_num_seqs=8), depth=1)
    for number in range(4):
        bench.admit(range(number * 100, number * 100 + 30), max_tokens=18)  # two blocks now, three in the end
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_no_row_is_preempted_if_a_block_is_about_to_be_released(depth: int) -> None:
    bench = Bench(config(num_blocks=5, max_num_seqs=3, max_model_len=64, prefix_caching=False), depth)
    bench.admit(range(16), max_tokens=30)
    bench.admit(range(100, 116), max_tokens=2)
    bench.run()
    assert bench.scheduler.load().num_preemptions == 0
    bench.check_outputs()


def test_the_longest_prompt_leaves_room_for_one_id_and_a_longer_one_is_rejected() -> None:
    bench = Bench(config(max_model_len=64), depth=1)
    bench.admit(range(63), max_tokens=10)
    bench.admit(range(64), max_tokens=10)
    bench.run()
    assert len(bench.received[1]) == 1
    assert bench.finished[1] == Finish.LENGTH
    assert bench.refused[0].failure.status == 400
    assert len(bench.opened) == 1


def test_the_last_id_needs_no_block_because_it_is_never_computed() -> None:
    bench = Bench(config(num_blocks=4, max_model_len=80), depth=1)
    bench.admit(range(60), max_tokens=5)
    bench.run()
    bench.check_outputs()
    assert bench.finished == {1: Finish.LENGTH}


def test_every_array_of_a_result_is_taken() -> None:
    """One that is not would stay in the executor's arena for ever."""
    taken: list[Array] = []

    def take(array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
        taken.append(array)
        return from_inline(array, dtype)

    scheduler, executor = Scheduler(config(), SchedulerContext(take=take)), FakeExecutor(config().num_blocks)
    options = raw(m.GenerationOptions(max_tokens=5, num_logprobs=1, num_prompt_logprobs=1))
    scheduler.admit(m.Admit(1, 1, 0, 0.0, np.arange(9, dtype=np.int32).tobytes(), options))
    while (step := scheduler.plan()) is not None:
        result = executor.run(step)
        taken.clear()
        scheduler.settle(result)
        arrays = [
            result.rows,
            result.generations,
            result.ids,
            result.finishes,
            result.token_outputs,
            result.prompt_logprobs,
        ]
        assert all(any(one is array for one in taken) for array in arrays)
