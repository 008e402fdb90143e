"""The arrays in a stage's messages: written to its own arena, read from the segments of others, and released."""

from typing import Any

import numpy as np

from pipeline.runtime.messages import Message, Release
from pipeline.shm.arena import Arena
from pipeline.shm.arrays import Array, ShmRef


class Arrays:
    """Arrays in and out of messages, for one process: its own arena, and everybody's segments to read from."""

    def __init__(self, memories: dict[str, memoryview], own: str) -> None:
        self._memories = memories
        self._arena = Arena(own, memories[own]) if own in memories else None
        self._read: dict[str, tuple[list[int], list[int]]] = {}

    @property
    def arena(self) -> Arena | None:
        return self._arena

    def put(self, array: "np.ndarray[Any, Any]", *, readers: int = 1) -> Array:
        """Hand an array over: inline or by reference, see `Arena.put`."""
        if self._arena is None or array.nbytes == 0:
            return array.tobytes()
        return self._arena.put(np.ascontiguousarray(array).data.cast("B"), readers=readers)

    def take(self, array: Array, dtype: Any) -> "np.ndarray[Any, Any]":
        """Copy an array out of a message and note its slab for release. Returns a one-dimensional, writable array."""
        if isinstance(array, bytes):
            return np.frombuffer(array, dtype).copy()
        data = self._memories[array.segment][array.offset : array.offset + array.length]
        assert len(data) == array.length, f"{array} reaches beyond its segment"
        result = np.frombuffer(data, dtype).copy()
        self.done(array)
        return result

    def done(self, array: Array) -> None:
        """Note that this process needs an array no more."""
        if isinstance(array, ShmRef):
            offsets, generations = self._read.setdefault(array.segment, ([], []))
            offsets.append(array.offset)
            generations.append(array.generation)

    def releases(self) -> list[tuple[str, Release]]:
        """What to send to each segment's owner, once per wake: (segment name, message) pairs."""
        read, self._read = self._read, {}
        return [(name, Release(offsets, generations)) for name, (offsets, generations) in read.items()]

    def not_released(self, name: str, release: Release) -> None:
        """A release could not be sent: note its slabs again, for the next time."""
        offsets, generations = self._read.setdefault(name, ([], []))
        offsets += release.offsets
        generations += release.generations

    def retract(self, array: Array) -> None:
        """Take back an array that was put for one reader into a message that was not sent."""
        if isinstance(array, ShmRef):
            assert self._arena is not None
            self._arena.release(array.offset, array.generation)

    def retract_all(self, message: Message) -> None:
        """Take back every array among the fields of a message that was not sent."""
        for field in message.__struct_fields__:
            self.retract(getattr(message, field))

    def released(self, release: Release) -> None:
        """A reader has released slabs of this process's arena."""
        assert self._arena is not None, "a release came to a stage without an arena"
        for offset, generation in zip(release.offsets, release.generations, strict=True):
            self._arena.release(offset, generation)
