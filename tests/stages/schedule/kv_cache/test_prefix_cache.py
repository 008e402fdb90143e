"""Prefix caching and parallel sampling: computed blocks, cache hits, and evictions."""

import pytest

from pipeline.runtime import messages as m
from tests.stages.schedule.bench import Bench, config


def test_a_cached_prompt_is_not_computed_again() -> None:
    bench = Bench(config(), depth=1)
    bench.admit(range(100), max_tokens=4)
    bench.run()
    bench.admit(range(100), max_tokens=4)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 96, "six full blocks; the rest is computed"


def test_a_prompt_of_full_blocks_still_computes_its_last_id() -> None:
    bench = Bench(config(), depth=1)
    for _ in range(2):
        bench.admit(range(64), max_tokens=4)
        bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 48


def test_generated_blocks_are_found_by_the_next_turn_of_a_chat() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(range(30), max_tokens=40)
    bench.run()
    turn = [*range(30), *bench.received[1], 5, 6, 7]
    bench.admit(turn, max_tokens=4)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 64, "the last id of 70 was never computed"


def test_nothing_is_cached_if_prefix_caching_is_off() -> None:
    bench = Bench(config(prefix_caching=False), depth=1)
    for _ in range(2):
        bench.admit(range(64), max_tokens=4)
        bench.run()
    load = bench.scheduler.load()
    assert (load.num_cached_tokens, load.num_blocks_cached, load.num_blocks_free) == (0, 0, 64)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [97, 96, 100, 111, 15, 1])
def test_parallel_samples_fork_from_the_first_and_compute_one_position_of_the_prompt(
    length: int, depth: int, caching: bool
) -> None:
    bench = Bench(config(max_num_batched_tokens=256, prefix_caching=caching), depth)
    bench.admit(range(length), max_tokens=4, n=4)
    bench.fill()
    assert bench.scheduler.num_running == min(4, depth**2), "the other samples wait until the prompt is computed"
    num_shared = (length - 1) // 16
    num_own = -(-(length + depth - 1) // 16) - num_shared  # includes the slots of ids that steps in flight will sample
    assert bench.scheduler.kv_cache_manager.pool.num_held <= num_shared + 4 * num_own, "its full blocks exist once"
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_cached_tokens == 3 * (length - 1)
    found_anyway = (length - 1) % 16 == 0 and (caching or length == 1)
    assert load.num_forks == (0 if found_anyway else 3)
    assert bench.executor.num_copies == (3 if (length - 1) % 16 else 0), "the block that all of them write to"
    assert len({tuple(ids) for ids in bench.received.values()}) == 4, "each has its own noise"


def test_a_parallel_sample_without_its_leader_computes_the_prompt_itself() -> None:
    bench = Bench(config(max_num_seqs=1, prefix_caching=False), depth=1)
    bench.admit(range(40), max_tokens=3, n=3)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_forks == 0


def test_parallel_samples_wait_for_a_prompt_in_chunks_while_others_start() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    bench.admit(range(60), max_tokens=4, n=2)
    bench.admit(range(500, 504), max_tokens=4)
    bench.fill()
    bench.answer()
    bench.fill()
    assert [add.request_id for add in bench.steps[0].adds] == [2], "28 of the prompt's ids are left, so there is room"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_forks == 1


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    bench = Bench(config(num_blocks=10, max_num_seqs=1), depth=1)
    for first in (0, 1000, 0, 2000):  # three full blocks each; the third request uses the first prompt again
        bench.admit(range(first, first + 60), max_tokens=4)
        bench.run()
    bench.admit(range(3000, 3060), max_tokens=4)
    bench.run()
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(60), max_tokens=4)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens - before == 48, "kept: it was used after the others"
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(1000, 1060), max_tokens=4)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens == before, "evicted: it was used longest ago"


def test_an_aborted_prompt_caches_only_its_computed_blocks() -> None:
    bench = Bench(config(max_num_batched_tokens=32), depth=1)
    first = bench.admit(range(100))
    bench.fill()
    bench.answer()
    bench.scheduler.abort(m.Abort(first, 1))
    bench.admit(range(100))
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 32


def test_the_head_of_a_partly_evicted_prompt_is_still_found() -> None:
    bench = Bench(config(num_blocks=8, max_num_seqs=1), depth=1)
    bench.admit(range(97), max_tokens=1)  # seven blocks, six of them full
    bench.run()
    bench.admit(range(500, 540), max_tokens=4)  # takes the free blocks, and a cached one
    bench.run()
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(range(97), max_tokens=1)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens - before == 80, "the tail was evicted, not the head"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_reused_row_still_fills_the_prefix_cache(depth: int) -> None:
    bench = Bench(config(max_num_seqs=1), depth)
    bench.admit(range(200, 260), max_tokens=2)
    bench.run()
    for _ in range(2):
        bench.admit(range(60), max_tokens=2)
        bench.run()
    assert bench.scheduler.load().num_cached_tokens == 48
