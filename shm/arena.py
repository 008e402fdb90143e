"""A slab arena: one writer passes arrays of any size to readers in other processes.

    free ──put──► published ──release × readers──► free

Only the writer changes states, and only the bytes are shared; its tables are private memory. The writer writes the
bytes, then sends the message that names them: the message publishes the slab, and readers never poll. Readers release
with messages. Every use of a slab has a new generation, so a late release is recognized and ignored. Readers are
counted, not named: each releases once.

Slabs are ranges in units of 64 bytes. Free ranges are sorted by offset and merged with their neighbours; `put` takes
the first fit. An array lives for one hop of a message, so the list of free ranges stays short.
"""

from bisect import bisect_left

from pipeline.shm.arrays import INLINE_BYTES, Array, ShmRef

UNIT = 64
"""Slabs are aligned to cache lines."""


class Arena:
    """The writer's side of a segment."""

    def __init__(self, segment: str, memory: memoryview) -> None:
        self._segment = segment
        self._memory = memory
        self._free: list[tuple[int, int]] = [(0, len(memory) // UNIT * UNIT)]
        self._live: dict[int, _Slab] = {}
        self._generation = 0
        self.num_bytes = len(memory) // UNIT * UNIT
        self.num_bytes_free = self.num_bytes
        self.num_full = 0
        """How often an array was sent inline because the arena was full."""

    @property
    def num_live(self) -> int:
        """Slabs that readers have not released yet."""
        return len(self._live)

    def put(self, data: bytes | memoryview, *, readers: int = 1) -> Array:
        """Publish `data`, bytes or a one-dimensional view of bytes. Returns bytes if `data` is small or the arena full,
        else a reference that each of `readers` processes must release once."""
        assert readers > 0
        length = len(data)
        if length <= INLINE_BYTES:
            return bytes(data)
        size = -(-length // UNIT) * UNIT
        place = next((i for i, (_, room) in enumerate(self._free) if room >= size), None)
        if place is None:
            self.num_full += 1
            return bytes(data)
        offset, room = self._free[place]
        if room == size:
            del self._free[place]
        else:
            self._free[place] = (offset + size, room - size)
        self.num_bytes_free -= size
        self._generation += 1
        self._live[offset] = _Slab(size, self._generation, readers)
        self._memory[offset : offset + length] = data
        return ShmRef(self._segment, offset, length, self._generation)

    def release(self, offset: int, generation: int) -> bool:
        """Count a reader's release of a slab. Returns whether the slab was live; a stale release changes nothing."""
        slab = self._live.get(offset)
        if slab is None or slab.generation != generation:
            return False
        slab.readers -= 1
        if slab.readers == 0:
            del self._live[offset]
            self._give_back(offset, slab.size)
        return True

    def _give_back(self, offset: int, size: int) -> None:
        self.num_bytes_free += size
        place = bisect_left(self._free, (offset, 0))
        if place < len(self._free) and offset + size == self._free[place][0]:
            size += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            offset, before = self._free[place - 1]
            self._free[place - 1] = (offset, before + size)
        else:
            self._free.insert(place, (offset, size))


class _Slab:
    __slots__ = ("generation", "readers", "size")

    def __init__(self, size: int, generation: int, readers: int) -> None:
        self.size = size
        self.generation = generation
        self.readers = readers
