"""Arrays in a stage's messages: written to its own arena, read from other stages' segments, and released."""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from pipeline.runtime.messages import MediaItem, Message, Release
from pipeline.runtime.transport.memories import Memories
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import INLINE_BYTES, Array, ShmRef


class Arrays:
    """The arrays of one process: its own arena for writing, and the segments of all stages for reading."""

    def __init__(self, memories: Memories, own: str, incarnation: int = 1) -> None:
        """`own` is the name of this process."""
        self._memories = memories
        self._own = own
        memory = memories.get(own)
        self._arena = None if memory is None else Arena(own, memory, incarnation)
        self._read: dict[str, tuple[list[int], list[int]]] = {}
        self.remote: frozenset[str] = frozenset()
        """Processes on other hosts: arrays for them always travel inside the message."""

    @property
    def arena(self) -> Arena | None:
        return self._arena

    def put(self, array: "np.ndarray[Any, Any]", *, readers: Iterable[str]) -> Array:
        """Write an array for these processes; returns it inline or by reference, see `Arena.put`."""
        if self._arena is None or array.nbytes <= INLINE_BYTES or not self.remote.isdisjoint(readers):
            return array.tobytes()
        return self._arena.put(np.ascontiguousarray(array).data.cast("B"), readers=readers)

    def take(self, array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
        """The array of a message, one-dimensional. One in shared memory is copied, and its slab is marked for release.
        One inside the message is not copied, so it is read-only."""
        if isinstance(array, bytes):
            return np.frombuffer(array, dtype)
        result = np.frombuffer(self._memories.data_of(array), dtype).copy()
        self.done(array)
        return result

    def view(self, array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
        """Like `take`, but the array is not copied, and its slab not marked: it is valid until `done`."""
        return np.frombuffer(array if isinstance(array, bytes) else self._memories.data_of(array), dtype)

    def take_list(self, array: Array, code: Literal["B", "i", "Q"]) -> list[int]:
        """The numbers of a message's array, of this type by its code in module struct. Like `take`, without numpy,
        which costs more than it saves for the few numbers of a step."""
        if isinstance(array, bytes):
            return memoryview(array).cast(code).tolist()
        result = self._memories.data_of(array).cast(code).tolist()
        self.done(array)
        return result

    def done(self, array: Array) -> None:
        """Mark an array's slab for release: this process is done with it."""
        if isinstance(array, ShmRef):
            offsets, generations = self._read.setdefault(array.segment, ([], []))
            offsets.append(array.offset)
            generations.append(array.generation)

    def done_all(self, message: Message) -> None:
        """Mark every array of a message that is not needed."""
        for field in message.__struct_fields__:
            value = getattr(message, field)
            for array in value if isinstance(value, list) else (value,):
                self.done(array.pixels if isinstance(array, MediaItem) else array)

    def releases(self) -> list[tuple[str, Release]]:
        """The releases to send, once per turn: (owner's segment name, message) pairs."""
        if not self._read:
            return []
        read, self._read = self._read, {}
        return [(name, Release(offsets, generations, self._own)) for name, (offsets, generations) in read.items()]

    def not_released(self, name: str, release: Release) -> None:
        """Mark the slabs of a release again, because it could not be sent."""
        offsets, generations = self._read.setdefault(name, ([], []))
        offsets += release.offsets
        generations += release.generations

    def retract(self, array: Array) -> None:
        """Free an array whose message was not sent."""
        if isinstance(array, ShmRef):
            assert self._arena is not None
            self._arena.retract(array.offset, array.generation)

    def retract_all(self, message: Message) -> None:
        """Free every array of a message that was not sent."""
        for field in message.__struct_fields__:
            self.retract(getattr(message, field))

    def released(self, release: Release) -> None:
        """Handle a reader's release of slabs of this process's arena."""
        assert self._arena is not None, "a stage without an arena got a release"
        for offset, generation in zip(release.offsets, release.generations, strict=True):
            self._arena.release(offset, generation, release.reader)

    def lost(self, reader: str) -> None:
        """A process has died: free what it had not released, and forget what it was owed."""
        self._read.pop(reader, None)
        if self._arena is not None:
            self._arena.lost(reader)
