"""Settings written as a TOML file that explains itself and reads back as the same settings."""

import json
import textwrap
from typing import Any

import msgspec

from pipeline.config.keys import Key, Section, needs, sections, value_of
from pipeline.config.load import MODELS
from pipeline.config.models import ServerSettings
from pipeline.config.settings import Settings

WIDTH = 100


def as_toml(settings: Settings) -> str:
    """Every key with its value, above it what it is for, what it may be and what it is by default."""
    return "\n".join("\n".join(_table(table, settings)) for table in sections())


def server_as_toml(server: ServerSettings) -> str:
    """As `as_toml`. Of several models, behind what they share, each in a table with the keys in which it differs."""
    tables = [as_toml(server.shared)]
    for name, settings in server.models.items():
        for table in sections():
            values = [(key, value_of(settings, key)) for key in table.keys if key.dotted != "served_model_name"]
            lines = [
                f"{key.name} = {_value(value, key)}"
                for key, value in values
                if key.dotted == "model" or value != value_of(server.shared, key)
            ]
            if lines:
                section = f"{MODELS}.{_literal(name)}{f'.{table.name}' if table.name else ''}"
                tables.append("\n".join([f"[{section}]", *lines, ""]))
    return "\n".join(tables)


def _table(table: Section, settings: Settings) -> list[str]:
    lines = _comment(table.description)
    if table.name:
        lines.append(f"[{table.name}]")
    lines.append("")
    for key in table.keys:
        default = "not set" if key.default is None else _value(key.default, key)
        lines += _comment(key.description)
        lines += _comment(f"{_sentence(needs(key))}; by default {default}.")
        value = value_of(settings, key)
        lines += [f"# {key.name} is not set" if value is None else f"{key.name} = {_value(value, key)}", ""]
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _value(value: Any, key: Key) -> str:
    """The value; sizes that are whole MiB or KiB with their unit."""
    if key.is_size and isinstance(value, int):
        for unit, num_bytes in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if value and value % num_bytes == 0:
                return f'"{value // num_bytes}{unit}"'
    return _literal(value)


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(_literal(entry) for entry in value)}]"
        case dict():
            return "{" + ", ".join(f"{_literal(str(name))} = {_literal(entry)}" for name, entry in value.items()) + "}"
        case msgspec.Struct():  # an entry of a list of tables: what differs from its defaults
            return _literal({name: entry for name, entry in msgspec.structs.asdict(value).items() if entry})
        case _:
            raise TypeError(f"settings may not hold {value!r}")
