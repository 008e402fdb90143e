"""Slots for recurrent states. The fake executor's slots hold the position and a hash of the absorbed ids. It asserts
that each entry starts where the state that it reads is, and that no other one reads or writes what it writes."""

import os
import random
from typing import Any

import pytest

from pipeline.runtime.messages import Finish
from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule.kv_cache.states.cuts import StateCut, cuts_of, next_in_output
from pipeline.stages.schedule.scheduler_config import SchedulerConfig, StateConfig
from tests.slices import part_of
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.kv_cache.runs import num_computed

STATES = StateConfig(num_slots=20, interval=128, decode_interval=64, min_interval=64)


def bench_with(depth: int = 1, states: StateConfig = STATES, **changes: Any) -> Bench:
    values: dict[str, Any] = {"num_blocks": 400, "max_model_len": 1024, "max_num_batched_tokens": 512}
    return Bench(config(**values | changes, states=states), depth)


def computed(bench: Bench, prompt: list[int], max_tokens: int = 1, **options: Any) -> int:
    """The positions that a request computes."""
    bench.admit(prompt, max_tokens=max_tokens, **options)
    return num_computed(bench)


def test_cuts_are_multiples_of_a_block_and_not_close_to_each_other() -> None:
    states = StateConfig(num_slots=2, interval=1024, min_interval=64)
    assert cuts_of(0, [999], [], states, 16) == [StateCut(992)]
    assert cuts_of(0, [50], [], states, 16) == [], "too close to the start"
    assert cuts_of(0, [2999, 700], [300, 340, 2970, 5000], states, 16) == [
        StateCut(288),
        StateCut(688),
        StateCut(1024, is_spare=True),
        StateCut(2048, is_spare=True),
        StateCut(2992),
    ]
    assert cuts_of(2000, [3000], [1990, 2050, 2070], states, 16) == [StateCut(2064), StateCut(2992)]
    assert next_in_output(1000, states) == StateCut(1152, is_spare=True)


def test_the_next_turn_of_a_chat_computes_what_is_new_and_less_than_a_block() -> None:
    bench = bench_with()
    prompt = list(range(300))
    assert computed(bench, prompt, max_tokens=20) == 319
    for turn in range(1, 4):
        prompt = prompt + list(range(500 + 100 * turn, 590 + 100 * turn))  # the output was dropped
        assert computed(bench, prompt, max_tokens=1) <= 90 + 16
    assert bench.scheduler.kv_cache_manager.states.num_hits == 3


def test_a_prefix_that_three_requests_share_is_found_by_the_third() -> None:
    bench = bench_with()
    prefix = list(range(200))
    nums = [computed(bench, prefix + list(range(300 + 100 * i, 390 + 100 * i))) for i in range(4)]
    assert nums == [290, 290 - 128, 290 - 192, 290 - 192], "first the regular snapshot, then that of the branch"
    assert bench.scheduler.kv_cache_manager.states.num_lost_tokens == 192 - 128


def test_marks_of_the_prompt_are_found_by_the_second_request() -> None:
    bench = bench_with(states=StateConfig(num_slots=20))
    assert computed(bench, list(range(300)), cut_positions=[300, 200]) == 300
    assert computed(bench, [*range(200), *range(600, 690)]) == 290 - 192


def test_parallel_samples_start_behind_the_prompt_of_the_first() -> None:
    bench = bench_with()
    assert computed(bench, list(range(300)), max_tokens=10, n=4) == 300 + 3 * (300 - 288) + 4 * 9


def test_of_the_output_only_the_newest_snapshot_is_kept() -> None:
    bench = bench_with()
    computed(bench, list(range(300)), max_tokens=300)
    states = bench.scheduler.kv_cache_manager.states
    assert states.num_snapshots == 2 + 4  # 128 and 288 of the prompt; 384, 448, 512 and 576 of the output
    assert states.pool.num_cached == 2 + 1


def test_spare_snapshots_are_evicted_first() -> None:
    bench = bench_with(states=StateConfig(num_slots=6, interval=128))
    computed(bench, list(range(300)))  # at 128, which is spare, and at 288
    first = bench.scheduler.kv_cache_manager.states
    for i in range(1, 5):
        computed(bench, list(range(1000 * i, 1000 * i + 100)))
    assert first.pool.num_evictions > 0
    assert computed(bench, [*range(288), 7]) == 289 - 288


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_sequence_goes_on_where_its_state_is(preemption: str) -> None:
    states = StateConfig(num_slots=9, num_swap_slots=8, decode_interval=64)
    bench = bench_with(states=states, num_blocks=40, num_swap_blocks=80, kv_offload=False, preemption=preemption)
    for i in range(4):
        bench.admit(range(100 * i, 100 * i + 100), max_tokens=120)
    num = num_computed(bench)
    load, counts = bench.scheduler.load(), bench.scheduler.kv_cache_manager.states
    assert load.num_preemptions > 0
    if preemption == "swap":
        assert counts.num_swapped_out == load.num_preemptions == counts.num_restored
        assert num == 4 * 219
    else:
        assert counts.num_swapped_out == 0
        assert 4 * 219 < num <= 4 * 219 + load.num_preemptions * (64 + 64 + 16)


def test_rows_are_fewer_than_slots() -> None:
    bench = bench_with(states=StateConfig(num_slots=3))
    for i in range(5):
        bench.admit(range(100 * i, 100 * i + 100), max_tokens=20)
    bench.fill()
    assert bench.scheduler.num_running == 2
    num_computed(bench)
    bench.admit(range(10), n=3, use_beam_search=True)
    assert "slots for the states of 2" in bench.refused[0].failure.message


def test_a_reset_of_the_prefix_cache_drops_snapshots() -> None:
    bench = bench_with()
    computed(bench, list(range(300)))
    bench.scheduler.reset_prefix_cache()
    assert bench.scheduler.kv_cache_manager.states.pool.num_cached == 0
    assert computed(bench, list(range(300))) == 300


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    bench = bench_with(prefix_caching=False)
    assert [computed(bench, list(range(300)), max_tokens=200) for _ in range(2)] == [499, 499]
    assert bench.scheduler.kv_cache_manager.states.num_snapshots == 0


def test_snapshots_in_swap_space_outlive_the_executor() -> None:
    states = StateConfig(num_slots=9, num_swap_slots=8)
    bench = bench_with(states=states, num_swap_blocks=200)
    computed(bench, list(range(300)), max_tokens=30)
    bench.lose_executor(0)
    assert computed(bench, list(range(300))) == 300 - 288
    assert bench.scheduler.kv_cache_manager.states.num_restored == 1
    assert computed(bench, list(range(300))) == 300 - 288
    assert bench.scheduler.kv_cache_manager.states.num_restored == 1, "the executor has it again"


@pytest.mark.parametrize("on_purpose", [True, False])
def test_a_successor_of_schedule_adopts_the_slots(on_purpose: bool) -> None:
    bench = bench_with()
    for i in range(3):
        bench.admit(range(100 * i, 100 * i + 100 + i), max_tokens=100)
    for _ in range(20):
        bench.fill()
        bench.answer()
        bench.report()
    outputs = [bench.received[seq] for seq in sorted(bench.received)]
    successor = bench.hand_over() if on_purpose else bench.successor()
    for i in range(3):
        successor.admit(range(100 * i, 100 * i + 100 + i), max_tokens=100, outputs=outputs[i], attempt=2)
    left = 3 * 100 - sum(map(len, outputs))
    assert num_computed(successor) == left if on_purpose else left + 3 * 16 < num_computed(successor) < left + 3 * 40


def test_speculation_and_a_single_slot_are_refused() -> None:
    with pytest.raises(ValueError, match="speculative decoding is not supported for models with recurrent layers"):
        config(states=STATES, num_speculative_tokens=3)
    with pytest.raises(ValueError, match="at least 2 state slots"):
        config(states=StateConfig(num_slots=1))


def test_steps_of_other_models_name_no_slots() -> None:
    bench = Bench(config(), 1)
    bench.admit(range(20))
    bench.fill()
    step = bench.steps[0]
    assert (step.state_reads, step.state_writes, step.state_copy_sources, step.state_copy_targets) == (b"",) * 4


def random_config(choice: random.Random) -> SchedulerConfig:
    groups = choice.choice([(FULL,), (FULL,), (FULL, KVGroup(32)), (KVGroup(20), KVGroup(20))])
    return config(
        num_blocks=choice.choice([14, 24, 60]) * len(groups),
        max_model_len=200,
        max_num_seqs=choice.choice([3, 6]),
        max_num_batched_tokens=choice.choice([24, 64, 200]),
        num_swap_blocks=choice.choice([0, 10, 60]) * len(groups),
        kv_offload=choice.random() < 0.6,
        preemption=choice.choice(["auto", "swap", "recompute"]),
        policy=choice.choice(["fcfs", "priority", "longest-prefix-match"]),
        num_stages=choice.choice([1, 1, 2]),
        kv_groups=groups,
        states=StateConfig(
            num_slots=choice.choice([3, 4, 7, 20]),
            num_swap_slots=choice.choice([0, 2, 12]),
            interval=choice.choice([32, 64]),
            decode_interval=16,
            min_interval=choice.choice([16, 32]),
        ),
    )


FOUND = [1044, 1127, 5085]
"""Histories in which a step only added a row, which found no slot, and in which a deferred prompt without a slot got
blocks that no step named."""


@pytest.mark.parametrize("seed", [*range(int(os.environ.get("PIPELINE_HISTORIES", part_of(25, 8)))), *FOUND])
def test_histories_with_restarts(seed: int) -> None:
    check_history(seed)


def check_history(seed: int) -> None:
    """Requests come, fork and are aborted, the prefix cache is emptied, the executor dies, and schedule is replaced, on
    purpose or not, with or without its executor."""
    choice = random.Random(seed)
    bench = Bench(random_config(choice), depth=choice.randint(1, 3))
    bench.plans_early = choice.random() < 0.5
    requests: dict[int, tuple[list[int], dict[str, Any]]] = {}
    attempts: dict[int, int] = {}
    for _ in range(150):
        action = choice.random()
        if action < 0.12 and len(requests) < 14:
            start = choice.choice([0, 0, 0, 300, 600])
            common = choice.randint(1, 120)
            prompt = [*range(start, start + common), *(choice.randrange(900) for _ in range(choice.randint(1, 30)))]
            if requests and choice.random() < 0.3:  # the next turn
                prompt = (choice.choice(list(requests.values()))[0] + prompt[-20:])[:150]
            how: dict[str, Any] = {
                "max_tokens": choice.randint(1, 50),
                "n": choice.choice([1, 1, 3]),
                "seed": choice.randint(0, 1),
            }
            how |= {"priority": choice.randint(0, 2)}
            cuts = [choice.randrange(len(prompt)) for _ in range(choice.choice([0, 1, 3]))]
            request_id = bench.admit(prompt, request_id=len(requests) + 1, cut_positions=cuts, **how)
            requests[request_id], attempts[request_id] = (prompt, how), 1
        elif action < 0.14 and requests:
            bench.abort(choice.choice(list(requests)))
        elif action < 0.16:
            keeps_swap = choice.random() < 0.7
            bench.lose_executor(choice.randint(0, len(bench.steps)), keeps_swap=keeps_swap, has_crashed=False)
        elif action < 0.17:
            bench.scheduler.reset_prefix_cache()
        elif action < 0.19 and bench.scheduler.config.num_stages == 1:
            bench = _replaced(bench, choice, requests, attempts)
        elif bench.steps:
            bench.answer()
        bench.fill()
        bench.report(sent=choice.random() < 0.8)
        bench.check()
    bench.run()
    bench.check_outputs()
    states = bench.scheduler.kv_cache_manager.states
    assert states.pool.num_held == 0
    assert states.swap.num_available == states.swap.num_total


def _replaced(
    bench: Bench, choice: random.Random, requests: dict[int, tuple[list[int], dict[str, Any]]], attempts: dict[int, int]
) -> Bench:
    successor = bench.hand_over() if choice.random() < 0.5 else bench.successor(has_executor=choice.random() < 0.6)
    successor.plans_early = bench.plans_early
    bench.check_outputs()
    received: dict[int, dict[int, tuple[list[int], bool]]] = {}
    for seq, opened in bench.opened.items():
        received.setdefault(opened.request_id, {})[opened.index] = bench.received[seq], seq in bench.finished
    for request_id, (prompt, how) in requests.items():
        parts = received.get(request_id, {})
        if how["n"] > 1 or not parts or any(is_finished for _, is_finished in parts.values()):
            continue  # these end with their scheduler
        attempts[request_id] += 1
        successor.admit(prompt, request_id=request_id, outputs=parts[0][0], attempt=attempts[request_id], **how)
    return successor


def test_the_end_of_a_sequence_in_swap_space_frees_its_slot() -> None:
    states = StateConfig(num_slots=9, num_swap_slots=8)
    bench = bench_with(states=states, num_blocks=40, num_swap_blocks=80, kv_offload=False, preemption="swap")
    for i in range(4):
        bench.admit(range(100 * i, 100 * i + 100), max_tokens=120)
    while not bench.scheduler.lifecycle.swapped:
        bench.fill()
        bench.answer()
        bench.report()
    swapped = bench.scheduler.lifecycle.swapped.first.request.request_id
    bench.abort(swapped)
    num_computed(bench)
    assert Finish.ABORT in bench.finished.values()
    assert bench.scheduler.kv_cache_manager.states.swap.num_free == 8
