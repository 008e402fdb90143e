"""The tables of fields and the transcripts of docs/protocol.md."""

import json
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pipeline.client import protocol as p
from tools.export_protocol.samples import RESUMING, TRANSCRIPT
from tools.export_protocol.schema import is_json

NAMES = {int: "integer", str: "string", bool: "boolean", float: "float", bytes: "binary", type(None): "null"}


def with_tables(page: str) -> str:
    """The page with its tables of fields made anew."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{table(getattr(p, match[2]))}\n\n{match[3]}"

    page = re.sub(r"(<!-- fields of (\w+) -->).*?(<!-- end -->)", replaced, page, flags=re.DOTALL)
    for mark, messages in (("transcript", TRANSCRIPT), ("transcript of resuming", RESUMING)):
        begin, end = f"<!-- {mark} -->\n", "<!-- end -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n{transcript(messages)}\n\n{end}{rest.partition(end)[2]}"
    return page


def table(kind: Any) -> str:
    """A struct's fields in Markdown."""
    hints = get_type_hints(kind, include_extras=True)
    if not kind.__struct_config__.array_like:
        rows = ["| field | type | meaning |", "|---|---|---|"]
        for field in msgspec.structs.fields(kind):
            hint = hints[field.name]
            needed = " (required)" if field.required else ""
            rows.append(f"| {field.name}{needed} | {_type_words(hint, is_map=True)} | {_description(hint)} |")
        return "\n".join(rows)
    rows = ["| place | field | type | default | meaning |", "|---|---|---|---|---|"]
    tag = kind.__struct_config__.tag
    if tag is not None:
        rows.append(f'| 0 | kind | string | – | `"{tag}"` |')
    for index, field in enumerate(msgspec.structs.fields(kind), int(tag is not None)):
        default = "–"
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            default = f"`{shown(value)}`"
        words = _description(hints[field.name])
        rows.append(f"| {index} | {field.name} | {_type_words(hints[field.name])} | {default} | {words} |")
    return "\n".join(rows)


def _description(hint: Any) -> str:
    for one in (hint, *get_args(hint)):
        metas = [meta for meta in getattr(one, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
        if words := " ".join(meta.description for meta in metas if meta.description):
            return words
    return ""


def _type_words(hint: Any, *, is_map: bool = False) -> str:
    """A type. In a map, fields of any type may be null or missing, ranges are shown, and JSON is a text."""
    if is_map and is_json(hint):
        return "JSON text"
    if hasattr(hint, "__metadata__"):
        words = _type_words(hint.__origin__, is_map=is_map)
        bounds = " ".join(filter(None, map(_bounds, hint.__metadata__))) if is_map else ""
        return f"{words} {bounds}".rstrip()
    kinds = get_args(hint)
    match get_origin(hint):
        case origin if origin in (Union, types.UnionType):
            kinds = tuple(one for one in kinds if not (is_map and one is type(None)))
            return " or ".join(_type_words(one, is_map=is_map) for one in kinds)
        case origin if origin is list:
            return f"array of {_type_words(kinds[0], is_map=is_map)}"
        case origin if origin is dict:
            return f"map of {_type_words(kinds[0], is_map=is_map)} to {_type_words(kinds[1], is_map=is_map)}"
        case origin if origin is Literal:
            return " or ".join(f"`{json.dumps(one)}`" for one in kinds)
    return NAMES.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


def _bounds(meta: Any) -> str:
    limits = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
    found = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None and abs(limit) < 2**31]
    return f"({', '.join(found)})" if found else ""


def transcript(messages: Iterable[Any]) -> str:
    """Frames, one paragraph each, as a block of Markdown."""
    return "\n\n".join("\n".join(f"    {line}" for line in transcribed(message)) for message in messages)


def transcribed(message: Any) -> list[str]:
    """One frame: its direction, its bytes in lines that fit a page, and what they say."""
    data = msgspec.msgpack.encode(message)
    arrow = "client ──►" if isinstance(message, p.ClientMessage) else "◄── server"
    lines = [data[index : index + 36].hex() for index in range(0, len(data), 36)]
    return [f"{arrow}  {shown(msgspec.msgpack.decode(data))}", *(f"    {line}" for line in lines)]


def shown(value: Any) -> str:
    """A value in the notation of JSON, and binary as h'…'."""
    match value:
        case list():
            return f"[{', '.join(map(shown, value))}]"
        case dict():
            return f"{{{', '.join(f'{shown(name)}: {shown(one)}' for name, one in value.items())}}}"
        case bytes():
            return f"h'{value.hex()}'"
        case _:
            return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
