"""Valid parameters of structured outputs, and the errors for invalid ones."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.client.inputs.structured_params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"é": {"type": "string"}}}


class Model:
    """As pydantic's."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"json": SCHEMA}, {"json": json.dumps(SCHEMA, ensure_ascii=False)}),
        ({"json": '{"type":"object"}'}, {"json": '{"type":"object"}'}),
        ({"json": Model}, {"json": json.dumps(SCHEMA, ensure_ascii=False)}),
        ({"json": {}}, {"json": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": r"\d+"}, {"regex": r"\d+"}),
        ({"choice": ("né", "no")}, {"choice": ["né", "no"]}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structural_tag": {"type": "structural_tag"}}, {"structural_tag": '{"type": "structural_tag"}'}),
    ],
)
def test_each_kind_is_sent_as_its_source_text(given: dict[str, Any], sent: dict[str, Any]) -> None:
    on_the_wire = StructuredOutputsParams(**given).on_the_wire()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(on_the_wire)) == sent


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "structured_outputs must have one of json, json_object, regex, .*, and has none"),
        ({"json_object": False}, ValueError, "structured_outputs must have one of"),
        ({"json": {}, "regex": "a"}, ValueError, "structured_outputs must have .*, not both json and regex"),
        ({"json_object": "yes"}, TypeError, "json_object must be True or False, not 'yes'"),
        ({"regex": 5}, TypeError, "regex must be a string, not 5"),
        ({"regex": ""}, ValueError, "regex must not be empty"),
        ({"choice": "yes"}, TypeError, "choice must be a list of strings, not 'yes'"),
        ({"choice": []}, ValueError, "choice must not be empty"),
        ({"choice": [1]}, TypeError, "choice must be a list of strings"),
        ({"json": [1]}, TypeError, "json must be a dict or JSON text, not "),
        ({"json": {"enum": {1, 2}}}, TypeError, "json is not valid JSON: "),
        ({"json": {"const": float("inf")}}, ValueError, "json is not valid JSON: "),
        ({"structural_tag": 1}, TypeError, "structural_tag must be a dict or JSON text, not 1"),
    ],
)
def test_an_invalid_value_is_named(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^{words}"):
        StructuredOutputsParams(**given)


def test_a_schema_that_contains_itself_is_rejected() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = {"a": schema}
    with pytest.raises(ValueError, match=r"^json is not valid JSON: "):
        StructuredOutputsParams(json=schema)
