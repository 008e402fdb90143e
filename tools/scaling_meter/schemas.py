"""Cases for what walks the schemas of tools: the types of parameters, and the grammars of required calls.

Schemas that a grammar is made of are at most `limits.max_grammar_bytes` long; types are read of all others, too.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pipeline.config.settings import ChatSettings, LimitSettings
from pipeline.grammars import source
from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS, ChatFormats, SchemasTooLarge
from pipeline.text.formats.grammar.lark import AddedToken
from pipeline.text.formats.grammar.schema_types import _types_of_properties
from tools.scaling_meter.case import Case
from tools.scaling_meter.texts import DEPTH, Grow

MAX_GRAMMAR = LimitSettings().max_grammar_bytes
MAX_TYPED = 256 * 1024
"""A template writes schemas into the prompt, so that longer ones don't fit."""
MAX_DIGITS = 4300
"""A body with a longer number is invalid."""
HELPER_MS = 500.0
"""In a process of its own, which has one second"""
RESERVED = 256
"""Special tokens that a vocabulary reserves"""


def cases() -> Iterator[Case]:
    for name, grow in SCHEMAS.items():
        yield Case("types of parameters", name, functools.partial(_types, grow), MAX_TYPED, first_n=64)
        yield Case("grammar checker", name, functools.partial(_fitted, grow), MAX_GRAMMAR, HELPER_MS, first_n=64)
    for form in (*TOOL_FORMATS, GENERIC):
        added = [AddedToken(i, mark, special=True) for i, mark in enumerate(form.marks)]
        added += [AddedToken(1000 + i, f"<|reserved_special_token_{i}|>", special=True) for i in range(RESERVED)]
        formats = ChatFormats.of("x", ChatSettings(tool_call_parser=form.name), added)  # type: ignore[arg-type]
        for name, grow in SCHEMAS.items():
            for strict in (False, True):
                kind = "strict" if strict else "required"
                make = functools.partial(_calls, formats, grow, strict)
                yield Case(f"grammar of {form.name}", f"{kind}: {name}", make, MAX_GRAMMAR, first_n=64)


def _types(grow: Grow, n: int) -> Callable[[], object]:
    schema = grow(n)
    return lambda: _types_of_properties(schema)


def _fitted(grow: Grow, n: int) -> Callable[[], object]:
    """What the process that checks grammars does before the library."""
    text = grow(n)

    def work() -> None:
        with contextlib.suppress(source.InvalidGrammar):
            source.to_llguidance("closed_schema", text, None)  # type: ignore[arg-type]

    return work


def _calls(formats: ChatFormats, grow: Grow, strict: bool, n: int) -> Callable[[], object]:
    function = {"name": "f", "strict": strict, "parameters": msgspec.Raw(grow(n).encode())}
    tools = msgspec.json.encode([{"type": "function", "function": function}]).decode()

    def work() -> None:
        try:
            if strict:
                formats.strict_calls(tools, parallel=True, max_bytes=MAX_GRAMMAR)
            else:
                formats.calls("required", "", tools, parallel=True, max_bytes=MAX_GRAMMAR)
        except SchemasTooLarge:
            pass

    return work


# ------------------------------------------------------------------------------------------------------------ schemas


def _object(properties: Mapping[str, Any], definitions: Mapping[str, Any] | None = None, **more: Any) -> str:
    whole = {"type": "object", "properties": properties, "required": list(properties)[::2], **more}
    return json.dumps(whole if definitions is None else whole | {"$defs": definitions}, ensure_ascii=False)


def _chain(n: int, branches: int, keyword: str = "anyOf", end: Any = None) -> str:
    """Definitions that each refer to the next one, `branches` times."""
    num = max(n // (40 * branches), 1)
    some = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * branches} for i in range(num)}
    return _object({"p": {"$ref": "#/$defs/d0"}}, {**some, f"d{num}": end or {"type": "string"}})


def _all_to_all(n: int, keyword: str = "anyOf") -> str:
    num = max(int((n / 24) ** 0.5), 1)
    refs = {keyword: [{"$ref": f"#/$defs/d{i}"} for i in range(num)]}
    return _object({"p": {"$ref": "#/$defs/d0"}}, {f"d{i}": refs for i in range(num)} | {"d0": {"type": "string"}})


def _unions(n: int) -> str:
    """Many unions that refer to the same two objects, whose properties don't tell them apart."""
    names = [f"{i:x}" for i in range(n // 24)]
    objects = {key: {"type": "object", "required": names, "properties": {}} for key in "AB"}
    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    return _object({f"p{i}": union for i in range(n // 140)}, objects)


def _many(one: Callable[[int], Any], size: int) -> Grow:
    return lambda n: _object({f"p{i}": one(i) for i in range(max(n // size, 1))})


def _nested(inner: Callable[[int], Any]) -> Grow:
    def grow(n: int) -> str:
        part = inner(n)
        for _ in range(DEPTH):
            part = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        return json.dumps(part)

    return grow


def _wrapped(part: dict[str, Any]) -> dict[str, Any]:
    for _ in range(DEPTH):
        part = {"allOf": [part]}
    return part


def _unions_of_models(n: int) -> str:
    """Unions of the same two models, which have no property that tells them apart."""
    num = max(n // 128, 1)
    names = [f"p{i}" for i in range(num)]
    model = {"type": "object", "required": names, "properties": {name: {"const": "x"} for name in names}}
    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    return _object({f"u{i}": union for i in range(num)}, {"a": model, "b": model})


def _records(n: int) -> str:
    """Records whose names are those of one long list."""
    num = max(n // 100, 1)
    record = {"propertyNames": {"$ref": "#/$defs/names"}, "properties": {"other": {}}}
    return _object({f"r{i}": record for i in range(num)}, {"names": {"enum": [f"v{i}" for i in range(num)]}})


SCHEMAS: Mapping[str, Grow] = {
    "unions of the same models": _unions_of_models,
    "records with the same names": _records,
    "anyOf of 2 refs": lambda n: _chain(n, 2),
    "anyOf of 8 refs": lambda n: _chain(n, 8),
    "oneOf of 2 refs": lambda n: _chain(n, 2, "oneOf"),
    "allOf of 2 refs": lambda n: _chain(n, 2, "allOf"),
    "a ring of refs": lambda n: _chain(n, 2, end={"$ref": "#/$defs/d0"}),
    "refs of all to all": _all_to_all,
    "allOf of refs of all to all": lambda n: _all_to_all(n, "allOf"),
    "refs into a deep part": lambda n: json.dumps(
        {
            "$defs": {"d": _wrapped({"type": "string"})},
            "properties": {
                f"p{i}": {"$ref": "#/$defs/d" + "/allOf/0" * (i % DEPTH)} for i in range(max(n // (5 * DEPTH), 1))
            },
        }
    ),
    "properties behind refs": lambda n: json.dumps(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                f"d{i}": {"properties": {f"p{i % 8}": {"type": "string"}}, "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
                for i in range(max(n // 120, 1))
            },
        }
    ),
    "properties to a chain of refs": lambda n: _object(
        {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(max(n // 80, 1))},
        {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(max(n // 80, 1))},
    ),
    "properties with large definitions": lambda n: _object(
        {f"p{i}": {"$ref": "#/$defs/d"} for i in range(max(n // 64, 1))},
        {"d": {"type": "integer", "description": "a" * (n // 2)}},
    ),
    "types of own names": lambda n: _object(
        {"p": {"$ref": "#/$defs/d0"}},
        {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": f"t{i}"}]} for i in range(max(n // 60, 1))},
    ),
    "integers": _many(lambda i: {"type": "integer"}, 24),
    "texts": _many(lambda i: {"type": "string"}, 24),
    "enums": _many(lambda i: {"type": "string", "enum": ["a", "b"]}, 48),
    "patterns": _many(lambda i: {"type": "string", "pattern": "^a+$"}, 48),
    "lists": _many(lambda i: {"type": "array", "items": {"type": "string"}}, 56),
    "objects": _many(lambda i: {"type": "object", "properties": {"a": {"type": "string"}}}, 72),
    "a long enum": lambda n: _object({"p": {"type": "string", "enum": [f"v{i}" for i in range(max(n // 8, 1))]}}),
    "a long name": lambda n: _object({"a" * n: {"type": "string"}}),
    "a long name of <": lambda n: _object({"<" * n: {"type": "string"}}),
    "a long name of half marks": lambda n: _object({"<|reserved_special_token_1" * (n // 26): {"type": "string"}}),
    "long names": lambda n: _object({f"{'a' * 1000}{i}": {"type": "string"} for i in range(max(n // 1000, 1))}),
    "a long value": lambda n: _object({"p": {"const": "<" * n}}),
    "control characters in a pattern": lambda n: _object({"p": {"type": "string", "pattern": "\\x0e-a" * (n // 8)}}),
    "unknown keywords": lambda n: json.dumps({"type": "object", **{f"minLengt{i}": 1 for i in range(n // 20)}}),
    "formats": _many(lambda i: {"type": "string", "format": f"f{i}"}, 48),
    "a long pattern": lambda n: _object({"p": {"type": "string", "pattern": "\\\\" * (n // 4) + "$"}}),
    "a pattern of groups": lambda n: _object({"p": {"type": "string", "pattern": "(a|" * (n // 6) + ")" * (n // 6)}}),
    "a long description": lambda n: _object({"p": {"type": "string", "description": '"$ref" ' * (n // 9)}}),
    "required names": lambda n: json.dumps(
        {"type": "object", "properties": {f"p{i}": {} for i in range(n // 18)}, "required": ["p0"] * (n // 8)}
    ),
    "oneOf of the same long objects": _unions,
    "deep objects": _nested(lambda n: {"type": "string", "enum": ["a" * n]}),
    "deep lists": lambda n: _object(
        {"p": json.loads('{"type": "array", "items": ' * DEPTH + json.dumps({"const": "a" * n}) + "}" * DEPTH)}
    ),
    "equal keys": lambda n: (
        '{"type": "object", "properties": {' + ", ".join(['"p": {"type": "string"}'] * (n // 26)) + "}}"
    ),
    "long numbers": lambda n: (
        '{"type": "object", "properties": {"p": {"type": "string", "maxLength": ' + "1" * min(n, MAX_DIGITS) + "}}}"
    ),
}
"""Schemas of a tool's arguments"""
