"""A slab arena: one writer passes arrays of any size to readers in other processes.

    free ──put──► published ──each reader has released it, or died──► free

Only the writer changes states, and only the bytes are shared; its tables are private memory. The writer writes the
bytes, then sends the message that names them: the message publishes the slab, and readers never poll. Readers release
with messages. Every use of a slab has a new generation, so a late release is recognized and ignored. The generations
of a segment's writer begin at its incarnation << 32: a restarted writer never uses those of its predecessor.

Slabs are ranges in units of 64 bytes. Free ranges are sorted by offset and merged with their neighbours; `put` takes
the first fit. An array lives for one hop of a message, so the list of free ranges stays short.
"""

from bisect import bisect_left
from collections.abc import Iterable

from pipeline.shm.arrays import INLINE_BYTES, Array, ShmRef

UNIT = 64
"""Slabs are aligned to cache lines."""

INCARNATION_SHIFT = 32


def incarnation_of(array: ShmRef) -> int:
    """The incarnation of the process that wrote it."""
    return array.generation >> INCARNATION_SHIFT


class Arena:
    """The writer's side of a segment."""

    def __init__(self, segment: str, memory: memoryview, incarnation: int = 1) -> None:
        self._segment = segment
        self._memory = memory
        self._free: list[tuple[int, int]] = [(0, len(memory) // UNIT * UNIT)]
        self._live: dict[int, _Slab] = {}
        self._generation = incarnation << INCARNATION_SHIFT
        self.num_bytes = len(memory) // UNIT * UNIT
        self.num_bytes_free = self.num_bytes
        self.num_full = 0
        """How often an array was sent inline because the arena was full."""

    @property
    def num_live(self) -> int:
        """Slabs that readers have not released yet."""
        return len(self._live)

    def put(self, data: bytes | memoryview, *, readers: Iterable[str]) -> Array:
        """Publish `data`, bytes or a one-dimensional view of bytes. Returns bytes if `data` is small or the arena full,
        else a reference that each of `readers`, processes by name, must release once."""
        length = len(data)
        if length <= INLINE_BYTES:
            return bytes(data)
        size = -(-length // UNIT) * UNIT
        index = next((i for i, (_, room) in enumerate(self._free) if room >= size), None)
        if index is None:
            self.num_full += 1
            return bytes(data)
        offset, room = self._free[index]
        if room == size:
            del self._free[index]
        else:
            self._free[index] = (offset + size, room - size)
        self.num_bytes_free -= size
        self._generation += 1
        self._live[offset] = _Slab(size, self._generation, set(readers))
        self._memory[offset : offset + length] = data
        return ShmRef(self._segment, offset, length, self._generation)

    def release(self, offset: int, generation: int, reader: str) -> bool:
        """A reader releases a slab. Returns whether it had to; a stale release changes nothing."""
        slab = self._live.get(offset)
        if slab is None or slab.generation != generation or reader not in slab.readers:
            return False
        slab.readers.remove(reader)
        if not slab.readers:
            self._free_slab(offset)
        return True

    def lost(self, reader: str) -> None:
        """A reader has died: it releases nothing any more."""
        for offset, slab in list(self._live.items()):
            slab.readers.discard(reader)
            if not slab.readers:
                self._free_slab(offset)

    def retract(self, offset: int, generation: int) -> None:
        """Free a slab, because the message that names it was not sent."""
        slab = self._live.get(offset)
        assert slab is not None and slab.generation == generation, f"slab {offset} was freed before"
        self._free_slab(offset)

    def _free_slab(self, offset: int) -> None:
        self._give_back(offset, self._live.pop(offset).size)

    def _give_back(self, offset: int, size: int) -> None:
        self.num_bytes_free += size
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and offset + size == self._free[index][0]:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1]
            self._free[index - 1] = (offset, before + size)
        else:
            self._free.insert(index, (offset, size))


class _Slab:
    __slots__ = ("generation", "readers", "size")

    def __init__(self, size: int, generation: int, readers: set[str]) -> None:
        self.size = size
        self.generation = generation
        self.readers = readers
