"""Arrays in a stage's messages: written to its own arena, read from other stages' segments, and released."""

from typing import Any, Literal

import numpy as np

from pipeline.runtime.messages import Message, Release
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import INLINE_BYTES, Array, ShmRef


class Arrays:
    """The arrays of one process: its own arena for writing, and the segments of all stages for reading."""

    def __init__(self, memories: dict[str, memoryview], own: str) -> None:
        self._memories = memories
        self._arena = Arena(own, memories[own]) if own in memories else None
        self._read: dict[str, tuple[list[int], list[int]]] = {}

    @property
    def arena(self) -> Arena | None:
        return self._arena

    def put(self, array: "np.ndarray[Any, Any]", *, readers: int = 1) -> Array:
        """Write an array for `readers` readers; returns it inline or by reference, see `Arena.put`."""
        if self._arena is None or array.nbytes <= INLINE_BYTES:
            return array.tobytes()
        return self._arena.put(np.ascontiguousarray(array).data.cast("B"), readers=readers)

    def take(self, array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
        """The array of a message, one-dimensional. One in shared memory is copied, and its slab is marked for release.
        One inside the message is not copied, so it is read-only."""
        if isinstance(array, bytes):
            return np.frombuffer(array, dtype)
        result = np.frombuffer(self._data_of(array), dtype).copy()
        self.done(array)
        return result

    def take_list(self, array: Array, code: Literal["B", "i", "Q"]) -> list[int]:
        """The numbers of a message's array, of this type by its code in module struct. Like `take`, without numpy,
        which costs more than it saves for the few numbers of a step."""
        if isinstance(array, bytes):
            return memoryview(array).cast(code).tolist()
        result = self._data_of(array).cast(code).tolist()
        self.done(array)
        return result

    def _data_of(self, array: ShmRef) -> memoryview:
        data = self._memories[array.segment][array.offset : array.offset + array.length]
        assert len(data) == array.length, f"{array} reaches beyond its segment"
        return data

    def done(self, array: Array) -> None:
        """Mark an array's slab for release: this process is done with it."""
        if isinstance(array, ShmRef):
            offsets, generations = self._read.setdefault(array.segment, ([], []))
            offsets.append(array.offset)
            generations.append(array.generation)

    def releases(self) -> list[tuple[str, Release]]:
        """The releases to send, once per wake: (owner's segment name, message) pairs."""
        read, self._read = self._read, {}
        return [(name, Release(offsets, generations)) for name, (offsets, generations) in read.items()]

    def not_released(self, name: str, release: Release) -> None:
        """Mark the slabs of a release again, because it could not be sent."""
        offsets, generations = self._read.setdefault(name, ([], []))
        offsets += release.offsets
        generations += release.generations

    def retract(self, array: Array) -> None:
        """Free an array that was written for one reader, because its message was not sent."""
        if isinstance(array, ShmRef):
            assert self._arena is not None
            self._arena.release(array.offset, array.generation)

    def retract_all(self, message: Message) -> None:
        """Free every array of a message that was not sent."""
        for field in message.__struct_fields__:
            self.retract(getattr(message, field))

    def released(self, release: Release) -> None:
        """Handle a reader's release of slabs of this process's arena."""
        assert self._arena is not None, "a stage without an arena got a release"
        for offset, generation in zip(release.offsets, release.generations, strict=True):
            self._arena.release(offset, generation)
