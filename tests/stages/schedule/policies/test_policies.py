"""The order of each scheduling policy."""

import numpy as np
import pytest

from pipeline.stages.schedule.policies.policy import MAX_SKIPPED
from tests.stages.schedule.bench import Bench, config


def running(bench: Bench) -> set[int]:
    return {sequence.seq for sequence in bench.scheduler.rows.sequences if sequence is not None}


def test_fcfs_ignores_priorities() -> None:
    bench = Bench(config(max_num_seqs=1), depth=1)
    for priority in (5, 3, 1):
        bench.admit(range(10), max_tokens=3, priority=priority)
    bench.run()
    assert list(bench.finished) == [1, 2, 3]


def test_the_lowest_priority_value_goes_first_then_the_earliest_arrival() -> None:
    bench = Bench(config(max_num_seqs=1, policy="priority"), depth=1)
    for priority in (5, 3, -1, 3):
        bench.admit(range(10), max_tokens=3, priority=priority)
    bench.run()
    assert list(bench.finished) == [3, 2, 4, 1]
    bench.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("num_swap_blocks", [0, 20])
def test_a_lower_priority_value_preempts_for_a_row(depth: int, num_swap_blocks: int) -> None:
    bench = Bench(config(max_num_seqs=2, policy="priority", num_swap_blocks=num_swap_blocks), depth)
    bench.admit(range(20), max_tokens=30, priority=1)
    bench.admit(range(50, 70), max_tokens=30, priority=2)
    bench.fill()
    bench.answer()
    bench.admit(range(100, 110), max_tokens=3, priority=0)
    bench.fill()
    assert running(bench) == {1, 3}, "the highest priority value is preempted"
    bench.run()
    assert list(bench.finished) == [3, 1, 2]
    bench.check_outputs()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_lower_priority_value_preempts_as_many_as_it_needs_blocks_from(depth: int) -> None:
    bench = Bench(config(num_blocks=12, policy="priority", prefix_caching=False), depth)
    for number in range(3):
        bench.admit(range(number * 50, number * 50 + 40), max_tokens=20, priority=5)
    for _ in range(3):
        bench.fill()
        bench.answer()
    bench.admit(range(200, 280), max_tokens=8, priority=-5)
    bench.run()
    assert next(iter(bench.finished)) == 4
    assert bench.scheduler.load().num_preemptions == 2, "one of them may keep running"
    bench.check_outputs()


def test_no_row_is_preempted_for_a_sequence_that_would_still_not_fit() -> None:
    bench = Bench(config(num_blocks=12, policy="priority", prefix_caching=False), depth=1)
    bench.admit(range(100), max_tokens=8, priority=0)
    bench.admit(range(200, 220), max_tokens=8, priority=9)
    for _ in range(2):
        bench.fill()
        bench.answer()
    assert running(bench) == {1, 2}
    bench.admit(range(300, 380), max_tokens=8, priority=1)
    bench.fill()
    assert running(bench) == {1, 2}
    bench.run()
    assert bench.scheduler.load().num_preemptions == 0
    bench.check_outputs()


def test_the_longest_prefix_in_the_cache_starts_first() -> None:
    bench = Bench(config(max_num_seqs=1, policy="longest-prefix-match"), depth=1)
    bench.admit(range(100), max_tokens=2)
    bench.run()
    bench.admit(range(500, 600), max_tokens=2)
    bench.admit([*range(40), 7, 8, 9], max_tokens=2)
    bench.admit([*range(90), 7, 8, 9], max_tokens=2)
    bench.run()
    assert list(bench.finished) == [1, 4, 3, 2]
    bench.check_outputs()


def test_no_sequence_is_skipped_forever() -> None:
    bench = Bench(config(max_num_seqs=1, policy="longest-prefix-match"), depth=1)
    bench.admit(range(64), max_tokens=1)
    bench.run()
    bench.admit(range(500, 510), max_tokens=1)
    for _ in range(MAX_SKIPPED + 10):
        bench.admit(range(64), max_tokens=1)
    bench.run()
    assert list(bench.finished).index(2) == 1 + MAX_SKIPPED


def test_prompts_with_different_salts_share_nothing() -> None:
    bench = Bench(config(), depth=1)
    for salt in ("", "a", "b", "a"):
        before = bench.scheduler.load().num_cached_tokens
        bench.admit(range(64), max_tokens=2, salt=salt)
        bench.run()
        found = bench.scheduler.load().num_cached_tokens - before
    assert found == 48, "the last finds the blocks of its own salt"
    assert bench.scheduler.load().num_cached_tokens == 48, "the other salts have no prefix hits"


def test_a_reset_forgets_cached_and_held_blocks() -> None:
    bench = Bench(config(), depth=1)
    bench.admit(range(64), max_tokens=2)
    bench.run()
    bench.admit(range(100, 164), max_tokens=9)
    bench.fill()
    assert bench.scheduler.reset_prefix_cache() == 8, "four of each"
    bench.run()
    bench.admit(range(64), max_tokens=2)
    bench.admit(range(100, 164), max_tokens=2)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_cached_tokens == 0
    bench.scheduler.check()


def counts_of(bench: Bench) -> list[int]:
    counts = bench.steps[-1].counts
    assert isinstance(counts, bytes)
    return np.frombuffer(counts, np.int32).tolist()


def decoding(bench: Bench, num: int) -> None:
    """Let `num` sequences decode next to some short prompts, until the bench knows the cost of steps."""
    for number in range(num):
        bench.admit(range(number * 10, number * 10 + 9), max_tokens=500)
    for _ in range(40):
        bench.admit(range(900, 950), max_tokens=1)
        bench.fill()
        bench.answer()
        bench.report()
    while bench.scheduler.num_running > num or bench.scheduler.num_waiting:
        bench.fill()
        bench.answer()
        bench.report()
    assert bench.scheduler.num_running == num


def beside_decodes(num_decodes: int, **changes: object) -> list[int]:
    """Chunks of a long prompt next to `num_decodes` decoding rows. A step takes a millisecond, and one for each
    token."""
    values = {"num_blocks": 600, "max_model_len": 2048, "max_num_seqs": 20, "max_num_batched_tokens": 256}
    bench = Bench(config(**(values | {"prefix_caching": False} | changes)), depth=1)
    decoding(bench, num_decodes)
    bench.admit([number % 900 for number in range(1000)], max_tokens=2)
    chunks = []
    while sum(chunks) < 1000:
        bench.fill()
        *decodes, chunk = counts_of(bench)
        assert decodes == [1] * num_decodes, "every sequence continues"
        chunks.append(chunk)
        bench.answer()
    return chunks


def test_a_long_prompt_slows_a_step_by_at_most_the_limit() -> None:
    chunks = beside_decodes(15, long_prompt_tokens=100, long_prompt_max_slowdown=4.0)
    assert 32 <= np.mean(chunks) <= 64, "16 ms without it, so about 64 ms with it"
    assert max(chunks) <= 2 * 48


def test_a_long_prompt_progresses_with_any_slowdown_limit() -> None:
    assert beside_decodes(15, long_prompt_tokens=100, long_prompt_max_slowdown=1.1)[:-1] == [16] * 62


def test_a_short_prompt_takes_the_whole_budget() -> None:
    assert beside_decodes(15, long_prompt_tokens=1000, long_prompt_max_slowdown=1.1)[0] == 241


def test_a_time_budget_applies_to_every_prompt() -> None:
    chunks = beside_decodes(15, max_step_s=0.050)
    assert 22 <= np.mean(chunks) <= 38, "16 ms for the decoding rows, and 34 for the prompt"
    assert max(chunks) <= 2 * 34


def test_short_prompts_overtake_a_long_one_which_still_progresses() -> None:
    bench = Bench(
        config(
            num_blocks=600, max_model_len=2048, max_num_batched_tokens=64, prefix_caching=False,
            long_prompt_tokens=100, long_prompt_max_slowdown=1.5,
        ),
        depth=1,
    )  # fmt: skip
    decoding(bench, 2)
    bench.admit([number % 900 for number in range(1000)], max_tokens=2)
    bench.admit([number % 800 for number in range(1000)], max_tokens=2)
    bench.fill()
    bench.answer()
    short = [bench.admit(range(number, number + 50), max_tokens=1) for number in range(5)]
    for _ in range(5):
        bench.fill()
        assert 16 in counts_of(bench), "the long one"
        bench.answer()
        bench.report()
    ended = {bench.opened[seq].request_id for seq in bench.finished}
    assert len(ended.intersection(short)) >= 3
    bench.run()
    bench.check_outputs()


def test_a_long_prompt_alone_has_the_whole_budget() -> None:
    bench = Bench(
        config(num_blocks=100, max_model_len=1200, long_prompt_tokens=100, long_prompt_max_slowdown=1.1), depth=1
    )
    bench.admit([number % 900 for number in range(1000)], max_tokens=2)
    for _ in range(10):
        bench.fill()
        assert counts_of(bench) == [64]
        bench.answer()
