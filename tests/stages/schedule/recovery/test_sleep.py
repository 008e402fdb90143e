"""The server sleeps: its executor leaves, and the next one has what it had."""

from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule.scheduler_config import StateConfig
from tests.fakes import EMPTY
from tests.stages.schedule.bench import Bench, config, inline

PREFIX = list(range(40))


class CountingBench(Bench):
    """Counts the positions that its executors compute."""

    num_computed = 0

    def _compute(self) -> m.StepResult:
        self.num_computed += int(np.frombuffer(inline(self.steps[0].counts), np.int32).sum())
        return super()._compute()


def decoding(bench: Bench, turns: int) -> None:
    """Run so many steps."""
    for _ in range(turns):
        if bench.steps:
            bench.answer()
        bench.load_adapters()
        bench.fill()
        bench.report()


def load(bench: Bench) -> None:
    """Requests of all kinds, more than run at once, and one in the middle of its prompt."""
    bench.admit(PREFIX, max_tokens=30, seed=1)
    # Those of a model with recurrent layers fork only if they come in time.
    bench.admit(PREFIX, max_tokens=25, n=1 if bench.scheduler.config.states.num_slots else 3, seed=2, num_logprobs=2)
    bench.admit([5, 6, 7], max_tokens=40, num_prompt_logprobs=1)
    bench.admit(range(100, 220), max_tokens=9, num_prompt_logprobs=0)
    bench.admit(range(300, 420), max_tokens=9)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"kv_groups": (FULL, KVGroup(20))},
    "states": {"states": StateConfig(8, 0, 32, 16, 16), "prefix_caching": True},
    "speculation": {"num_speculative_tokens": 3, "max_num_drafts": 30},
    "offload": {"num_swap_blocks": 40},
    "pipeline": {"num_stages": 3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turns", [1, 2, 3, 7, 12])
def test_all_go_on_where_they_were_and_nothing_is_computed_again(kind: str, turns: int) -> None:
    values = KINDS[kind] | {"num_blocks": 200, "max_num_batched_tokens": 48}
    alone, bench = (CountingBench(config(**values), depth=2) for _ in range(2))
    for one in (alone, bench):
        load(one)
    alone.run()
    decoding(bench, turns)
    bench.sleep()
    bench.check()
    bench.sleep()
    decoding(bench, turns)
    bench.sleep()
    bench.run()
    bench.check_outputs()
    assert bench.received == alone.received
    assert not bench.scheduler.load().num_preemptions
    if kind != "speculation":  # there, it depends on chance how many proposals are wrong
        assert bench.num_computed == alone.num_computed


def test_beams_go_on() -> None:
    alone, bench = (Bench(config(num_blocks=200), depth=2) for _ in range(2))
    for one in (alone, bench):
        one.admit(PREFIX[:21], max_tokens=20, n=3, use_beam_search=True, num_logprobs=2)
    alone.run()
    for turns in (1, 2, 5):
        decoding(bench, turns)
        bench.sleep()
        bench.check()
    bench.run()
    assert bench.received == alone.received


def test_of_cached_blocks_the_newest_are_kept() -> None:
    bench = Bench(config(block_bytes=100, sleep_cache_bytes=399), depth=1)
    prompts = [range(100 * number, 100 * number + 33) for number in range(4)]
    for prompt in prompts:
        bench.admit(prompt, max_tokens=1)
        bench.run()
    pool = bench.scheduler.kv_cache_manager.pool
    assert pool.num_cached == 8
    bench.sleep()
    assert pool.num_cached == 3
    cached = []
    for prompt in prompts[::-1]:
        before = bench.scheduler.load().num_cached_tokens
        bench.admit(prompt, max_tokens=1)
        bench.run()
        cached.append(bench.scheduler.load().num_cached_tokens - before)
    assert cached == [32, 16, 0, 0], "of the last prompt both blocks, of the one before its first"
    bench.check_outputs()


def test_what_the_next_step_copies_to_swap_space_is_saved() -> None:
    """Also if the sequence that had it is over by then."""
    bench = Bench(config(num_swap_blocks=20), depth=1)
    number = bench.admit(PREFIX, max_tokens=30)
    decoding(bench, 1)
    bench.answer()
    bench.scheduler.kv_cache_manager.begin_plan(2)  # as a plan that finds nothing to compute
    sources = list(bench.scheduler.kv_cache_manager.copies.sources)
    assert sources
    bench.abort(number)
    bench.sleep()
    assert (bench.executor.kv[sources] != EMPTY).all()
    bench.admit(range(300, 310))
    bench.run()
    assert (bench.executor.kv[bench.executor.num_blocks :] != EMPTY).any()
    bench.scheduler.kv_cache_manager.pool.forget_all()
    bench.admit(PREFIX, max_tokens=5)
    bench.run()
    assert bench.scheduler.load().num_blocks_restored
    bench.check_outputs()


def test_a_scheduler_that_dies_while_the_server_sleeps_has_a_successor_that_finds_all_full_blocks() -> None:
    bench = Bench(config(block_bytes=1, sleep_cache_bytes=100), depth=1)
    bench.admit(PREFIX, max_tokens=30)
    decoding(bench, 12)
    bench.sleep()
    successor = bench.successor()
    successor.admit(PREFIX, max_tokens=5)
    successor.run()
    assert successor.scheduler.load().num_cached_tokens == 32
    successor.check_outputs()


def test_an_executor_that_dies_before_it_has_saved_everything_leaves_nothing() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(PREFIX, max_tokens=30)
    decoding(bench, 5)
    bench.sleep(is_saved=False)
    bench.run()
    bench.check_outputs()


def test_aborted_sequences_free_their_blocks_while_the_server_sleeps() -> None:
    bench = Bench(config(), depth=2)
    numbers = [bench.admit(range(50 * number, 50 * number + 40), max_tokens=30) for number in range(3)]
    decoding(bench, 5)
    bench.sleep(lambda: bench.abort(numbers[1]))
    bench.report()
    assert bench.scheduler.load().num_running == 2
    decoding(bench, 3)
    bench.sleep()
    bench.abort(numbers[0])
    bench.run()
    load = bench.scheduler.load()
    assert (load.num_running, load.num_blocks_held) == (0, 0)
    bench.check_outputs()


def test_adapters_are_loaded_again() -> None:
    bench = Bench(config(max_loras=2, waits_for_adapters=True), depth=1)
    bench.admit(PREFIX, max_tokens=30, adapter_id="a")
    decoding(bench, 4)
    assert bench.scheduler.use_adapters() is None
    bench.sleep()
    use = bench.scheduler.use_adapters()
    assert use is not None and use.adapter_ids == ["a"]
    bench.last_use = use
    bench.run()
    bench.check_outputs()
