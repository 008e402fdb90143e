"""The settings tree seen as a flat list of keys, read from the types themselves so that nothing is listed twice."""

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

from pipeline.config.settings import Settings


class Key(msgspec.Struct, frozen=True):
    """One setting: a leaf of the tree."""

    section: str
    """Dotted; empty at the top."""
    name: str
    annotation: Any
    """The field's, with its limits; what `msgspec.convert` takes."""
    type: inspect.Type
    """The same as `inspect` tells it, without the description."""
    description: str
    default: Any

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def is_size(self) -> bool:
        """Whether it counts bytes, so that texts such as "512MiB" are understood."""
        return self.name.endswith("_bytes")


class Section(msgspec.Struct, frozen=True):
    """A table of the tree, with the keys that stand in it directly."""

    name: str
    """Dotted; empty at the top."""
    description: str
    keys: tuple[Key, ...]


def unwrapped(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """A type without its metadata, and the description that the metadata held."""
    description = ""
    while isinstance(kind, inspect.Metadata):
        description = description or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return kind, description


@functools.cache
def sections(tree: type[msgspec.Struct] = Settings) -> tuple[Section, ...]:
    """All tables in the order of the tree, the top first. Each holds its keys before the tables in it."""
    return tuple(_sections(tree, ""))


def _sections(tree: type[msgspec.Struct], name: str) -> Iterator[Section]:
    keys: list[Key] = []
    below: list[tuple[type[msgspec.Struct], str]] = []
    for field in msgspec.structs.fields(tree):
        kind, description = unwrapped(inspect.type_info(field.type))
        if isinstance(kind, inspect.StructType):
            below.append((kind.cls, f"{name}.{field.name}" if name else field.name))
        else:
            default = field.default_factory() if callable(field.default_factory) else field.default
            keys.append(Key(name, field.name, field.type, kind, description, default))
    yield Section(name, (tree.__doc__ or "").strip(), tuple(keys))
    for inner, dotted in below:
        yield from _sections(inner, dotted)


def value_of(settings: msgspec.Struct, key: Key) -> Any:
    """A key's value in a tree of settings."""
    value: Any = settings
    for name in key.dotted.split("."):
        value = getattr(value, name)
    return value


# ------------------------------------------------------------------------------------------------- types in words


def needs(key: Key) -> str:
    """What a key's value must be, in words: `a whole number from 0 to 65535`."""
    words = _words(key.type)
    return f'{words}, or a size such as "512MiB"' if key.is_size else words


def _words(kind: inspect.Type) -> str:
    kind, _ = unwrapped(kind)
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.StrType():
            return "a text" + (" that is not empty" if kind.min_length else "")
        case inspect.LiteralType():
            return _either([_literal(value) for value in kind.values])
        case inspect.ListType() | inspect.VarTupleType():
            return f"a list, each entry {_words(kind.item_type)}"
        case inspect.StructType():
            return f"a table with {', '.join(field.name for field in kind.fields)}"
        case inspect.DictType():
            return f"a table, each value {_words(kind.value_type)}"
        case inspect.UnionType():
            return _either([_words(part) for part in kind.types if not isinstance(part, inspect.NoneType)])
        case _:
            raise TypeError(f"settings may not hold a {kind}")


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    limits = {"above": kind.gt, "at least": kind.ge, "below": kind.lt, "at most": kind.le}
    words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
    of = " of" if words.startswith("at") else ""
    return f"{of} {words}" if words else ""
