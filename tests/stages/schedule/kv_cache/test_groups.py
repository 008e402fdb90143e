"""KV groups: layers with a sliding window hold the blocks of their window only, and nothing else changes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.model.kv_groups import FULL, KVGroup, most_blocks
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.lookup import PrefixLookup
from pipeline.stages.schedule.kv_cache.prefix import group_key
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import inline
from tests.slices import part_of
from tests.stages.schedule.bench import Bench, config

BLOCK_SIZE = 16
GEMMA = (FULL, KVGroup(64), KVGroup(64))


def groups_config(groups: Sequence[KVGroup] = GEMMA, **changes: Any) -> SchedulerConfig:
    return config(**{"num_blocks": 256, "max_model_len": 1024, "kv_groups": tuple(groups)} | changes)


def held(bench: Bench, row: int = 0) -> list[int]:
    """Blocks of a row in each group."""
    rows = bench.scheduler.rows
    return (rows.block_ends[:, row] - rows.block_firsts[:, row]).tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_sequence_holds_only_the_blocks_of_its_window(depth: int) -> None:
    bench = Bench(groups_config(max_num_batched_tokens=48), depth)
    bench.admit(range(500), max_tokens=400)
    most = GEMMA[1].most_blocks(900, 48, BLOCK_SIZE)
    assert most == 8, "four blocks of the window, three of a chunk, one at whose end the window may begin"
    for _ in range(250):
        bench.fill()
        bench.check()
        full, *windows = held(bench)
        assert full == -(-max(500, int(bench.scheduler.rows.num_computed_tokens[0])) // BLOCK_SIZE)
        assert all(num <= most for num in windows)
        bench.answer()
        bench.report()
    full, *windows = held(bench)
    assert full > 40
    assert all(num <= 6 for num in windows), "a decoding row needs no blocks for chunks"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_held == 0


def test_one_group_with_a_window_frees_blocks_too() -> None:
    bench = Bench(groups_config([KVGroup(40)], num_blocks=8, max_model_len=2048, max_num_batched_tokens=32), depth=2)
    bench.admit(range(700), max_tokens=300)
    bench.run()
    bench.check_outputs()
    assert len(bench.received[1]) == 300, "a thousand ids pass through eight blocks"


@pytest.mark.parametrize("prefix_caching", [True, False])
@settings(max_examples=15, deadline=None)
@given(
    groups=st.lists(st.integers(1, 90).map(KVGroup), min_size=1, max_size=3).map(lambda some: (FULL, *some)),
    num_prompt=st.integers(1, 300),
    budget=st.sampled_from([16, 50, 400]),
    depth=st.integers(1, 3),
)
def test_most_blocks_are_enough_for_a_sequence_alone(
    prefix_caching: bool, groups: tuple[KVGroup, ...], num_prompt: int, budget: int, depth: int
) -> None:
    num_blocks = most_blocks(groups, num_prompt + 60, budget, BLOCK_SIZE)
    limits = groups_config(groups, num_blocks=num_blocks, max_num_batched_tokens=budget, prefix_caching=prefix_caching)
    bench = Bench(limits, depth)
    bench.admit(range(num_prompt), max_tokens=60)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_preemptions == 0
    assert len(bench.received[1]) == 60


def test_more_sequences_run_in_the_same_memory() -> None:
    """Three groups have a third of the layers each, so a block of one group for all has three times the bytes."""
    peaks = []
    for groups, num_blocks in ((GEMMA, 180), ((FULL,), 60)):
        bench = Bench(groups_config(groups, num_blocks=num_blocks, max_num_seqs=16, prefix_caching=False), depth=1)
        for number in range(16):
            bench.admit(range(number, number + 300), max_tokens=20)
        peak = 0
        bench.fill()
        while bench.steps:
            peak = max(peak, bench.scheduler.num_running)
            bench.answer()
            bench.fill()
            bench.report()
        bench.check_outputs()
        peaks.append(peak)
    assert peaks[1] == 3
    assert peaks[0] >= 5


def test_the_next_turn_finds_the_blocks_that_its_window_needs() -> None:
    bench = Bench(groups_config(), depth=1)
    bench.admit(range(320), max_tokens=40)
    bench.run()
    bench.admit([*range(320), *bench.received[1], 7, 7, 7], max_tokens=20)
    bench.fill()
    rows = bench.scheduler.rows
    assert rows.num_tokens[0] == 363
    assert bench.scheduler.load().num_cached_tokens == 352
    assert held(bench) == [23, 5, 5], "four blocks of the window, and one for the new ids"
    assert rows.block_firsts[:, 0].tolist() == [0, 18, 18]
    bench.run()
    bench.check_outputs()


def test_a_prefix_is_found_in_the_middle_of_a_sequence_that_has_left_it() -> None:
    bench = Bench(groups_config(), depth=1)
    bench.admit([*range(160), *range(500, 700)], max_tokens=60)
    bench.run()
    bench.admit([*range(160), *range(700, 720)], max_tokens=20)
    bench.run()
    assert bench.scheduler.load().num_cached_tokens == 160
    bench.check_outputs()


def test_salts_keep_prefixes_apart() -> None:
    bench = Bench(groups_config(), depth=1)
    for salt in ("", "mine", "mine"):
        bench.admit(range(200), max_tokens=5, salt=salt)
        bench.run()
    assert bench.scheduler.load().num_cached_tokens == 192
    bench.check_outputs()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("kv_offload", [True, False])
def test_preempted_sequences_go_on_with_their_ids(preemption: Any, kv_offload: bool) -> None:
    limits = groups_config(
        num_blocks=62,
        num_swap_blocks=200,
        preemption=preemption,
        kv_offload=kv_offload,
        max_num_seqs=4,
        max_model_len=512,
    )
    bench = Bench(limits, depth=2)
    for number in range(4):
        bench.admit(range(number * 50, number * 50 + 90), max_tokens=200)
    for _ in range(2000):
        bench.fill()
        bench.check()
        if not bench.steps:
            break
        bench.answer()
        bench.report()
    bench.report()
    load = bench.scheduler.load()
    assert load.num_preemptions > 0 and len(bench.finished) == 4
    assert (load.num_blocks_swapped_in > 0) == (preemption == "swap")
    bench.check_outputs()


def test_after_a_crash_of_the_executor_a_window_is_copied_back() -> None:
    bench = Bench(groups_config(num_swap_blocks=400), depth=1)
    bench.admit(range(400), max_tokens=100)
    for _ in range(40):
        bench.fill()
        bench.answer()
        bench.report()
    bench.lose_executor(0)
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    # Of about 430 positions, all full blocks of one group, and four of each window: copied, not computed.
    assert 26 + 2 * 4 <= load.num_blocks_restored <= 28 + 2 * 5


def test_a_successor_of_the_scheduler_finds_the_copies_of_all_groups() -> None:
    bench = Bench(groups_config(num_swap_blocks=400), depth=1)
    bench.admit(range(300), max_tokens=50)
    bench.run()
    successor = bench.successor(has_executor=False)
    successor.admit([*range(300), *bench.received[1]], max_tokens=5)
    successor.executor.kv[: successor.executor.num_blocks] = -7
    successor.run()
    successor.check_outputs()
    assert successor.scheduler.load().num_blocks_restored >= 20 + 2 * 4


@pytest.mark.parametrize("depth", [1, 2])
def test_forks_share_what_the_window_still_reaches(depth: int) -> None:
    bench = Bench(groups_config(), depth)
    bench.admit(range(203), max_tokens=30, n=4)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_forks == 3


def test_a_late_sample_whose_sibling_has_left_the_prompt_takes_it_from_the_prefix_cache() -> None:
    bench = Bench(groups_config(max_num_seqs=2, max_model_len=512), depth=1)
    bench.admit(range(800, 810), max_tokens=90)
    bench.admit(range(203), max_tokens=120, n=2)
    while not any(len(ids) > 80 for ids in bench.received.values()):
        bench.fill()
        bench.answer()
        bench.report()
        bench.check()
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert (load.num_forks, load.num_cached_tokens) == (0, 192)


def test_step_messages_carry_a_table_for_each_group() -> None:
    bench = Bench(groups_config(max_num_batched_tokens=64), depth=1)
    bench.admit(range(200), max_tokens=3)
    bench.fill()
    step = bench.steps[0]
    (add,) = step.adds
    assert [len(inline(blocks)) // 4 for blocks in (add.blocks, *add.group_blocks)] == [13, 4, 4]
    assert add.first_blocks == []
    bench.answer()
    bench.fill()
    step = bench.steps[0]
    groups = np.frombuffer(inline(step.block_groups), np.uint8).tolist()
    assert groups == [1] * 4 + [2] * 4, "the next chunk's blocks; with full attention they are there"
    bench.run()
    bench.check_outputs()


# ------------------------------------------------------------------------------------------------------------- lookup


def longest(there: list[set[int]], groups: tuple[KVGroup, ...], num_keys: int, in_swap: list[set[int]]) -> int:
    """The formula: the longest prefix that every group can continue behind, one by one."""
    for num in range(num_keys, 0, -1):
        needed = [range(group.first_block(num * BLOCK_SIZE, BLOCK_SIZE), num) for group in groups]
        if all(drawn <= there[i] | in_swap[i] for i, drawn in enumerate(map(set, needed))):
            return num
    return 0


@settings(max_examples=part_of(200, 50), deadline=None)
@given(data=st.data(), windows=st.lists(st.sampled_from([1, 16, 17, 18, 40, 64, 90]), max_size=3))
def test_the_longest_prefix_is_the_one_on_which_all_groups_agree(data: st.DataObject, windows: list[int]) -> None:
    groups = (FULL, *map(KVGroup, windows))
    num_keys = data.draw(st.integers(0, 12))
    keys = [bytes([block_index]) * 16 for block_index in range(num_keys)]
    pool, swap = BlockPool(64), BlockPool(64)
    where: list[list[set[int]]] = []
    for blocks in (pool, swap):
        drawn = [set(data.draw(st.lists(st.integers(0, max(0, num_keys - 1))))) for _ in groups]
        where.append([{block_index for block_index in some if block_index < num_keys} for some in drawn])
        for index, some in enumerate(where[-1]):
            for block_index in some:
                blocks.register(blocks.take(), group_key(keys[block_index], index))
    # With full attention: a run in the cache, then one in swap space.
    first = next((block_index for block_index in range(num_keys) if block_index not in where[0][0]), num_keys)
    where[0][0] = set(range(first))
    for with_swap in (False, True):
        lookup = PrefixLookup(pool, swap, groups, BLOCK_SIZE)
        num, found = lookup.longest(keys, with_swap=with_swap)
        assert num == longest(where[0], groups, num_keys, where[1] if with_swap else [set()] * len(groups))
        for index, (group, part) in enumerate(zip(groups, found, strict=True)):
            assert part.first == group.first_block(num * BLOCK_SIZE, BLOCK_SIZE) or not num
            for block_index, block in enumerate(part.blocks, part.first):
                key = group_key(keys[block_index], index)
                assert (pool.find(key) if block >= 0 else ~block) == (block if block >= 0 else swap.find(key))
