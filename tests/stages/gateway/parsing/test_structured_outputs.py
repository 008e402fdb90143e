"""Every way to request structured outputs gives one grammar and the name of its field."""

import json
from typing import Any

import pytest

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.gate import CHAT, COMPLETION
from tests.stages.gateway.parsing.bodies import chat, completion
from tests.stages.gateway.parsing.test_sampling_fields import refused_by

LIMITS = RequestLimits(model="tiny", max_sequences=64, caps=Caps(max_grammar_bytes=1024))
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


GRAMMARS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        "closed_schema",
        SCHEMA,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        "closed_schema",
        SCHEMA,
        "response_format.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        "closed_schema",
        SCHEMA,
        "response_format.schema",
    ),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        "structural_tag",
        {"type": "structural_tag", **TAG},
        "response_format",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA, "structured_outputs.json"),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        "closed_schema",
        SCHEMA,
        "structured_outputs.json",
    ),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "compact_json_schema",
        SCHEMA,
        "structured_outputs.json",
    ),
    (
        {
            "structured_outputs": {
                "json": SCHEMA,
                "disable_any_whitespace": True,
                "disable_additional_properties": True,
            }
        },
        "compact_closed_schema",
        SCHEMA,
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        "compact_json_object",
        None,
        "structured_outputs.json_object",
    ),
    (
        {"structured_outputs": {"structural_tag": TAG, "disable_any_whitespace": True}},
        "compact_structural_tag",
        TAG,
        "structured_outputs.structural_tag",
    ),
    (
        {"structured_outputs": {"choice": ["a b"], "disable_any_whitespace": True}},
        "choice",
        ["a b"],
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"choice": ["a", 'é"']}}, "choice", ["a", 'é"'], "structured_outputs.choice"),
    (
        {"structured_outputs": {"structural_tag": json.dumps(TAG), "regex": None, "json_object": False}},
        "structural_tag",
        TAG,
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
]


class TestGrammars:
    @pytest.mark.parametrize(("fields", "kind", "source", "param"), GRAMMARS)
    def test_json_fields_give_a_grammar(self, fields: dict[str, Any], kind: str, source: Any, param: str) -> None:
        for parse in (chat, completion):
            grammar = parse(**fields).options.grammar
            assert grammar is not None
            assert (grammar.kind, grammar.param) == (kind, param)
            assert (json.loads(grammar.source) if grammar.source else None) == source

    def test_text_grammars_are_unchanged(self) -> None:
        for kind in ("regex", "grammar"):
            assert chat(structured_outputs={kind: "[é]+"}).options.grammar == m.Grammar(
                kind, "[é]+", f"structured_outputs.{kind}"
            )
            assert chat(**{f"guided_{kind}": "[é]+"}).options.grammar == m.Grammar(kind, "[é]+", f"guided_{kind}")

    def test_a_schema_is_unchanged(self) -> None:
        body = b'{"model":"tiny","prompt":"x","guided_json": { "const" : 1.50, "a":"\\u00e9", "a":2 } }'
        grammar = parse_completion(body, LIMITS).options.grammar
        assert grammar is not None and grammar.source == '{ "const" : 1.50, "a":"\\u00e9", "a":2 }'

    @pytest.mark.parametrize(
        "fields",
        [
            {"response_format": {"type": "text"}},
            {"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None},
        ],
    )
    def test_no_structured_output_is_the_default(self, fields: dict[str, Any]) -> None:
        assert chat(**fields) == chat()

    def test_a_text_format_can_be_combined_with_a_grammar(self) -> None:
        assert chat(response_format={"type": "text"}, guided_regex="a").options.grammar is not None


FORMAT = "response_format"
OUTPUTS = "structured_outputs"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({FORMAT: "json"}, FORMAT, "an object"),
    ({FORMAT: {}}, f"{FORMAT}.type", "is required"),
    ({FORMAT: {"type": "xml"}}, f"{FORMAT}.type", "one of text, json_object"),
    ({FORMAT: {"type": "json_schema"}}, f"{FORMAT}.json_schema", "is required"),
    ({FORMAT: {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{FORMAT}.json_schema.schema", "is required"),
    (
        {FORMAT: {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        f"{FORMAT}.json_schema.schema",
        "must be an object",
    ),
    ({FORMAT: {"type": "json_object", "schema": "{}"}}, f"{FORMAT}.schema", "must be an object"),
    (
        {FORMAT: {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
        f"{FORMAT}.schema",
        "cannot be combined",
    ),
    ({FORMAT: {"type": "structural_tag"}}, f"{FORMAT}.format", "is required"),
    ({OUTPUTS: {}}, OUTPUTS, "and has none"),
    ({OUTPUTS: {"json_object": False}}, OUTPUTS, "and has none"),
    ({OUTPUTS: {"regex": "a", "choice": ["a"]}}, OUTPUTS, "not both regex and choice"),
    ({OUTPUTS: {"json": 5}}, f"{OUTPUTS}.json", "an object or a string that holds one"),
    ({OUTPUTS: {"json": "true"}}, f"{OUTPUTS}.json", "an object or a string that holds one"),
    ({OUTPUTS: {"regex": ""}}, f"{OUTPUTS}.regex", "must not be empty"),
    ({OUTPUTS: {"regex": 5}}, f"{OUTPUTS}.regex", "a string"),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice", "must not be an empty array"),
    ({OUTPUTS: {"choice": ["a", 5]}}, f"{OUTPUTS}.choice[1]", "a string"),
    ({OUTPUTS: {"regex": "a", "whitespace_pattern": " "}}, f"{OUTPUTS}.whitespace_pattern", "not supported"),
    ({"guided_regex": "x" * 1025}, "guided_regex", "limits.max_grammar_bytes"),
    ({"guided_regex": "é" * 513}, "guided_regex", "1026 bytes"),
    ({"guided_choice": ["x" * 600, "y" * 600]}, "guided_choice", "limits.max_grammar_bytes"),
    ({"guided_json": {"x": "y" * 1024}}, "guided_json", "limits.max_grammar_bytes"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "cannot be combined"),
    ({FORMAT: {"type": "json_object"}, OUTPUTS: {"regex": "a"}}, f"{OUTPUTS}.regex", "cannot be combined"),
]


class TestInvalidFields:
    @pytest.mark.parametrize(("fields", "param", "words"), BAD)
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        for body, parse in ((CHAT, parse_chat), (COMPLETION, parse_completion)):
            error = refused_by(LIMITS, body | fields, parse)
            assert (error.status, error.param) == (400, param)
            assert words in error.message

    @pytest.mark.parametrize(
        "raw",
        [
            b'{"a":"\xff"}',
            b'"\xff"',
            b'{"a":NaN}',
            b'"\\ud800"',
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"a":1',
            b"{]",
            b'"{',
        ],
    )
    def test_invalid_json_is_400(self, raw: bytes) -> None:
        for name in (b'"guided_json":%s', b'"structured_outputs":{"json":%s}'):
            body = b'{"model":"tiny","prompt":"x",' + name % raw + b"}"
            with pytest.raises(Exception) as raised:
                parse_completion(body, LIMITS)
            assert getattr(raised.value, "status", None) == 400, raised.value
