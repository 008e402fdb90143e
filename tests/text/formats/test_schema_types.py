"""The types that schemas allow."""

from typing import Any

import pytest

from pipeline.text.formats.schema_types import OTHER, property_types, types_of

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
    ],
)
def test_types(schema: Any, definitions: Any, types: set[str] | None) -> None:
    assert types_of(schema, {"$defs": definitions}) == types


def test_definitions_may_be_deep() -> None:
    some = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(200)}
    assert types_of({"$ref": "#/$defs/a0"}, {"$defs": some | {"a200": TEXT}}) == {"string"}


def test_properties_of_invalid_schemas_have_no_types() -> None:
    for schema in ("", "{", "[]", '{"properties": 1}', '{"properties": {"a": {"maximum": ' + "1" * 5000 + "}}}"):
        assert not property_types(schema)
