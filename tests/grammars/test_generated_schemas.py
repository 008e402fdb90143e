"""Schemas as public generators write them: each is enforced, or refused with the keyword's name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.grammars import exclusive, simplified
from pipeline.grammars.engine import Engine
from pipeline.text.formats.grammar.own_syntax import text_body
from tests.grammars.walks import accepts, check, matcher_of
from tools.scaling_meter.schemas import SCHEMAS

BIG = 2**53 + 1
RECORD = '{"type": "object", "propertyNames": NAMES, "additionalProperties": {"type": "integer"}}'
ZOD_EMAIL = r"^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
INT64 = '{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}'
FLOAT32 = '{"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}'
GO_MAP = '{"type": "object", "patternProperties": {"^[0-9]+$": {"type": "string"}}, "additionalProperties": false}'
TUPLE = '{"type": "array", "items": [{"type": "string"}], "additionalItems": false, "minItems": 1, "maxItems": 1}'
TAGGED = (
    '{"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {"propertyName": "k"}, "$defs": {'
    '"A": {"type": "object", "properties": {"k": {"const": "a", "type": "string"}}, "required": ["k"]}, '
    '"B": {"type": "object", "properties": {"k": {"const": "b", "type": "string"}}, "required": ["k"]}}}'
)
BARE_UNION = TAGGED.replace('"discriminator": {"propertyName": "k"}, ', "")
NULL_OR_MODEL = BARE_UNION.replace('{"$ref": "#/$defs/B"}', '{"type": "null"}')
LENGTH_OR_POINT = (
    '{"oneOf": [{"type": "integer", "maximum": 500}, {"$ref": "#/$defs/P"}], "$defs": {"P": {"$ref": "#/$defs/Q"}, '
    '"Q": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}}}'
)

ENFORCED = {
    # pydantic
    "dict with literal names": (RECORD.replace("NAMES", '{"enum": ["x", "y"]}'), '{"y":1}', '{"z":1}'),
    "dict with an enum's names": (
        RECORD.replace("NAMES", '{"$ref": "#/$defs/E"}')[:-1] + ', "$defs": {"E": {"enum": ["x"], "type": "string"}}}',
        '{"x":1}',
        '{"z":1}',
    ),
    "dict with short names": (RECORD.replace("NAMES", '{"minLength": 1, "maxLength": 2}'), '{"ab":1}', '{"":1}'),
    "dict with dates": (RECORD.replace("NAMES", '{"format": "date"}'), '{"2026-11-28":1}', '{"today":1}'),
    "dict with UUIDs": (
        RECORD.replace("NAMES", '{"format": "uuid"}'),
        '{"123e4567-e89b-12d3-a456-426614174000":1}',
        '{"1":1}',
    ),
    "dict with a pattern": (RECORD.replace("NAMES", '{"pattern": "^a"}'), '{"ab":1}', '{"b":1}'),
    "int64": (INT64, "9223372036854775807", "9223372036854775808"),
    "int64, negative": (INT64, "-9223372036854774784", "-9223372036854775809"),
    "int64 or null": (INT64.replace('"integer"', '["integer", "null"]'), "null", "9223372036854775808"),
    "Literal": (f'{{"enum": [{2**53}, "a"]}}', str(2**53), str(BIG)),
    "old tuple": (TUPLE, '["a"]', "[1]"),
    "tagged union": (TAGGED, '{"k":"b"}', '{"k":"c"}'),
    "union without a discriminator": (BARE_UNION, '{"k":"b"}', '{"k":"c"}'),
    "null or a model": (NULL_OR_MODEL, "null", '{"k":"b"}'),
    "a model or null": (NULL_OR_MODEL, '{"k":"a"}', '{"k":"b"}'),
    "a number or a tuple behind references": (LENGTH_OR_POINT, "[1,2]", "501"),
    "Json": ('{"contentMediaType": "application/json", "contentSchema": {}, "type": "string"}', '"1"', "1"),
    "old exclusive bound": ('{"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.01}', "0.25", "0.255"),
    # zod
    "z.record(z.string())": (RECORD.replace("NAMES", '{"type": "string"}'), '{"a":1}', '{"a":"b"}'),
    "z.record(z.enum())": (
        RECORD.replace("NAMES", '{"type": "string", "enum": ["a", "b"]}')[:-1] + ', "required": ["a", "b"]}',
        '{"a":1,"b":2}',
        '{"a":1}',
    ),
    "z.int()": (f'{{"type": "integer", "minimum": {1 - 2**53}, "maximum": {2**53 - 1}}}', str(2**53 - 1), str(2**53)),
    "z.float32()": (FLOAT32, "1.5", "1e39"),
    "z.email()": (f'{{"type": "string", "format": "email", "pattern": "{ZOD_EMAIL}"}}', '"a.b@c.de"', '"a..b@c.de"'),
    "z.never()": ('{"anyOf": [{"not": {}}, {"type": "string"}]}', '"a"', "1"),
    "z.uint64()": ('{"type": "integer", "minimum": 0, "maximum": 18446744073709551615}', "7", "18446744073709551616"),
    # invopop/jsonschema, with strings of any length
    "map[int]string": (GO_MAP, '{"7":"a"}', '{"a":"a"}'),
    "interface{}": ('{"type": "object", "properties": {"a": true}, "required": ["a"]}', '{"a":[1]}', "{}"),
    "maxLength of int64": ('{"type": "string", "maxLength": 9223372036854775807}', '"a"', "1"),
    # Names of types that URIs can't have, as typescript-json-schema, Springfox and people write them
    **{
        f"definitions of {name}": (
            json.dumps({"$ref": f"#/definitions/{name}", "definitions": {name: {"type": "integer"}}}),
            "1",
            '"a"',
        )
        for name in ("Record<string,number>", "List«A»", "Größe", "价格", "a b", "A|B", "A[]", "100%", 'a"b')
    },
    # Jackson's module for draft 3
    "required: true": (
        '{"type": "object", "properties": {"a": {"type": "string", "required": true}, "b": {"type": "object", '
        '"required": true, "properties": {"c": {"type": "integer", "required": true}, "d": {"required": false}}}}}',
        '{"a":"x","b":{"c":1}}',
        '{"a":"x"}',
    ),
    "required: true, within": (
        '{"type": "object", "required": ["b"], "properties": {"a": {"type": "string", "required": false}, "b": '
        '{"type": "object", "required": true, "properties": {"c": {"type": "integer", "required": true}}}}}',
        '{"b":{"c":1}}',
        '{"b":{}}',
    ),
    # TypeBox
    "Type.Record": ('{"type": "object", "patternProperties": {"^(.*)$": {"type": "integer"}}}', '{"a":1}', '{"a":"b"}'),
    "Type.Recursive": (
        '{"$id": "T0", "type": "object", "properties": {"n": {"type": "array", "items": {"$ref": "T0"}}}}',
        '{"n":[{"n":[]}]}',
        '{"n":[1]}',
    ),
    "Type.Object, unevaluated": (
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": false}',
        '{"a":1}',
        '{"b":1}',
    ),
    # Keywords that restrict nothing
    "uniqueItems: false": ('{"type": "array", "uniqueItems": false}', "[1, 1]", "1"),
    "unevaluatedProperties: true": ('{"type": "object", "unevaluatedProperties": true}', '{"a": 1}', "1"),
    "unevaluatedItems: {}": ('{"type": "array", "unevaluatedItems": {}}', "[1]", "1"),
    "minLength: 1.0": ('{"type": "string", "minLength": 1.0, "maxLength": 2e0}', '"a"', '"abc"'),
    "$dynamicAnchor": ('{"$dynamicAnchor": "a", "type": "array", "items": {"$ref": "#a"}}', "[[]]", "[1]"),
    "dependentRequired: {}": ('{"type": "object", "dependentRequired": {}, "dependencies": {"a": []}}', "{}", "1"),
    "contains: none": ('{"type": "array", "contains": {"type": "null"}, "minContains": 0}', "[1]", "1"),
    "if without then": ('{"type": "integer", "if": {"const": 1}, "else": {}}', "1", '"a"'),
    "not: false": ('{"type": "integer", "not": false}', "1", '"a"'),
    "defaults and extensions": ('{"type": "integer", "default": 1e400, "x-most": 1e400}', "1", '"a"'),
    # Numbers at the edge
    "const 2^53": (f'{{"const": {2**53}}}', str(2**53), str(BIG)),
    "const 2^60": (f'{{"const": {2**60}}}', str(2**60), str(2**60 + 1)),
    "const INT64_MAX": (f'{{"const": {2**63 - 1}}}', str(2**63 - 1), str(2**63 - 2)),
    "const 1e23": ('{"const": 1e23}', "1" + "0" * 23, "99999999999999991611392"),
    "exclusiveMinimum": (f'{{"type": "integer", "exclusiveMinimum": {BIG}}}', str(BIG + 1), str(BIG)),
    "number beyond 2^53": ('{"type": "number", "maximum": 9223372036854774784}', "5.5", "9223372036854774784.5"),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_what_generators_write_is_enforced(tiny_engine: Engine, name: str) -> None:
    schema, good, bad = ENFORCED[name]
    for kind in ("json_schema", "closed_schema"):
        matcher = matcher_of(tiny_engine, kind, schema)
        assert accepts(tiny_engine, matcher, good), kind
        assert not accepts(tiny_engine, matcher, bad), kind


REFUSED = {
    "set": ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "Type.Intersect": ('{"allOf": [{"type": "object"}], "unevaluatedProperties": false}', "unevaluatedProperties"),
    "if with annotations": ('{"if": {"items": true}, "unevaluatedItems": false}', "if"),
    "names with two rules": (RECORD.replace("NAMES", '{"minLength": 1, "pattern": "a"}'), "propertyNames"),
    "names that refer to themselves": (
        RECORD.replace("NAMES", '{"$ref": "#/$defs/R"}')[:-1] + ', "$defs": {"R": {"$ref": "#/$defs/R"}}}',
        "propertyNames",
    ),
    "names that are numbers": (RECORD.replace("NAMES", '{"type": "integer"}'), "propertyNames"),
    "a union of equal models": (BARE_UNION.replace("/B", "/A"), "oneOf"),
    "a union whose kinds may be absent": (BARE_UNION.replace(', "required": ["k"]', ""), "oneOf"),
    "a union with a kind in common": (BARE_UNION.replace('{"const": "b"', '{"enum": ["a", "b"]'), "oneOf"),
    "an integer or a number": (
        '{"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/N"}], "$defs": {"N": {"type": "number"}}}',
        "oneOf",
    ),
    "a union of references without end": (
        BARE_UNION.replace('"$defs": {', '"$defs": {"A": {"$ref": "#/$defs/A"}, "X": {').replace("/B", "/X") + "}",
        "oneOf",
    ),
    "Jackson's references": ('{"$ref": "urn:jsonschema:com:x:Bean"}', "\"$ref\" names 'urn:jsonschema:com:x:Bean'"),
    "a reference to nothing": ('{"$ref": "#/$defs/a", "$defs": {}}', "\"$ref\" names '/$defs/a'"),
    "an anchor of nothing": ('{"$ref": "#a", "$defs": {}}', "\"$ref\" names 'a'"),
    "Type.Date": ('{"type": "Date"}', "Date"),
    "dynamic references": ('{"$dynamicAnchor": "a", "items": {"$dynamicRef": "#a"}}', "$dynamic"),
    "look-ahead": ('{"type": "string", "pattern": "^(?!a)"}', '"pattern"'),
    "const": (f'{{"const": {BIG}}}', f'"const" has the number {BIG}'),
    "const 2^64": (f'{{"const": {2**64}}}', f'"const" has the number {2**64}'),
    "enum, nested": (f'{{"enum": [{{"a": [{BIG}]}}]}}', f'"enum" has the number {BIG}'),
    "decimals": ('{"const": 0.12345678901234567890}', '"const" has the number 0.12345678901234567890'),
    "1e400": ('{"enum": [1e400]}', '"enum" has the number 1e400'),
    "a huge exponent": ('{"const": 1e-99999999999999999999}', '"const" has the number 1e-99999999999999999999'),
    "a huge bound": ('{"minimum": 1e99999999999999999999}', '"minimum" has the number 1e99999999999999999999'),
    "thousands of digits": ('{"const": ' + "7" * 5000 + "}", '"const" has the number 7777777'),
    "minimum": (f'{{"type": "integer", "minimum": {BIG}}}', f'"minimum" has the number {BIG}'),
    "maximum": (f'{{"type": "integer", "maximum": {BIG}}}', f'"maximum" has the number {BIG}'),
    "minimum 1e19": ('{"type": "integer", "minimum": 1e19}', '"minimum" has the number 1e19'),
    "decimal bound": ('{"type": "number", "maximum": 0.12345678901234567890}', '"maximum" has the number'),
    "exclusive": (f'{{"type": "number", "exclusiveMaximum": {2**53}}}', '"exclusiveMaximum"'),
    "multipleOf": (f'{{"multipleOf": {BIG}}}', f'"multipleOf" has the number {BIG}'),
    "multipleOf 0": ('{"multipleOf": 0}', '"multipleOf"'),
    "minLength": ('{"type": "string", "minLength": 1.5}', '"minLength"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_enforced_is_refused_by_name(tiny_engine: Engine, name: str) -> None:
    schema, part = REFUSED[name]
    tool = json.dumps({"rules": "start: s0\n", "schemas": {"s0": 0}}).replace(": 0}", f": {schema}}}")
    tag = f'{{"structures": [{{"begin": "a", "schema": {schema}, "end": ""}}], "triggers": ["a"]}}'
    for kind, source in (("json_schema", schema), ("calls", tool), ("structural_tag", tag)):
        assert part in check(tiny_engine, kind, source).error, kind
        assert "line 1" not in check(tiny_engine, kind, source).error


def test_schemas_within_schemas_are_not_repeated_without_end(tiny_engine: Engine) -> None:
    schema = '{"type": "integer"}'
    for _ in range(60):
        schema = f'{{"propertyNames": {{"enum": ["a", "b"]}}, "additionalProperties": {schema}}}'
    assert '"propertyNames"' in check(tiny_engine, "json_schema", schema).error


@pytest.mark.parametrize("name", ["unions of the same models", "records with the same names"])
def test_what_many_references_lead_to_is_not_looked_at_for_each(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Counts the names and values that are looked at: none of these schemas can be rewritten."""
    looks = 0

    def counted(name_: str, function: Callable[..., Any], size: Callable[..., int]) -> None:
        def work(*args: Any) -> Any:
            nonlocal looks
            looks += size(args[0])
            return function(*args)

        module = exclusive if hasattr(exclusive, name_) else simplified
        monkeypatch.setattr(module, name_, work)

    counted("_values", exclusive._values, lambda _: 1)
    counted("_required", exclusive._required, lambda schema: len(schema["required"]))
    counted("_counted", simplified._counted, lambda schema: len(schema) + len(schema.get("enum", ())))
    num = []
    for n in (2**16, 2**17):
        looks, schema = 0, json.loads(SCHEMAS[name](n))
        assert simplified.simplified(schema) == schema
        num.append(looks)
    assert num[1] < 2.5 * num[0]


def test_a_large_union_that_is_used_often_is_rewritten() -> None:
    kinds = [f"k{i}" for i in range(100)]
    models = {
        kind: {
            "type": "object",
            "required": ["a", "b", "c", "kind"],
            "properties": {"kind": {"const": kind}, "a": {}, "b": {}, "c": {}},
        }
        for kind in kinds
    }
    union = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}
    made = simplified.simplified({"$defs": models, "properties": {f"p{i}": union for i in range(50)}})
    assert all(list(one) == ["anyOf"] for one in made["properties"].values())


def test_formats_that_write_texts_without_quotes_ignore_a_length_that_no_text_reaches() -> None:
    assert text_body({"type": "string", "maxLength": 2**60}) == text_body({"type": "string"})
    assert text_body({"type": "string", "maxLength": 9}) != text_body({"type": "string"})
