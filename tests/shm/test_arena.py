"""Properties of the arena, over random histories."""

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from pipeline.shm.arena import UNIT, Arena, incarnation_of
from pipeline.shm.arrays import INLINE_BYTES, ShmRef
from tests.slices import part_of

READERS = ("schedule.0", "gateway.0", "gateway.1")
NUM_BYTES = 16 * INLINE_BYTES + 40  # the last 40 bytes are no whole unit


def pattern(length: int, salt: int) -> bytes:
    return bytes((salt + i) % 251 for i in range(251)) * (length // 251) + bytes(
        (salt + i) % 251 for i in range(length % 251)
    )


class ArenaHistory(RuleBasedStateMachine):
    slabs = Bundle("slabs")

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(NUM_BYTES)
        self.arena = Arena("writer.0", memoryview(self.memory))
        self.live: dict[tuple[int, int], tuple[ShmRef, bytes]] = {}
        self.readers: dict[tuple[int, int], set[str]] = {}
        self.generations: set[int] = set()

    @rule(
        target=slabs,
        length=st.integers(INLINE_BYTES - 2, 4 * INLINE_BYTES),
        readers=st.sets(st.sampled_from(READERS), min_size=1),
        salt=st.integers(0, 250),
    )
    def put(self, length, readers, salt):
        data = pattern(length, salt)
        largest = self.largest_gap()
        num_full = self.arena.num_full
        array = self.arena.put(memoryview(data), readers=readers)
        if isinstance(array, bytes):
            assert array == data
            fits = length <= INLINE_BYTES
            assert fits or -(-length // UNIT) * UNIT > largest, "the arena had room for it"
            assert self.arena.num_full == num_full + (not fits)
            return None
        assert (array.segment, array.length) == ("writer.0", length)
        assert array.offset % UNIT == 0
        assert array.generation not in self.generations
        self.generations.add(array.generation)
        key = (array.offset, array.generation)
        self.live[key] = (array, data)
        self.readers[key] = set(readers)
        return key

    @rule(key=slabs, reader=st.sampled_from(READERS))
    def release(self, key, reader):
        expected = key in self.live and reader in self.readers[key]
        assert self.arena.release(key[0], key[1], reader) == expected if key is not None else True
        if expected:
            self.done(key, reader)

    def done(self, key, reader):
        self.readers[key].discard(reader)
        if not self.readers[key]:
            self.live.pop(key, None)

    @rule(reader=st.sampled_from(READERS))
    def a_reader_dies(self, reader):
        self.arena.lost(reader)
        for key in list(self.live):
            self.done(key, reader)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retract(self, data):
        key = data.draw(st.sampled_from(sorted(self.live)))
        self.arena.retract(*key)
        for reader in READERS:
            self.done(key, reader)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stale_release_changes_nothing(self, data):
        offset, generation = data.draw(st.sampled_from(sorted(self.live)))
        before = self.arena.num_bytes_free, self.arena.num_live
        for reader in READERS:
            assert not self.arena.release(offset, generation - 1, reader)
            assert not self.arena.release(offset + UNIT, generation, reader)
        assert not self.arena.release(offset, generation, "other.0")
        assert (self.arena.num_bytes_free, self.arena.num_live) == before

    def ranges(self):
        return sorted((ref.offset, ref.offset + -(-ref.length // UNIT) * UNIT) for ref, _ in self.live.values())

    def largest_gap(self):
        """The largest free range, with neighbours joined."""
        gaps, end = [], 0
        for begin, stop in self.ranges():
            gaps.append(begin - end)
            end = stop
        return max([*gaps, NUM_BYTES // UNIT * UNIT - end])

    @invariant()
    def no_slab_overlaps_another(self):
        ranges = self.ranges()
        assert all(stop <= begin for (_, stop), (begin, _) in pairwise(ranges))
        assert all(stop <= NUM_BYTES for _, stop in ranges)

    @invariant()
    def readers_see_what_was_put(self):
        for ref, data in self.live.values():
            assert self.memory[ref.offset : ref.offset + ref.length] == data

    @invariant()
    def counts_are_exact(self):
        held = sum(stop - begin for begin, stop in self.ranges())
        assert self.arena.num_bytes_free == NUM_BYTES // UNIT * UNIT - held
        assert self.arena.num_live == len(self.live)

    def teardown(self):
        for key, readers in self.readers.items():
            for reader in readers:
                assert self.arena.release(*key, reader)
        assert self.arena.num_bytes_free == NUM_BYTES // UNIT * UNIT
        assert self.arena.num_live == 0
        whole = self.arena.put(bytes(NUM_BYTES // UNIT * UNIT), readers=READERS)
        assert isinstance(whole, ShmRef), "free ranges were not joined"
        assert whole.offset == 0


ArenaHistory.TestCase.settings = settings(max_examples=part_of(60, 20), stateful_step_count=40, deadline=None)
TestArena = ArenaHistory.TestCase


def test_an_arena_smaller_than_a_unit_sends_everything_inline():
    arena = Arena("tiny.0", memoryview(bytearray(UNIT - 1)))
    assert arena.num_bytes_free == 0
    assert arena.put(bytes(INLINE_BYTES + 1), readers=READERS) == bytes(INLINE_BYTES + 1)
    assert arena.num_full == 1


def test_the_generations_of_a_successor_are_above_those_of_the_process_before():
    memory = memoryview(bytearray(NUM_BYTES))
    for incarnation in (1, 2, 7):
        array = Arena("writer.0", memory, incarnation).put(bytes(2 * INLINE_BYTES), readers=READERS)
        assert isinstance(array, ShmRef)
        assert incarnation_of(array) == incarnation
