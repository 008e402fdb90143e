"""The version of what stages send to each other: a process of newly installed code refuses to join a server whose
messages it can't read."""

import hashlib
import types
from typing import Any, get_args, get_origin

import msgspec

from pipeline.runtime import messages as m

LAYOUTS = 1
"""Of arrays in shared memory, rings and black boxes, which have no types. Raise it when one of them changes."""
ROOTS: tuple[Any, ...] = (
    m.Envelope,
    m.Launch,
    m.SupervisorInbox,
    m.GatewayInbox,
    m.IngestInbox,
    m.ScheduleInbox,
    m.ExecuteInbox,
    m.DetokenizeInbox,
    m.HostInbox,
)


def wire_version() -> str:
    """A digest of the fields of all messages: their order, names and types. It takes some milliseconds."""
    lines: dict[str, str] = {}
    for root in ROOTS:
        _describe(root, lines)
    text = "\n".join([f"layouts {LAYOUTS}", *(f"{name}: {lines[name]}" for name in sorted(lines))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(one: Any, lines: dict[str, str]) -> str:
    """The name of a type. The fields of structs are added to `lines`."""
    if isinstance(one, type) and issubclass(one, msgspec.Struct):
        if one.__qualname__ not in lines:
            lines[one.__qualname__] = ""  # a struct may contain itself
            config = one.__struct_config__
            fields = ", ".join(
                f"{field.encode_name} {_describe(field.type, lines)}{'' if field.required else '?'}"
                for field in msgspec.structs.fields(one)
            )
            lines[one.__qualname__] = f"{config.tag} {config.array_like} {fields}"
        return one.__qualname__
    if args := get_args(one):
        origin = get_origin(one)
        name = "|" if origin is types.UnionType else getattr(origin, "__name__", str(origin))
        described = [_describe(arg, lines) for arg in args]
        return f"{name}[{', '.join(sorted(described) if name in ('|', 'Union') else described)}]"
    return getattr(one, "__name__", repr(one))
