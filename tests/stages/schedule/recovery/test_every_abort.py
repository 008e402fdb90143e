"""A request is aborted at each moment of a run in which rows are preempted, swapped out and in, offloaded and forked:
every block, slot and swap block comes back, and the others get their output. PIPELINE_ALL_CASES=1 tries 60 moments of
each kind of run."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipeline.stages.schedule.scheduler_config import PreemptionMode, StateConfig
from tests.slices import part_of
from tests.stages.schedule.bench import Bench, config

NUM_REQUESTS = 5
MODES: tuple[PreemptionMode, ...] = ("swap", "recompute")
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offload": {"kv_offload": True},
    "drafts": {"num_speculative_tokens": 3, "max_num_drafts": 8},
    "states": {"states": StateConfig(num_slots=8, num_swap_slots=4)},
    "stages": {"num_stages": 2},
}


def bench_of(mode: PreemptionMode, features: dict[str, Any], depth: int) -> Bench:
    settings = {"num_blocks": 14, "num_swap_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    bench = Bench(config(preemption=mode, **settings, **features), depth)
    bench.plans_early = True
    for index in range(NUM_REQUESTS):
        prompt = np.random.default_rng(index // 2).integers(0, 900, 20 + 13 * index).tolist()
        bench.admit(prompt, 40, n=1 + index % 2, compiled_grammar="slow" if index == 3 else "")
    return bench


def moments(bench: Bench) -> Iterator[None]:
    """Between any two things that the stage does, until nothing is left to do."""
    bench.fill()
    yield
    while bench.steps:
        bench.answer()
        yield
        bench.fill()
        yield
        bench.report()
        yield


def finish(bench: Bench, every: Iterator[None]) -> None:
    for _ in every:
        pass
    bench.run()
    bench.check()


def assert_nothing_left(bench: Bench) -> None:
    bench.close_all()
    assert not bench.scheduler.requests
    load = bench.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_swapped, load.num_blocks_held) == (0, 0, 0, 0)
    assert load.num_swap_blocks_free == load.num_swap_blocks_total
    assert set(bench.finished) == set(bench.opened)
    states = bench.scheduler.kv_cache_manager.states
    if states.is_on:
        assert states.pool.num_available == states.pool.num_total


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("mode", MODES)
def test_a_request_may_end_at_any_moment(mode: PreemptionMode, feature: str, depth: int) -> None:
    whole = bench_of(mode, FEATURES[feature], depth)
    num = sum(1 for _ in moments(whole))
    finish(whole, iter(()))
    assert whole.scheduler.load().num_preemptions
    ends: list[Callable[[Bench, int], None]] = [
        lambda bench, one: bench.abort(one),
        lambda bench, one: bench.abort(one, 0),
    ]
    for at in range(depth, num, num // part_of(60, 3)):
        victim, end = 1 + at % NUM_REQUESTS, ends[at % 2]
        bench = bench_of(mode, FEATURES[feature], depth)
        every = moments(bench)
        for _, _ in zip(range(at + 1), every, strict=False):
            pass
        end(bench, victim)
        bench.check()
        finish(bench, every)
        assert_nothing_left(bench)
        if feature != "drafts":
            bench.check_outputs()
