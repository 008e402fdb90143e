"""The shared-memory segments that a process has mapped."""

from pipeline.shm.arena import incarnation_of
from pipeline.shm.arrays import ShmRef

NUM_KEPT = 2
"""Segments of one writer that stay mapped between wakes."""


class Memories:
    """Segments by name. When the process that writes one has been restarted, the successor has a segment of its own.
    Those before stay mapped for messages that were received and are not read yet: all of them until `trim`, and the
    last one until the next restart."""

    def __init__(self) -> None:
        self._newest_first: dict[str, list[tuple[int, memoryview]]] = {}
        self._has_more = False
        """Whether a writer has more than `NUM_KEPT`."""

    def __contains__(self, name: object) -> bool:
        return name in self._newest_first

    def add(self, name: str, memory: memoryview, incarnation: int = 1) -> None:
        """Add the segment of this incarnation of its writer, newer than those before."""
        known = self._newest_first[name] = [(incarnation, memory), *self._newest_first.get(name, [])]
        self._has_more |= len(known) > NUM_KEPT

    def trim(self) -> None:
        """Forget the segments before the last one of each writer. Call it when all messages of a turn are handled."""
        if self._has_more:
            for known in self._newest_first.values():
                del known[NUM_KEPT:]
            self._has_more = False

    def remove(self, name: str) -> None:
        """The process that writes a segment is gone, and everything that it sent was handled."""
        self._newest_first.pop(name, None)

    def get(self, name: str) -> memoryview | None:
        """The newest segment of this name, or None."""
        found = self._newest_first.get(name)
        return found[0][1] if found else None

    def data_of(self, array: ShmRef) -> memoryview:
        """The bytes of an array."""
        known = self._newest_first[array.segment]
        memory = known[0][1]
        if len(known) > 1:
            memory = dict(known).get(incarnation_of(array), memory)
        data = memory[array.offset : array.offset + array.length]
        assert len(data) == array.length, f"{array} reaches beyond its segment"
        return data

    def clear(self) -> None:
        self._newest_first.clear()
