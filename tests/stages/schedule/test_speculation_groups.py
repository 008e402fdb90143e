"""Speculation with KV groups, preemption, swap space and prefix hits at once: the ids are exact, and no block that
another sequence may find holds proposed ids."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.model.kv_groups import FULL, KVGroup
from tests.slices import part_of
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.test_histories import PROMPTS

GROUPS = ((FULL, KVGroup(20), KVGroup(20)), (FULL, KVGroup(33)), (FULL, FULL), (KVGroup(17),), (FULL,))
"""Windows that end in the middle of a block, at its end, and right behind it."""


def bench_of(groups: tuple[KVGroup, ...], num_blocks: int, depth: int, **changes: Any) -> Bench:
    limits = {
        "num_blocks": num_blocks * len(groups),
        "num_swap_blocks": 16 * len(groups),
        "max_model_len": 128,
        "max_num_seqs": 6,
        "kv_groups": groups,
        "num_speculative_tokens": 15,
        "max_num_drafts": 40,
        "adaptive_speculation": False,
    }
    return Bench(config(**limits | changes), depth)


def admit_all(bench: Bench, num_requests: int, max_tokens: int = 60) -> None:
    """Requests of which every third has the prompt of another one."""
    for number in range(num_requests):
        bench.admit([number % 3, *range(40)], max_tokens, n=1 + number % 2, seed=number % 4)


def turns(bench: Bench, num: int) -> None:
    for _ in range(num):
        bench.fill()
        bench.check()
        if bench.steps:
            bench.answer()
        bench.report()


def finish(bench: Bench) -> Counter[str]:
    """Run until all have finished, and check every id. Returns what happened."""
    while bench.scheduler.num_running or bench.scheduler.num_waiting or bench.scheduler.load().num_swapped:
        turns(bench, 1)
    bench.run()
    bench.check_outputs()
    load, counts = bench.scheduler.load(), bench.scheduler.speculation.counts()
    assert load.num_blocks_held == 0
    return Counter(
        preempted=load.num_preemptions,
        swapped=load.num_blocks_swapped_in,
        hits=load.num_cached_tokens,
        accepted=counts.num_accepted_tokens,
        rejected=counts.num_draft_tokens - counts.num_accepted_tokens,
    )


@pytest.mark.parametrize("groups", GROUPS)
def test_the_ids_are_exact_while_all_of_it_happens(groups: tuple[KVGroup, ...]) -> None:
    happened: Counter[str] = Counter()
    for depth in (1, 2, 3):
        # Enough for two or three sequences; a row whose positions all leave a window needs few blocks.
        num_blocks = 14 if FULL in groups else 4
        bench = bench_of(groups, num_blocks, depth, preemption="swap", max_num_batched_tokens=32)
        bench.plans_early = True
        admit_all(bench, num_requests=9)
        happened += finish(bench)
    assert all(happened[each] > 0 for each in ("preempted", "swapped", "hits", "accepted", "rejected")), happened


@settings(max_examples=part_of(40, 15), deadline=None)
@given(
    groups=st.sampled_from(GROUPS),
    num_blocks=st.integers(9, 30),
    depth=st.integers(1, 4),
    num_turns=st.integers(1, 60),
    skill=st.sampled_from([0.2, 0.7, 0.97]),
    has_executor=st.booleans(),
    preemption=st.sampled_from(["auto", "swap", "recompute"]),
    kv_offload=st.booleans(),
    plans_early=st.booleans(),
)
def test_what_a_scheduler_leaves_in_the_index_is_right(
    groups: tuple[KVGroup, ...],
    num_blocks: int,
    depth: int,
    num_turns: int,
    skill: float,
    has_executor: bool,
    preemption: str,
    kv_offload: bool,
    plans_early: bool,
) -> None:
    """Whenever it dies, its successor finds only blocks with the ids of their keys."""
    bench = bench_of(groups, num_blocks, depth, preemption=preemption, kv_offload=kv_offload)
    bench.executor.skill, bench.plans_early = skill, plans_early
    admit_all(bench, num_requests=6)
    turns(bench, num_turns)
    bench = bench.successor(has_executor=has_executor)
    admit_all(bench, num_requests=6)
    finish(bench)


@pytest.mark.parametrize("groups", GROUPS)
def test_proposals_take_no_block_that_a_row_may_need_next(groups: tuple[KVGroup, ...]) -> None:
    """With blocks for all rows without proposals, none is preempted with them either."""
    for num_blocks in (30, 24):
        bench = bench_of(groups, num_blocks, depth=2)
        for number in range(4):
            bench.admit([number, *range(40)], max_tokens=50)
        assert finish(bench)["preempted"] == 0


@pytest.mark.parametrize("groups", [groups for groups in GROUPS if any(group.window for group in groups)])
def test_rejected_ids_release_no_block_of_a_window(groups: tuple[KVGroup, ...]) -> None:
    """If all proposals are wrong, a row's blocks are those that its settled ids need, whatever was proposed."""
    held: list[list[int]] = []
    for most in (0, 15):
        bench = bench_of(groups, num_blocks=40, depth=1, num_speculative_tokens=most)
        bench.executor.skill = 0.0
        bench.admit(range(50), max_tokens=70)
        rows = bench.scheduler.rows
        firsts: dict[int, list[int]] = {}
        while len(rows) or not firsts:
            bench.fill()
            bench.check()
            firsts[int(rows.num_tokens[0])] = rows.block_firsts[:, 0].tolist()
            bench.answer()
            bench.report()
        bench.check_outputs()
        held.append([each for of_row in firsts.values() for each in of_row])
        assert bench.scheduler.speculation.counts().num_accepted_tokens == 0
        assert (bench.scheduler.speculation.counts().num_draft_tokens > 0) == (most > 0)
    assert held[0] == held[1]


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_speculation_changes_no_token(data: st.DataObject) -> None:
    load = data.draw(st.lists(st.tuples(PROMPTS, st.integers(1, 40), st.integers(1, 2)), min_size=1, max_size=8))
    depth = data.draw(st.integers(1, 3))
    outputs, num_steps = [], []
    for most in (0, 3, 15):
        limits = config(
            num_blocks=12,
            max_model_len=128,
            num_speculative_tokens=most,
            max_num_drafts=16,
            adaptive_speculation=False,
        )
        bench = Bench(limits, depth)
        for prompt, max_tokens, n in load:
            bench.admit(prompt, max_tokens, n)
        num_steps.append(bench.run())
        bench.check_outputs()
        outputs.append(bench.received)
        assert bench.scheduler.speculation.num_draft_tokens > 0 or most == 0 or max(each[1] for each in load) < 3
    assert all(other == outputs[0] for other in outputs)


def test_accepted_proposals_save_steps() -> None:
    num_steps = []
    for most in (0, 7):
        limits = config(num_speculative_tokens=most, max_num_drafts=16, adaptive_speculation=False)
        bench = Bench(limits, depth=1)
        bench.executor.skill = 0.97
        bench.admit(range(20), max_tokens=100)
        num_steps.append(bench.run())
        bench.check_outputs()
    assert num_steps[1] < num_steps[0] / 3
