"""Names in schemas that llguidance does not know: unknown formats and misspelled keywords."""

import json
from typing import Any

import pytest

from pipeline.grammars.engine import Engine
from pipeline.grammars.format_names import KNOWN, with_known_formats
from pipeline.grammars.keywords import misspelt
from tests.grammars.walks import accepts, check, matcher_of

TEXT = {"type": "string"}
UUID = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"


def seen(schema: Any) -> Any:
    return json.loads(with_known_formats(json.dumps(schema), schema))


@pytest.mark.parametrize("name", ["password", "binary", "path", "json-string", "decimal", "idn-email", "", "Date"])
def test_an_unknown_format_accepts_every_text(tiny_engine: Engine, name: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": TEXT | {"format": name}}, "required": ["a"]})
    for kind in ("json_schema", "closed_schema"):
        assert accepts(tiny_engine, matcher_of(tiny_engine, kind, schema), '{"a":"any text"}')


@pytest.mark.parametrize("version", range(1, 9))
def test_a_uuid_of_any_version_is_a_uuid(tiny_engine: Engine, version: int) -> None:
    matcher = matcher_of(tiny_engine, "json_schema", json.dumps(TEXT | {"format": f"uuid{version}"}))
    assert accepts(tiny_engine, matcher, f'"{UUID}"')
    assert not accepts(tiny_engine, matcher, '"any text"')


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_formats_stay(tiny_engine: Engine, name: str) -> None:
    assert seen(TEXT | {"format": name}) == TEXT | {"format": name}
    assert not check(tiny_engine, "json_schema", json.dumps(TEXT | {"format": name})).error


def test_formats_are_found_in_nested_schemas() -> None:
    odd = TEXT | {"format": "odd", "title": "x"}
    for wrap in (
        lambda part: {"properties": {"format": part}},
        lambda part: {"properties": {"const": part}},
        lambda part: {"patternProperties": {"^a": part}},
        lambda part: {"$defs": {"format": part}},
        lambda part: {"anyOf": [True, {"items": part}]},
        lambda part: {"prefixItems": [part, part]},
        lambda part: {"additionalProperties": part},
        lambda part: {"components": {"schemas": {"one": part}}},
    ):
        assert seen(wrap(odd)) == wrap(TEXT | {"title": "x"})


def test_values_that_are_no_keywords_stay() -> None:
    odd = {"format": "odd"}
    for schema in (
        {"const": odd},
        {"enum": [odd]},
        {"default": odd, "examples": [odd]},
        {"format": 5},
        {"properties": {"format": True}},
    ):
        assert seen(schema) == schema
        assert seen({"items": odd, **schema}) == {"items": {}, **schema}


def test_numbers_keep_their_digits() -> None:
    text = '{"format": "odd", "const": 1.0000000000000000001, "maximum": 1E400}'
    schema = {"format": "odd", "const": 1.0, "maximum": 5}
    assert with_known_formats(text, schema) == '{"const": 1.0000000000000000001, "maximum": 1E400}'


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"maxlength": 3}, ("maxlength", "maxLength")),
        ({"minitems": 3}, ("minitems", "minItems")),
        ({"additionalproperties": False}, ("additionalproperties", "additionalProperties")),
        ({"anyOf": [True, {"Type": "string"}]}, ("Type", "type")),
        ({"properties": {"a": {"items": {"ENUM": []}}}}, ("ENUM", "enum")),
        ({"$defs": {"a": {"anyof": []}}}, ("anyof", "anyOf")),
    ],
)
def test_a_keyword_in_the_wrong_case_is_reported(schema: Any, found: tuple[str, str]) -> None:
    assert misspelt(schema) == found


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"Type": TEXT, "maxlength": TEXT}},
        {"$defs": {"Items": TEXT}, "definitions": {"Format": TEXT}},
        {"const": {"Type": 1}, "enum": [{"Type": 1}], "default": {"Type": 1}, "examples": [{"Type": 1}]},
        {"tpye": "string", "nullable": True, "x-foo": {"Type": 1}, "Title": "x"},
        {"components": {"Items": TEXT}},
    ],
)
def test_property_names_are_not_reported_as_keywords(tiny_engine: Engine, schema: Any) -> None:
    assert misspelt(schema) is None
    assert not check(tiny_engine, "json_schema", json.dumps(schema)).error
