"""After a reset of the prefix cache, earlier blocks are not found, and none is lost."""

import msgspec
import pytest

from pipeline.config.settings import ScheduleSettings, Settings
from pipeline.runtime import messages as m
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.request import Sequence
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import expected
from tests.rig import Rig
from tests.stages.schedule.bench import Bench
from tests.stages.schedule.neighbours import FACTS, Neighbours
from tests.stages.schedule.policies.test_preemption import crowd, short_of_memory

LIMITS = SchedulerConfig(num_blocks=64, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256)


class TestThePool:
    def test_frees_unheld_blocks_and_forgets_held_ones(self) -> None:
        pool = BlockPool(4)
        held, cached, plain = pool.take(), pool.take(), pool.take()
        pool.register(held, b"held")
        pool.register(cached, b"cached")
        pool.release([cached])
        assert pool.forget_all() == 2
        pool.check()
        assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 2)
        assert pool.find(b"held") is None and pool.find(b"cached") is None
        pool.release([held, plain])
        pool.check()
        assert pool.num_free == 4
        assert pool.forget_all() == 0


def run(bench: Bench) -> None:
    bench.fill()
    while bench.steps:
        bench.answer()
        bench.fill()
        bench.report()
        bench.check()


def cached_by(bench: Bench, prompt: list[int]) -> int:
    """How many ids of a prompt are found in the cache when it is computed now."""
    before = bench.scheduler.load().num_cached_tokens
    bench.admit(prompt, max_tokens=4)
    run(bench)
    return bench.scheduler.load().num_cached_tokens - before


def all_open(bench: Bench) -> list[Sequence]:
    return [one for request in bench.scheduler.requests.values() for one in request.open_sequences.values()]


class TestTheScheduler:
    def test_finds_no_earlier_and_all_later_blocks(self) -> None:
        bench = Bench(LIMITS, depth=2)
        prompt = list(range(100))
        assert [cached_by(bench, prompt), cached_by(bench, prompt)] == [0, 96]
        num_cached = bench.scheduler.kv_cache_manager.pool.num_cached
        assert bench.scheduler.reset_prefix_cache() == num_cached > 0
        assert bench.scheduler.load().num_blocks_free == LIMITS.num_blocks
        assert [cached_by(bench, prompt), cached_by(bench, prompt)] == [0, 96]

    def test_running_sequences_continue_but_cache_nothing(self) -> None:
        bench = Bench(LIMITS, depth=2)
        prompt = list(range(40))
        bench.admit(prompt, max_tokens=60)
        bench.fill()
        for _ in range(20):
            bench.answer()
            bench.fill()
            bench.report()
        assert bench.scheduler.num_running == 1
        assert bench.scheduler.reset_prefix_cache() == 3
        bench.check()
        run(bench)
        seq = next(iter(bench.opened))
        whole, finish = expected(prompt, m.GenerationOptions(), 0, 60)
        assert (bench.received[seq], bench.finished[seq]) == (whole, finish)
        assert bench.scheduler.load().num_blocks_free == LIMITS.num_blocks, "its blocks stayed in the cache"
        assert cached_by(bench, prompt + whole) == 0
        assert cached_by(bench, prompt + whole) == 96

    @pytest.mark.parametrize("num_steps", range(1, 8))
    def test_parallel_samples_that_fork_later_cache_nothing(self, num_steps: int) -> None:
        bench = Bench(msgspec.structs.replace(LIMITS, max_num_batched_tokens=32), depth=1)
        prompt = list(range(100))
        bench.admit(prompt, max_tokens=30, n=2)
        for _ in range(num_steps):
            bench.fill()
            bench.answer()
        bench.scheduler.reset_prefix_cache()
        run(bench)
        bench.check_outputs()
        assert bench.scheduler.load().num_forks == 1
        assert cached_by(bench, prompt) == 0
        assert cached_by(bench, prompt) == 96

    def test_swapped_sequences_cache_nothing_when_they_resume(self) -> None:
        num_swapped = 0
        for num_steps in range(30, 120, 10):
            bench = Bench(short_of_memory("swap", prefix_caching=True), depth=2)
            crowd(bench)
            bench.fill()
            for _ in range(num_steps):
                bench.answer()
                bench.fill()
                bench.report()
            swapped = [one.seq for one in all_open(bench) if one.swapped is not None]
            num_swapped += len(swapped)
            bench.scheduler.reset_prefix_cache()
            bench.check()
            run(bench)
            bench.check_outputs()
            for seq in swapped:
                prompt = list(range((seq - 1) * 50, (seq - 1) * 50 + 20))
                assert cached_by(bench, prompt + bench.received[seq][:60]) == 0
        assert num_swapped > 3


def test_the_stage_answers_the_requesting_gateway_through_detokenize() -> None:
    with Rig("schedule", Settings(schedule=ScheduleSettings(max_num_batched_tokens=64))) as rig:
        rig.start(FACTS)
        around = Neighbours(rig)
        around.admit(1, list(range(64)), max_tokens=2)
        around.until_finished(1)
        num_cached = rig.load().num_blocks_cached
        rig.send(m.ResetPrefixCache(0, 77), "gateway.0")
        assert rig.receive("detokenize", m.PrefixCacheReset) == m.PrefixCacheReset(0, 77, num_cached)
        assert (num_cached, rig.load().num_blocks_cached) == (4, 0)
