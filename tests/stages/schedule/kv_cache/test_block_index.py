"""The successor of a scheduler finds the blocks of the KV cache."""

import pytest

from pipeline.stages.schedule.kv_cache.block_index import HEADER_BYTES, BlockIndex, unpacked
from pipeline.stages.schedule.kv_cache.block_pool import BlockPool
from pipeline.stages.schedule.kv_cache.prefix import KEY_BYTES
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.kv_cache.test_offload import LENGTH, MAX_TOKENS, NUM_STREAMS, admit, finish, turn

KEYS = [bytes([number + 1]) * KEY_BYTES for number in range(9)]


def blocks_of(index: BlockIndex) -> dict[int, bytes]:
    return dict(unpacked(index.entries()))


class TestIndex:
    def test_entries_are_those_that_were_set(self) -> None:
        memory = memoryview(bytearray(HEADER_BYTES + KEY_BYTES * 5))
        index = BlockIndex(memory, 5)
        for block in range(5):
            index.set(block, KEYS[block])
        index.clear(3)
        assert blocks_of(BlockIndex(memory, 5)) == {block: KEYS[block] for block in (0, 1, 2, 4)}
        index.clear_all()
        assert index.entries() == b"" and not any(memory)

    def test_blocks_beyond_its_end_are_not_stored(self) -> None:
        index = BlockIndex(memoryview(bytearray(HEADER_BYTES + KEY_BYTES * 2 + 3)), 9)
        for block in range(9):
            index.set(block, KEYS[block])
        index.clear(8)
        assert list(blocks_of(index)) == [0, 1]

    def test_without_memory_it_is_empty(self) -> None:
        index = BlockIndex(None, 9)
        index.set(0, KEYS[0])
        index.clear(0)
        index.clear_all(2)
        assert index.entries() == b""

    def test_keys_of_another_owner_are_cleared(self) -> None:
        memory = memoryview(bytearray(HEADER_BYTES + KEY_BYTES * 5))
        BlockIndex(memory, 5, owner=1).set(2, KEYS[2])
        assert list(blocks_of(BlockIndex(memory, 5, owner=1))) == [2]
        assert not blocks_of(BlockIndex(memory, 5, owner=2))
        BlockIndex(memory, 5, owner=2).set(3, KEYS[3])
        assert not blocks_of(BlockIndex(memory, 5, owner=2, keeps=False))


class TestPool:
    """Which keys of a pool are in its index."""

    def pool(self) -> tuple[BlockPool, BlockIndex]:
        index = BlockIndex(memoryview(bytearray(HEADER_BYTES + KEY_BYTES * 3)), 3)
        return BlockPool(3, index), index

    def test_a_key_is_stored_when_its_step_is_settled(self) -> None:
        pool, index = self.pool()
        blocks = [pool.take() for _ in range(3)]
        for step_id, block in enumerate(blocks):
            pool.register(block, KEYS[block], step_id)
        for step_id in range(3):
            pool.settle(step_id)
            assert blocks_of(index) == {block: KEYS[block] for block in blocks[: step_id + 1]}

    def test_a_key_is_cleared_before_the_block_gets_other_content(self) -> None:
        pool, index = self.pool()
        blocks = [pool.take() for _ in range(3)]
        for block in blocks:
            pool.register(block, KEYS[block], 1)
        pool.settle(1)
        pool.release(blocks)
        assert len(blocks_of(index)) == 3, "cached"
        assert pool.take() == blocks[0]
        assert set(blocks_of(index)) == set(blocks[1:])
        pool.forget(blocks[1])
        assert set(blocks_of(index)) == {blocks[2]}
        pool.forget_all()
        assert not blocks_of(index)

    def test_a_block_that_was_evicted_before_its_step_was_settled_has_only_its_new_key(self) -> None:
        pool, index = self.pool()
        block = pool.take()
        pool.register(block, KEYS[0], 1)
        pool.release([block])
        others = [pool.take(), pool.take()]
        assert pool.take() == block
        pool.settle(1)
        assert not blocks_of(index)
        pool.register(block, KEYS[0], 2)
        pool.settle(1)
        assert not blocks_of(index), "it is written again"
        pool.settle(2)
        assert blocks_of(index) == {block: KEYS[0]} and others

    def test_of_two_entries_with_a_key_one_is_adopted(self) -> None:
        pool, index = self.pool()
        for block in (0, 1):
            index.set(block, KEYS[5])
        pool.adopt(blocks_of(index))
        assert len(blocks_of(index)) == pool.num_cached == 1
        pool.check()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_successor_of_a_scheduler_computes_only_what_is_not_in_full_blocks(depth: int) -> None:
    bench = Bench(config(), depth)
    admit(bench)
    turn(bench, 40)
    bench = bench.successor()
    admit(bench)
    assert finish(bench) == NUM_STREAMS * (LENGTH + MAX_TOKENS - 1 - 48)


def test_nothing_of_an_executor_that_died_too_is_used() -> None:
    bench = Bench(config(), 2)
    admit(bench)
    turn(bench, 40)
    bench = bench.successor(has_executor=False)
    admit(bench)
    assert finish(bench) == NUM_STREAMS * (LENGTH + MAX_TOKENS - 1)


def test_a_scheduler_that_outlives_an_executor_and_dies_leaves_the_blocks_of_the_last_one() -> None:
    bench = Bench(config(), 2)
    admit(bench)
    turn(bench, 40)
    bench.lose_executor(1)
    assert not any(bench.indices[0][HEADER_BYTES:])
    turn(bench, 10)
    bench = bench.successor()
    admit(bench)
    assert finish(bench) == NUM_STREAMS * (LENGTH + MAX_TOKENS - 1 - 48)


@pytest.mark.parametrize("num_blocks", [14, 20, 64])
def test_a_block_that_gets_other_content_is_not_found(num_blocks: int) -> None:
    """Sequences take blocks of each other all the time."""
    for num_steps in range(1, 56, 7):
        bench = Bench(config(num_blocks=num_blocks), 3)
        admit(bench)
        turn(bench, num_steps)
        bench.fill()
        bench = bench.successor()
        admit(bench)
        finish(bench)


def test_without_prefix_caching_nothing_is_found() -> None:
    bench = Bench(config(), 1)
    admit(bench)
    turn(bench, 20)
    assert any(bench.indices[0][HEADER_BYTES:])
    Bench._scheduler(bench, config(prefix_caching=False))
    assert not any(bench.indices[0][HEADER_BYTES:]), "its blocks get other content"
