"""A scheduler that is replaced on purpose leaves its successor the blocks that are filled in part, too."""

from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.runtime.model.kv_groups import FULL, KVGroup
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import inline
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.kv_cache.test_offload import finish, turn

NUM_STREAMS = 5
MAX_TOKENS = 60
LENGTHS = [30 + 7 * number for number in range(NUM_STREAMS)]
GROUPS = {"full": (FULL,), "windows": (FULL, KVGroup(32), KVGroup(32))}


def prompt(number: int) -> range:
    return range(number * 100, number * 100 + LENGTHS[number])


def begin(depth: int = 1, groups: str = "full", **changes: int) -> Bench:
    bench = Bench(streams_config(groups, **changes), depth)
    for number in range(NUM_STREAMS):
        bench.admit(prompt(number), max_tokens=MAX_TOKENS)
    return bench


def streams_config(groups: str, **changes: int) -> SchedulerConfig:
    return config(**{"num_blocks": 200, "max_num_batched_tokens": 64} | changes, kv_groups=GROUPS[groups])


def resume(bench: Bench, outputs: Sequence[Sequence[int]], attempt: int = 2) -> None:
    for number in range(NUM_STREAMS):
        bench.admit(prompt(number), max_tokens=MAX_TOKENS, outputs=outputs[number], attempt=attempt)


def outputs_of(bench: Bench) -> list[list[int]]:
    return [bench.received[seq] for seq in sorted(bench.received)]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("num_steps", range(25, 41, 3))
def test_the_successor_computes_no_position_again(num_steps: int, groups: str, depth: int) -> None:
    bench = begin(depth, groups)
    done = turn(bench, num_steps)
    done += sum(int(np.frombuffer(inline(step.counts), np.int32).sum()) for step in bench.steps)
    successor = bench.hand_over()
    resume(successor, outputs_of(bench))
    assert turn(successor, 1) == NUM_STREAMS
    left = finish(successor, NUM_STREAMS)
    assert done + NUM_STREAMS + left == sum(LENGTHS) + NUM_STREAMS * (MAX_TOKENS - 1)


def test_a_prompt_continues_where_it_was() -> None:
    bench = begin(max_num_batched_tokens=32)
    done = turn(bench, 3)
    assert done == 96, "in the middle of the third prompt"
    successor = bench.hand_over()
    resume(successor, outputs_of(bench))
    assert done + finish(successor, NUM_STREAMS) == sum(LENGTHS) + NUM_STREAMS * (MAX_TOKENS - 1)


def test_without_a_handover_the_block_is_computed_again() -> None:
    bench = begin()
    turn(bench, 30)
    successor = bench.successor()
    resume(successor, outputs_of(bench))
    assert turn(successor, 1) > NUM_STREAMS
    finish(successor, NUM_STREAMS)


@pytest.mark.parametrize("num_steps", range(1, 20, 4))
def test_a_successor_that_dies_leaves_only_what_is_right(num_steps: int) -> None:
    """It writes into the blocks that it has taken over."""
    bench = begin()
    turn(bench, 33)
    second = bench.hand_over()
    resume(second, outputs_of(bench))
    turn(second, num_steps)
    third = second.successor()
    resume(third, outputs_of(second), attempt=3)
    finish(third, NUM_STREAMS)


@pytest.mark.parametrize("num_lost", [1, 3, 20])
def test_a_client_that_has_less_gets_the_same_ids_again(num_lost: int) -> None:
    bench = begin()
    turn(bench, 40)
    successor = bench.hand_over()
    resume(successor, [ids[:-num_lost] for ids in outputs_of(bench)])
    finish(successor, NUM_STREAMS)


def test_other_requests_take_unused_blocks() -> None:
    bench = begin(num_blocks=40)
    turn(bench, 40)
    successor = bench.hand_over()
    for number in range(8):
        successor.admit(range(5000 + number * 500, 5200 + number * 500), max_tokens=50)
    turn(successor, 60)
    resume(successor, outputs_of(bench))
    finish(successor, 8 + NUM_STREAMS)


def test_sequences_of_equal_ids_do_not_share_a_block_that_they_write_to() -> None:
    bench = Bench(streams_config("full"), 1)
    for _ in range(3):
        bench.admit(range(40), max_tokens=MAX_TOKENS)
    turn(bench, 10)
    successor = bench.hand_over()
    for ids in outputs_of(bench):
        successor.admit(range(40), max_tokens=MAX_TOKENS, outputs=ids, attempt=2)
    finish(successor, 3)


def test_nothing_is_left_of_what_a_reset_of_the_prefix_cache_covers() -> None:
    bench = begin()
    turn(bench, 30)
    bench.scheduler.reset_prefix_cache()
    turn(bench, 3)
    successor = bench.hand_over()
    resume(successor, outputs_of(bench))
    assert finish(successor, NUM_STREAMS) > sum(LENGTHS)
