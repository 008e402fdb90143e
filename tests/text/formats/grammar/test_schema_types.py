"""The types that schemas allow."""

import json
from typing import Any

import pytest

from pipeline.text.formats.grammar.schema_types import OTHER, Types, as_json, property_types, types_of

INTEGER = {"type": "integer"}
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "definitions", "types"),
    [
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, {"a": INTEGER}, {"integer", "null"}),
        ({"oneOf": [{"type": ["integer", "string"]}, {"const": 1.5}]}, {}, {"integer", "string", "number"}),
        ({"$ref": "#/$defs/a"}, {"a": {"$ref": "#/$defs/b"}, "b": TEXT}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"a": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}, {"string"}),
        ({"$ref": "#/$defs/a"}, {"a": {"anyOf": [{"$ref": "#/$defs/b"}, TEXT]}, "b": {"$ref": "#/$defs/c"}}, None),
        ({"$ref": "#/$defs/a"}, {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, None),
        ({"$ref": "#/$defs/a"}, {"a": {}}, None),
        ({"$ref": "https://example.org/a"}, {}, None),
        ({"anyOf": [TEXT, {}]}, {}, None),
        ({"type": "text"}, {}, {OTHER}),
        ({"anyOf": []}, {}, None),
        ({"allOf": [{"$ref": "#/$defs/a"}], "default": "x"}, {"a": TEXT}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/a"}, {"minLength": 1}]}, {"a": TEXT}, {"string"}),
        ({"allOf": [{"type": "number"}, INTEGER]}, {}, {"integer"}),
        ({"allOf": [{"anyOf": [TEXT, INTEGER]}, {"oneOf": [INTEGER, {"type": "null"}]}]}, {}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, {"a": {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}]}}, {"string"}),
        ({"allOf": [{"minLength": 1}]}, {}, None),
        ({"allOf": [TEXT, INTEGER]}, {}, None),
        ({"minLength": 1, "$ref": "#/$defs/a", "anyOf": [{"pattern": "a"}, {"pattern": "b"}]}, {"a": TEXT}, {"string"}),
        ({"type": ["string", "null"], "enum": ["1", "2"]}, {}, {"string"}),
        ({"type": "text", "enum": ["1", "2"]}, {}, {OTHER}),
        ({"$ref": "#/$defs/a/properties/b~1c"}, {"a": {"properties": {"b/c": TEXT}}}, {"string"}),
        ({"$ref": "#/$defs/a%20b/anyOf/0"}, {"a b": {"anyOf": [TEXT, INTEGER]}}, {"string"}),
        ({"$ref": "#/$defs/a/anyOf/2"}, {"a": {"anyOf": [TEXT, INTEGER]}}, None),
    ],
)
def test_types(schema: Any, definitions: Any, types: set[str] | None) -> None:
    assert types_of(schema, {"$defs": definitions}) == types


LARGE = ("7e818", "-1E+400", "9" * 400, "0." + "1" * 30, "1e-999")


@pytest.mark.parametrize("text", LARGE)
@pytest.mark.parametrize("types", [None, frozenset({"number"}), frozenset({"number", "null"})])
def test_a_number_stays_that_number(text: str, types: Types) -> None:
    """Also one that no float can be."""
    assert as_json(text, types) == text
    assert as_json(f"[{text}]", None) == f"[{text}]"
    assert as_json(text, frozenset({"string"})) == as_json(text, frozenset({"boolean"})) == f'"{text}"'


@pytest.mark.parametrize(
    ("text", "is_integer"),
    [("5", True), ("5.0", True), ("1e3", True), ("1e400", True), ("5.5", False), ("05", False)],
)
def test_which_numbers_are_integers(text: str, is_integer: bool) -> None:
    assert as_json(text, frozenset({"integer"})) == (text if is_integer else f'"{text}"')


def test_definitions_may_be_deep() -> None:
    some = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(200)}
    assert types_of({"$ref": "#/$defs/a0"}, {"$defs": some | {"a200": TEXT}}) == {"string"}


def test_properties_of_invalid_schemas_have_no_types() -> None:
    for schema in ("", "{", "[]", '{"properties": 1}', '{"properties": {"a": {"maximum": ' + "1" * 5000 + "}}}"):
        assert not property_types(schema)


@pytest.mark.parametrize(
    "root",
    [
        {"properties": {"a": TEXT}},
        {"$ref": "#/$defs/args"},
        {"$ref": "#/definitions/args"},
        {"$ref": "#/$defs/again"},
        {"allOf": [{"$ref": "#/$defs/args"}, {"properties": {"b": INTEGER}}]},
        {"properties": {"a": {"minLength": 1}}, "allOf": [{"properties": {"a": TEXT}}]},
        {"oneOf": [{"$ref": "#/$defs/args"}, {"properties": {"b": INTEGER}}]},
        {"properties": {"a": {"$ref": "#/properties/b/items"}, "b": {"items": TEXT}}},
        {"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"a": {"const": "x"}}}, {"$ref": "#"}]},
    ],
)
def test_properties_behind_the_root_have_types(root: dict[str, Any]) -> None:
    args = {"properties": {"a": TEXT}}
    definitions = {"$defs": {"args": args, "again": {"$ref": "#/$defs/args"}}, "definitions": {"args": args}}
    assert property_types(json.dumps(root | definitions))["a"] == {"string"}


def test_alternatives_of_a_property_add_up() -> None:
    root = {"oneOf": [{"properties": {"a": TEXT}}, {"properties": {"a": INTEGER}}], "properties": {"a": {}}}
    assert property_types(json.dumps(root)) == {"a": {"string", "integer"}}
