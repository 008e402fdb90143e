"""The shared arrays of a message, in the order of its fields."""

from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from pipeline.runtime.transport.memories import Memories
from pipeline.shm.arrays import ShmRef


def refs(value: Any) -> list[ShmRef]:
    """All references to shared memory in a message, or in another struct."""
    found: list[ShmRef] = []
    if type(value) is ShmRef:
        found.append(value)
    else:
        _collect(value, found)
    return found


def _collect(struct: Any, found: list[ShmRef]) -> None:
    for name in _names(type(struct)):
        value = getattr(struct, name)
        for one in value if type(value) is list else (value,):
            if type(one) is ShmRef:
                found.append(one)
            elif isinstance(one, msgspec.Struct):
                _collect(one, found)


_found: dict[type, tuple[str, ...]] = {}
"""What `_names` has found."""


def _names(kind: type) -> tuple[str, ...]:
    """The fields of a struct that may have references, by their types: to look at each value of each message would
    cost more than the rest of a recording."""
    if (known := _found.get(kind)) is not None:
        return known
    names: tuple[str, ...] = ()
    if issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        names = tuple(name for name in kind.__struct_fields__ if _may_refer(hints[name]))
    _found[kind] = names
    return names


def _may_refer(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType, list):
        return any(map(_may_refer, get_args(hint)))
    if not isinstance(hint, type):
        return False
    return issubclass(hint, ShmRef) or bool(_names(hint))


def copies(message: Any, memories: Memories) -> list[bytes]:
    """The bytes of each reference."""
    return [bytes(memories.data_of(ref)) for ref in refs(message)]
