"""Whole schemas as generators in use write them, with all of their habits in one: each is enforced, or refused by name.

pydantic writes its own here. Those of Go's invopop/jsonschema, of Java's victools with the modules for Jackson and
Jakarta Validation, and of Spring's and Jackson's older ones are written after the files that these projects test with.
"""

import datetime
import decimal
import enum
import ipaddress
import json
import tracemalloc
import uuid
import warnings
from types import GenericAlias
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest

from pipeline.grammars.engine import Engine
from pipeline.grammars.simplified import simplified
from tests.grammars.walks import accepts, check, matcher_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pydantic.v1 as old


class Color(enum.Enum):
    RED, BLUE = "red", "blue"


class Point(NamedTuple):
    x: int
    y: int


FIELDS: dict[str, tuple[Any, str, str]] = {
    "int": (int, "1", '"a"'),
    "float": (float, "1.5", '"a"'),
    "bool": (bool, "true", "1"),
    "date": (datetime.date, '"2026-11-29"', '"today"'),
    "datetime": (datetime.datetime, '"2026-11-29T12:00:00Z"', '"now"'),
    "time": (datetime.time, '"12:00:00Z"', '"noon"'),
    "uuid": (uuid.UUID, '"123e4567-e89b-12d3-a456-426614174000"', '"1"'),
    "enum": (Color, '"red"', '"green"'),
    "literal": (Literal["a", 1], "1", '"b"'),
    "list": (list[Color], '["blue"]', '["green"]'),
    "tuple": (tuple[int, str], '[1, "a"]', '["a", 1]'),
    "tuple of any length": (tuple[int, ...], "[1, 2]", '["a"]'),
    "dict": (dict[str, int], '{"a": 1}', '{"a": "b"}'),
    "union": (int | list[str], '["a"]', "null"),
    "any": (Any, '{"a": [1]}', "x"),
    "ipv4": (ipaddress.IPv4Address, '"10.0.0.1"', '"10.0.0"'),
    "bytes": (bytes, '"a"', "1"),
    "decimal": (decimal.Decimal, "1.5", "true"),
    "named tuple": (Point, "[1, 2]", "[1]"),
}
NEW = {
    "optional": (int | None, "null", '"a"'),
    "bounds": (Annotated[int, pydantic.Field(gt=0, le=9)], "9", "0"),
    "length": (Annotated[str, pydantic.Field(min_length=1, max_length=2)], '"ab"', '"abc"'),
    "pattern": (Annotated[str, pydantic.Field(pattern="^a+$")], '"aa"', '"ab"'),
    "few": (Annotated[list[int], pydantic.Field(min_length=1, max_length=2)], "[1]", "[]"),
    "secret": (pydantic.SecretStr, '"a"', "1"),
    "path": (pydantic.FilePath, '"a"', "1"),
    "Json": (pydantic.Json, '"1"', "1"),
    "alias": (Annotated[int, pydantic.Field(alias="a b", default=3)], "1", '"a"'),
    "multiple": (Annotated[int, pydantic.Field(multiple_of=5)], "10", "11"),
}
OLD = {
    "optional": (int | None, "1", '"a"'),
    "bounds": (old.conint(gt=0, le=9), "9", "0"),
    "length": (old.constr(min_length=1, max_length=2), '"ab"', '"abc"'),
    "pattern": (old.constr(regex="^a+$"), '"aa"', '"ab"'),
    "few": (old.conlist(int, min_items=1, max_items=2), "[1]", "[]"),
    "secret": (old.SecretStr, '"a"', "1"),
    "Json": (old.Json, '"1"', "1"),
    "multiple": (old.conint(multiple_of=5), "10", "11"),
}


def both(field: Any, *, is_old: bool) -> dict[str, Any]:
    """The schema of a model with a model that has the field, in the version 1 or 2 of pydantic."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make: Any = old.create_model if is_old else pydantic.create_model
        describe: Any = old.Field if is_old else pydantic.Field
        inner = make("Inner", value=(field, describe(..., description="what it is")))
        outer = make(
            "Outer", inner=(inner, describe(..., title="The inner one")), rest=(GenericAlias(list, (inner,)), [])
        )
        found: dict[str, Any] = outer.schema() if is_old else outer.model_json_schema()
    return found


def enforced(engine: Engine, schema: Any, good: str, bad: str) -> None:
    for kind in ("json_schema", "closed_schema"):
        matcher = matcher_of(engine, kind, json.dumps(schema))
        assert accepts(engine, matcher, good), (kind, good)
        assert not accepts(engine, matcher, bad), (kind, bad)


CASES = [
    (f"{name}, {version}", one, version == "v1")
    for version, all_ in (("v1", FIELDS | OLD), ("v2", FIELDS | NEW))
    for name, one in all_.items()
]


@pytest.mark.parametrize(("field", "is_old"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_pydantic_writes_is_enforced(tiny_engine: Engine, field: tuple[Any, str, str], *, is_old: bool) -> None:
    kind, good, bad = field
    name = "a b" if good == "1" and not is_old and "alias" in str(kind) else "value"
    schema = both(kind, is_old=is_old)
    enforced(
        tiny_engine,
        schema,
        f'{{"inner": {{"{name}": {good}}}, "rest": []}}',
        f'{{"inner": {{"{name}": {bad}}}, "rest": []}}',
    )


INVOPOP = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://github.com/acme/tools/args",
    "$ref": "#/$defs/Args",
    "$defs": {
        "Args": {
            "properties": {
                "id": {"type": "integer", "maximum": 120, "minimum": 18},
                "labels": {"patternProperties": {".*": {"type": "string"}}, "type": "object"},
                "data": {"type": "string", "contentEncoding": "base64"},
                "limit": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
                "level": {"type": "number", "enum": [1, 1.5]},
                "raw": True,
                "next": {"$ref": "#/$defs/Args"},
                "note": {"type": "string", "foo": "bar=='baz'", "readOnly": True, "examples": ["a"]},
            },
            "additionalProperties": False,
            "type": "object",
            "required": ["id"],
        }
    },
}
GROUPS = {
    "oneOf": [{"required": ["a", "b"], "title": "group1"}, {"required": ["c"], "title": "group2"}],
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "string"},
        "c": {"oneOf": [{"type": "string"}, {"type": "array"}]},
    },
    "additionalProperties": False,
    "type": "object",
}
JAKARTA = {
    "$schema": "https://json-schema.org/draft/2019-09/schema",
    "type": "object",
    "properties": {
        "flag": {"enum": [True, False]},
        "never": {"type": "boolean", "const": False},
        "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "age": {"type": ["integer", "null"], "minimum": 1, "maximum": 8},
        "mail": {"type": "string", "format": "email", "pattern": ".+@.+\\..+"},
        "word": {"type": "string", "minLength": 1, "pattern": "\\w+"},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 13}, "minProperties": 1},
        "tags": {"minItems": 1, "maxItems": 2, "type": "array", "items": {"type": "string", "minLength": 1}},
        "any": {},
    },
    "required": ["share"],
}
SUBTYPES = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {
        "Circle-1": {"type": "object", "properties": {"r": {"type": "number"}, "kind": {"type": "string"}}},
        "Circle-2": {
            "allOf": [
                {"$ref": "#/definitions/Circle-1"},
                {"type": "object", "properties": {"kind": {"const": "circle"}}, "required": ["kind"]},
            ]
        },
        "Box-2": {"type": "object", "properties": {"Box": {"$ref": "#/definitions/Circle-1"}}, "required": ["Box"]},
        "Array": {
            "type": "array",
            "items": [{"type": "string", "const": "circle"}, {"$ref": "#/definitions/Circle-1"}],
        },
    },
    "type": "object",
    "properties": {
        "shape": {"anyOf": [{"$ref": "#/definitions/Circle-2"}, {"$ref": "#/definitions/Box-2"}]},
        "wrapped": {"$ref": "#/definitions/Array"},
    },
}
URN = {
    "type": "object",
    "id": "urn:jsonschema:com:acme:Node",
    "properties": {
        "next": {"type": "object", "$ref": "urn:jsonschema:com:acme:Node"},
        "id": {"type": "string"},
        "place": {"type": "object", "id": "urn:jsonschema:com:acme:Place", "properties": {"n": {"type": "integer"}}},
        "others": {"type": "array", "items": {"type": "object", "$ref": "urn:jsonschema:com:acme:Place"}},
        "a/~b": {"type": "object", "id": "urn:jsonschema:com:acme:Odd", "properties": {"n": {"type": "integer"}}},
        "odd": {"type": "object", "$ref": "urn:jsonschema:com:acme:Odd"},
    },
}
SPRING = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The city"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "at": {"type": "string", "format": "date-time"},
        "n": {"type": "integer", "format": "int32"},
        "x": {"type": "number", "format": "double"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
DOCUMENTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "invopop": (
        INVOPOP,
        '{"id": 18, "labels": {"a": "b"}, "limit": null, "level": 1.5, "next": {"id": 20}}',
        '{"id": 17}',
    ),
    "invopop, nested": (INVOPOP, '{"id": 18, "raw": [1]}', '{"id": 18, "next": {"id": 1}}'),
    "invopop, other names": (INVOPOP, '{"id": 18}', '{"id": 18, "other": 1}'),
    "invopop, labels": (INVOPOP, '{"id": 18, "labels": {}}', '{"id": 18, "labels": {"a": 1}}'),
    "Jakarta": (JAKARTA, '{"share": 0.5, "age": null}', '{"share": 0.5, "age": 9}'),
    "Jakarta, bounds": (JAKARTA, '{"share": 0.25}', '{"share": 1}'),
    "Jakarta, mail": (JAKARTA, '{"share": 0.5, "mail": "a@b.de"}', '{"share": 0.5, "mail": "a@b"}'),
    "Jakarta, constants": (JAKARTA, '{"flag": true, "never": false, "share": 0.5}', '{"never": true, "share": 0.5}'),
    "Jakarta, sizes": (JAKARTA, '{"share": 0.5, "tags": ["a"]}', '{"share": 0.5, "tags": []}'),
    "victools, subtypes": (SUBTYPES, '{"shape": {"kind": "circle"}}', '{"shape": {"kind": "box"}}'),
    "victools, wrapped": (SUBTYPES, '{"wrapped": ["circle", {"r": 1}]}', '{"wrapped": ["box", {"r": 1}]}'),
    "Jackson's urn": (URN, '{"next": {"id": "a"}}', '{"next": {"id": 1}}'),
    "Jackson's urn of a part": (URN, '{"others": [{"n": 1}]}', '{"others": [{"n": "a"}]}'),
    "Jackson's urn of a name with signs": (URN, '{"odd": {"n": 1}}', '{"odd": {"n": "a"}}'),
    "Spring AI": (SPRING, '{"city": "a", "unit": "C", "n": 1}', '{"city": "a", "unit": "K"}'),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_go_and_java_write_is_enforced(tiny_engine: Engine, name: str) -> None:
    enforced(tiny_engine, *DOCUMENTS[name])


def test_places_of_ids_take_no_more_memory_than_the_document() -> None:
    """Their texts would have 2,000 times the long name, whether or not something refers to them."""
    parts = {str(i): {"type": "object", "id": f"urn:{i}"} for i in range(2_000)}
    refs = {f"r{i}": {"$ref": f"urn:{i}"} for i in range(2_000)}
    long = {"properties": {100_000 * "k": {"properties": parts}, "refs": {"properties": refs}}}
    tracemalloc.start()
    made = simplified(long)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    kept = made["properties"]["refs"]["properties"].values()
    assert 0 < sum(one["$ref"].startswith("#/properties/kkk") for one in kept) < 20


OLD_BOUNDS = {"type": "integer", "maximum": 120, "exclusiveMaximum": True, "minimum": 18, "exclusiveMinimum": True}
BY_NAME = {
    "invopop, groups": (GROUPS, "oneOf"),
    "victools, if": ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, "if"),
    "victools, dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "victools, elsewhere": ({"properties": {"bar": {"$ref": "http://example.com/bar"}}}, '"$ref" names'),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_not_enforced_is_refused_by_name(tiny_engine: Engine, name: str) -> None:
    schema, part = BY_NAME[name]
    assert part in check(tiny_engine, "json_schema", json.dumps(schema)).error


def test_bounds_of_draft_4_are_bounds_whatever_the_schema_says_of_its_version(tiny_engine: Engine) -> None:
    """invopop's older versions wrote them so."""
    for version in ({}, {"$schema": "https://json-schema.org/draft/2020-12/schema"}):
        enforced(tiny_engine, {**version, **OLD_BOUNDS}, "19", "18")
