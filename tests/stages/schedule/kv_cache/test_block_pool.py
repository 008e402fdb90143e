"""The pool allocates each block to one holder at a time, and loses none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from tests.slices import part_of


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_block_without_a_key_is_free_when_released() -> None:
    pool = BlockPool(2)
    block = pool.take()
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 1)
    pool.release([block])
    assert (pool.num_free, pool.num_cached, pool.num_held) == (2, 0, 0)


def test_a_block_with_a_key_is_cached_when_released_and_can_be_found() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.register(block, key(1))
    pool.release([block])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    assert pool.find(key(1)) == block
    pool.hold(block)
    assert (pool.num_cached, pool.num_held) == (0, 1)


def test_a_shared_block_is_held_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.hold(block)
    pool.release([block])
    assert pool.num_held == 1
    pool.release([block])
    assert pool.num_free == 1


def test_free_blocks_are_taken_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    cached = pool.take()
    pool.register(cached, key(1))
    pool.release([cached])
    assert {pool.take(), pool.take()}.isdisjoint({cached})
    assert pool.take() == cached
    assert pool.find(key(1)) is None, "an evicted block is not found"


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    table = [pool.take() for _ in range(3)]
    for index, block in enumerate(table):
        pool.register(block, key(index))
    pool.release(reversed(table))
    assert [pool.take() for _ in range(3)] == table[::-1]


def test_of_two_equal_blocks_the_first_keeps_the_key() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.register(first, key(1))
    pool.register(second, key(1))
    assert pool.find(key(1)) == first
    pool.release([second, first])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.check()


def test_retired_blocks_are_freed_only_when_their_step_is_settled() -> None:
    pool = BlockPool(4)
    one, two = pool.take(), pool.take()
    pool.retire([one], step_id=3)
    pool.retire([two], step_id=4)
    pool.settle(2)
    assert (pool.num_free, pool.num_retired) == (2, 2)
    pool.settle(3)
    assert (pool.num_free, pool.num_retired) == (3, 1)
    pool.settle(9)
    assert (pool.num_free, pool.num_retired) == (4, 0)


def test_releasing_twice_fails_an_assertion() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


@settings(max_examples=part_of(100, 25), deadline=None)
@given(st.data())
def test_any_history_keeps_every_block_in_exactly_one_state(data: st.DataObject) -> None:
    pool = BlockPool(data.draw(st.integers(1, 8)))
    held: list[int] = []
    step = 0
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["take", "hold", "register", "release", "retire", "settle"])):
            case "take" if pool.num_available:
                held.append(pool.take())
            case "hold":
                block = pool.find(key(data.draw(st.integers(0, 5))))
                if block is not None:
                    pool.hold(block)
                    held.append(block)
            case "register" if held:
                pool.register(data.draw(st.sampled_from(held)), key(data.draw(st.integers(0, 5))))
            case "release" if held:
                block = data.draw(st.sampled_from(held))
                held.remove(block)
                pool.release([block])
            case "retire" if held:
                block = data.draw(st.sampled_from(held))
                held.remove(block)
                step += 1
                pool.retire([block], step)
            case "settle":
                pool.settle(data.draw(st.integers(0, step)))
        pool.check()
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_total
    pool.settle(step)
    pool.release(held)
    assert pool.num_held == 0


def test_keys_are_equal_exactly_if_all_earlier_ids_are() -> None:
    ids = np.arange(64, dtype=np.int32)
    other = ids.copy()
    other[20] += 1
    keys: list[bytes] = []
    prefix.extend(keys, ids, 4, 16)
    changed: list[bytes] = []
    prefix.extend(changed, other, 4, 16)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, False, False, False]


def test_keys_computed_in_pieces_are_the_same() -> None:
    ids = np.arange(80, dtype=np.int32)
    whole: list[bytes] = []
    prefix.extend(whole, ids, 5, 16)
    pieces: list[bytes] = []
    for num_blocks in (1, 1, 3, 5):
        prefix.extend(pieces, ids, num_blocks, 16)
    assert pieces == whole
    prefix.extend(pieces, ids, 2, 16)
    assert pieces == whole, "keys are never dropped"
