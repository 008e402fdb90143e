"""The shared arrays of a message, in the order of its fields."""

from collections.abc import Iterator
from typing import Any

import msgspec

from pipeline.runtime.memories import Memories
from pipeline.shm.arrays import ShmRef


def refs(value: Any) -> Iterator[ShmRef]:
    """All references to shared memory in a message."""
    match value:
        case ShmRef():
            yield value
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from refs(getattr(value, name))
        case [msgspec.Struct(), *_]:
            for one in value:
                yield from refs(one)


def copies(message: Any, memories: Memories) -> list[bytes]:
    """The bytes of each reference."""
    return [bytes(memories.data_of(ref)) for ref in refs(message)]
