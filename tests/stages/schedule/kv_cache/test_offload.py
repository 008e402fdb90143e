"""Full blocks are copied to swap space when they are computed, and copied back instead of computed again."""

from typing import Any

import numpy as np
import pytest

from pipeline.stages.schedule.kv_cache.offload import MAX_COPIES
from tests.stages.schedule.bench import Bench, config

NUM_STREAMS = 4
LENGTH, MAX_TOKENS = 50, 60
"""A stream has 50 ids of a prompt, and gets 60."""


def bench_with(depth: int = 1, num_swap_blocks: int = 200, **changes: Any) -> Bench:
    return Bench(config(num_swap_blocks=num_swap_blocks, **changes), depth)


def admit(bench: Bench, num: int = NUM_STREAMS) -> None:
    for number in range(num):
        bench.admit(range(number * 100, number * 100 + LENGTH), max_tokens=MAX_TOKENS)


def turn(bench: Bench, num: int) -> int:
    """Run `num` steps. Returns how many positions they computed."""
    num_positions = 0
    for _ in range(num):
        bench.fill()
        num_positions += int(np.frombuffer(bench.steps[0].counts, np.int32).sum())  # type: ignore[arg-type]
        bench.answer()
        bench.report()
    return num_positions


def finish(bench: Bench, num: int = NUM_STREAMS) -> int:
    """Run until idle and check all ids. Returns how many positions were computed."""
    num_positions = 0
    while len(bench.finished) < num:
        num_positions += turn(bench, 1)
    bench.check_outputs()
    bench.check()
    load = bench.scheduler.load()
    assert (load.num_blocks_held, load.num_swap_blocks_free) == (0, load.num_swap_blocks_total)
    return num_positions


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_each_full_block_is_copied_once(depth: int) -> None:
    bench = bench_with(depth)
    admit(bench)
    bench.run()
    bench.check_outputs()
    # 109 of 110 ids are computed, so 6 full blocks; the sixth is full at 96, long before the end
    assert bench.executor.num_copies == bench.scheduler.load().num_blocks_offloaded == NUM_STREAMS * 6


def test_a_common_prefix_is_copied_once() -> None:
    bench = bench_with()
    for number in range(NUM_STREAMS):
        bench.admit([*range(64), number], max_tokens=8)
    bench.run()
    assert bench.scheduler.load().num_blocks_offloaded == 4


def test_a_step_copies_a_limited_number_of_blocks() -> None:
    bench = bench_with(num_blocks=200, max_model_len=2048, max_num_batched_tokens=2048)
    bench.admit(range(1600), max_tokens=8)
    num_copies = []
    for _ in range(6):
        before = bench.executor.num_copies
        turn(bench, 1)
        num_copies.append(bench.executor.num_copies - before)
    assert num_copies == [0, MAX_COPIES, MAX_COPIES, MAX_COPIES, 100 - 3 * MAX_COPIES, 0]


def test_an_evicted_prefix_comes_back_from_swap_space() -> None:
    bench = bench_with(num_blocks=10)
    prompts = [range(number * 200, number * 200 + 130) for number in range(3)]  # each needs 9 of the 10 blocks
    for prompt in (*prompts, prompts[0]):
        bench.admit(prompt, max_tokens=4)
        bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_blocks_restored == 8
    assert load.num_cached_tokens == 128


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_run", [0, 1])
def test_when_the_executor_dies_only_blocks_that_were_not_copied_are_computed_again(depth: int, num_run: int) -> None:
    bench = bench_with(depth)
    admit(bench)
    done = turn(bench, 40)
    bench.lose_executor(num_run)
    again = done + finish(bench) - NUM_STREAMS * (LENGTH + MAX_TOKENS - 1)
    assert bench.scheduler.load().num_blocks_restored == NUM_STREAMS * 5
    assert again <= NUM_STREAMS * (16 + depth), "the block that was not full, and what was in flight"


def test_without_offload_everything_is_computed_again() -> None:
    bench = bench_with(kv_offload=False)
    admit(bench)
    done = turn(bench, 40)
    bench.lose_executor(0)
    assert done + finish(bench) - NUM_STREAMS * (LENGTH + MAX_TOKENS - 1) > NUM_STREAMS * 80
    assert bench.executor.num_copies == 0


def test_blocks_whose_copies_may_not_have_been_made_are_computed_again() -> None:
    """The executor dies with the step that copies the prompts' blocks."""
    bench = bench_with(max_num_batched_tokens=256)
    admit(bench)
    turn(bench, 1)
    bench.fill()
    assert bench.scheduler.kv_cache_manager.offload.num_blocks_offloaded == NUM_STREAMS * 3
    bench.lose_executor(0)
    finish(bench)
    assert bench.scheduler.load().num_blocks_restored == 0


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_sequence_stays_swapped_out_if_the_step_that_copies_it_is_settled(is_settled: bool) -> None:
    """Before that, the executor may have died without the copies."""
    bench = bench_with(num_blocks=14, preemption="swap", kv_offload=False)
    admit(bench)
    lifecycle = bench.scheduler.lifecycle
    while not lifecycle.swapped:
        if bench.steps:
            bench.answer()
        bench.fill()
        bench.report()
    (swapped,) = lifecycle.swapped
    if is_settled:
        bench.answer()
    bench.lose_executor(0)
    assert (swapped in lifecycle.swapped) == is_settled
    finish(bench)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_nothing_is_used_that_an_executor_with_other_settings_can_not_use(preemption: str) -> None:
    bench = bench_with(num_blocks=14, preemption=preemption)
    admit(bench)
    turn(bench, 60)
    assert bench.scheduler.load().num_preemptions > 0
    num_restored = bench.scheduler.load().num_blocks_restored
    bench.lose_executor(0, keeps_swap=False)
    bench.check()
    assert bench.scheduler.load().num_swap_blocks_free == bench.scheduler.load().num_swap_blocks_total
    turn(bench, 1)
    assert bench.scheduler.load().num_blocks_restored == num_restored
    finish(bench)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_successor_of_a_scheduler_finds_what_was_copied(depth: int) -> None:
    bench = bench_with(depth)
    admit(bench)
    turn(bench, 40)
    bench = bench.successor(has_executor=False)
    admit(bench)
    num_positions = finish(bench)
    assert bench.scheduler.load().num_blocks_restored == NUM_STREAMS * 3, "the prompts' full blocks"
    assert num_positions == NUM_STREAMS * (LENGTH + MAX_TOKENS - 1 - 48)


def test_a_swap_block_that_gets_other_content_is_not_found_by_a_successor() -> None:
    """There are fewer swap blocks than sequences need, so they are used again and again."""
    for num_steps in range(1, 60, 7):
        bench = bench_with(num_swap_blocks=9, num_blocks=14, preemption="swap")
        admit(bench)
        turn(bench, num_steps)
        bench.fill()
        bench = bench.successor(has_executor=num_steps % 2 == 0)
        admit(bench)
        finish(bench)


def test_running_sequences_keep_their_blocks_in_swap_space() -> None:
    """Otherwise two long sequences would evict each other's blocks again and again."""
    bench = bench_with(num_swap_blocks=8)
    admit(bench, 2)
    for _ in range(2):
        turn(bench, 28)
        assert (bench.scheduler.load().num_running, bench.scheduler.load().num_blocks_offloaded) == (2, 8)
    finish(bench, 2)


def test_a_reset_of_the_prefix_cache_forgets_what_was_copied() -> None:
    bench = bench_with()
    admit(bench)
    turn(bench, 40)
    bench.scheduler.reset_prefix_cache()
    assert not any(bench.indices[1])
    bench.lose_executor(0)
    finish(bench)
    assert bench.scheduler.load().num_blocks_restored == 0


def test_a_preempted_sequence_copies_only_what_is_not_in_swap_space() -> None:
    bench = bench_with(num_blocks=14, preemption="swap")
    admit(bench)
    finish(bench)
    load = bench.scheduler.load()
    assert load.num_preemptions > 0
    assert load.num_blocks_swapped_out <= load.num_preemptions * 2, "the last block, and one that has just become full"
