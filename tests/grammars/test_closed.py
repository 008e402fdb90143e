"""Closing a schema: its objects accept only the properties that they name."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pipeline.grammars.closed import closed

INT = {"type": "integer"}


def closed_of(schema: Any) -> Any:
    return json.loads(closed(json.dumps(schema), schema))


def test_an_object_that_names_properties_accepts_no_others() -> None:
    schema = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
    assert closed_of(schema) == schema | {"additionalProperties": False}
    assert closed_of({"type": "object", "properties": {}}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


def test_nested_objects_are_closed_too() -> None:
    inner = {"properties": {"b": INT}}
    shut = inner | {"additionalProperties": False}
    for wrap in (
        lambda part: {"properties": {"a": part}, "additionalProperties": False},
        lambda part: {"type": "array", "items": part},
        lambda part: {"type": "array", "prefixItems": [INT, part]},
        lambda part: {"anyOf": [part, {"type": "null"}]},
        lambda part: {"type": "object", "additionalProperties": part},
        lambda part: {"$ref": "#/$defs/one", "$defs": {"one": part}},
        lambda part: {"$ref": "#/definitions/one", "definitions": {"one": part}},
    ):
        assert closed_of(wrap(inner)) == wrap(shut)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": INT}, "additionalProperties": True},
        {"properties": {"a": INT}, "additionalProperties": INT},
        {"properties": {"a": INT}, "patternProperties": {"^x": INT}},
        {"properties": {"a": INT}, "required": ["b"]},
        {"properties": {"a": INT}, "minProperties": 2},
        {"allOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]},
        {"oneOf": [{"properties": {"a": INT}}, {"properties": {"b": INT}}]},
        {"properties": {"a": INT}, "anyOf": [{"required": ["a"]}, {"properties": {"b": INT}}]},
        {"properties": {"a": INT}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": INT}}}},
        {"properties": {"deep": {"allOf": [INT]}}},
        {"const": {"properties": {"a": 1}}},
        {"properties": {}, "additionalProperties": False, "default": {"properties": {}}},
        True,
    ],
)
def test_other_schemas_stay_unchanged(schema: Any) -> None:
    assert closed_of(schema) == schema


def test_values_are_not_treated_as_schemas_and_numbers_keep_their_digits() -> None:
    text = '{"properties": {"a": {"const": 1.0000000000000000001, "default": {"properties": {}}}}}'
    assert closed(text, json.loads(text)) == text[:-1] + ', "additionalProperties": false}'


names = st.sampled_from("ab")
schemas = st.recursive(
    st.sampled_from([INT, {"type": "boolean"}, {}, True]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"properties": st.dictionaries(names, inner)},
            optional={"required": st.lists(names, max_size=2, unique=True), "additionalProperties": inner},
        ),
        st.fixed_dictionaries(
            {"anyOf": st.lists(inner, min_size=1, max_size=2)}, optional={"required": st.just(["a"])}
        ),
        st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"not": inner}),
        st.fixed_dictionaries({"items": inner}),
    ),
    max_leaves=6,
)
values = st.recursive(
    st.sampled_from([1, True, "x"]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=6,
)


@given(schemas, values)
def test_a_value_that_matches_the_closed_schema_matches_the_original(schema: Any, value: Any) -> None:
    if Draft202012Validator(closed_of(schema)).is_valid(value):
        assert Draft202012Validator(schema).is_valid(value)
