"""Preemption when KV blocks run out: the choice of the sequence, the mode, and its unchanged output."""

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.scheduler_config import PreemptionMode, SchedulerConfig
from tests.stages.schedule.bench import Bench, config

SLOW_COPY_S = 10.0


def short_of_memory(preemption: PreemptionMode, num_swap_blocks: int = 40, **changes: object) -> SchedulerConfig:
    """Ten blocks; each of the four sequences of `crowd` needs seven in the end."""
    values = {"num_blocks": 10, "max_num_seqs": 4, "max_model_len": 160, "prefix_caching": False}
    return config(**(values | {"preemption": preemption, "num_swap_blocks": num_swap_blocks} | changes))


def crowd(bench: Bench, num: int = 4) -> None:
    for number in range(num):
        bench.admit(range(number * 50, number * 50 + 20), max_tokens=90)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_sequences_resume_with_the_same_ids_and_nothing_is_recomputed(depth: int, caching: bool) -> None:
    bench = Bench(short_of_memory("swap", prefix_caching=caching), depth)
    crowd(bench)
    num_tokens = 0
    bench.fill()
    while bench.steps:
        num_tokens += int(np.frombuffer(bench.steps[0].counts, np.int32).sum())  # type: ignore[arg-type]
        bench.answer()
        bench.fill()
        bench.report()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_preemptions > 0
    assert 0 < load.num_blocks_swapped_in <= load.num_blocks_swapped_out + load.num_blocks_offloaded
    assert caching or load.num_blocks_swapped_in == load.num_blocks_swapped_out
    assert len(bench.finished) == 4
    # Each computes its prompt and all outputs except the last. A resumed one also computes its last id again, and at
    # greater depths what was sampled for it without use.
    assert num_tokens <= 4 * (20 + 89) + load.num_preemptions * depth
    assert (load.num_blocks_held, load.num_swapped) == (0, 0)
    assert load.num_swap_blocks_free == load.num_swap_blocks_total == 40


def test_recompute_never_copies() -> None:
    bench = Bench(short_of_memory("recompute"), depth=1)
    crowd(bench)
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_preemptions > 0
    assert (load.num_blocks_swapped_out, bench.executor.num_copies) == (0, 0)


def test_auto_swaps_if_copies_are_cheap() -> None:
    bench = Bench(short_of_memory("auto"), depth=1, copy_s=0.0001)
    crowd(bench)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_swapped_out > 10


def test_auto_recomputes_after_measuring_slow_copies() -> None:
    bench = Bench(short_of_memory("auto"), depth=1, copy_s=SLOW_COPY_S)
    crowd(bench)
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_preemptions > 1
    assert 0 < load.num_blocks_swapped_out < 10, "the first one measures the cost"


def test_a_sequence_is_recomputed_if_swap_space_is_full() -> None:
    bench = Bench(short_of_memory("swap", num_swap_blocks=1), depth=2)
    crowd(bench)
    bench.run()
    bench.check_outputs()
    load = bench.scheduler.load()
    assert load.num_preemptions > 0
    assert load.num_blocks_swapped_out <= load.num_preemptions


def test_swapped_sequences_resume_before_new_ones_start() -> None:
    bench = Bench(short_of_memory("swap"), depth=1)
    crowd(bench, 3)
    while bench.scheduler.load().num_swapped == 0:
        bench.fill()
        bench.answer()
    bench.admit(range(500, 504), max_tokens=2)
    late = 4
    while bench.scheduler.load().num_swapped:
        assert not bench.received.get(late), "it would have fitted, but earlier ones were waiting"
        bench.answer() if bench.steps else None
        bench.fill()
        bench.report()
    bench.run()
    bench.check_outputs()


@pytest.mark.parametrize("num_swap_blocks", [9, 22])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_recomputed_sequence_resumes_before_later_swapped_ones(num_swap_blocks: int, depth: int) -> None:
    """Swap space has room for some of them."""
    chosen = short_of_memory("auto", num_swap_blocks, num_blocks=32, max_num_seqs=12, max_model_len=256)
    bench = Bench(chosen, depth)
    for number in range(12):
        bench.admit(range(number * 50, number * 50 + 62), max_tokens=150)
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_swapped_out > 0
    assert list(bench.finished) == sorted(bench.finished), "equal requests end in order of arrival"


def test_the_cheapest_to_resume_is_preempted_but_never_the_first() -> None:
    bench = Bench(config(num_blocks=12, max_num_seqs=4, prefix_caching=False, max_num_batched_tokens=256), depth=1)
    bench.admit(range(60), max_tokens=30)  # needs a fifth block after the others have taken the last two
    bench.admit(range(100, 115), max_tokens=60)
    bench.admit(range(200, 279), max_tokens=30)
    while bench.scheduler.load().num_preemptions == 0:
        bench.fill()
        bench.answer()
    running = {sequence.seq for sequence in bench.scheduler.rows.sequences if sequence is not None}
    assert running == {1, 3}, "the second has the least to recompute, although the third arrived later"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_held == 0


def test_aborting_a_swapped_sequence_frees_its_swap_blocks() -> None:
    bench = Bench(short_of_memory("swap"), depth=2)
    crowd(bench)
    while bench.scheduler.load().num_swapped == 0:
        bench.fill()
        bench.answer()
    for request in list(bench.scheduler.requests):
        bench.scheduler.abort(m.Abort(request, 1))
    assert bench.scheduler.load().num_swapped == 0
    while bench.steps:
        bench.answer()
    bench.report()
    load = bench.scheduler.load()
    assert load.num_swap_blocks_free == load.num_swap_blocks_total
    assert set(bench.finished.values()) == {Finish.ABORT}
    bench.scheduler.check()


def test_a_half_computed_prompt_is_swapped_and_continues_where_it_was() -> None:
    bench = Bench(
        config(
            num_blocks=12,
            max_num_batched_tokens=17,
            prefix_caching=False,
            preemption="swap",
            num_swap_blocks=20,
            policy="priority",
        ),
        depth=1,
    )
    bench.admit(range(150), max_tokens=4, priority=1)
    for _ in range(5):
        bench.fill()
        bench.answer()
    bench.admit(range(300, 340), max_tokens=4, priority=0)
    bench.fill()
    assert bench.scheduler.load().num_swapped == 1
    assert bench.scheduler.load().num_blocks_swapped_out == 6, "85 positions were computed"
    bench.run()
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_swapped_in == 6
