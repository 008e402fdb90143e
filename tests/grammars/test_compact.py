"""JSON without white space, for clients that request it."""

import json

import pytest

from pipeline.grammars.engine import Engine
from tests.grammars.walks import accepts, matcher_of, walk

SCHEMA = {
    "type": "object",
    "properties": {"a b": {"type": "array", "items": {"type": "integer"}, "minItems": 2}, "c": {"const": [1, "x y"]}},
    "required": ["a b", "c"],
}
VALUE = {"a b": [1, 2], "c": [1, "x y"]}


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "closed_schema"])
def test_compact_json_has_white_space_only_in_strings(tiny_engine: Engine, kind: str) -> None:
    source = "" if kind == "json_object" else json.dumps(SCHEMA)
    matcher = matcher_of(tiny_engine, f"compact_{kind}", source)
    assert accepts(tiny_engine, matcher, json.dumps(VALUE, separators=(",", ":")))
    for text in (json.dumps(VALUE), json.dumps(VALUE, indent=1), json.dumps(VALUE, separators=(",", ":")) + " "):
        assert not accepts(tiny_engine, matcher, text)
        assert accepts(tiny_engine, matcher_of(tiny_engine, kind, source), text.rstrip())


def test_random_outputs_are_compact(tiny_engine: Engine) -> None:
    matcher = matcher_of(tiny_engine, "compact_closed_schema", json.dumps(SCHEMA))
    texts = [text for seed in range(20) if (text := walk(tiny_engine, matcher, seed)) is not None]
    assert len(texts) > 5
    for text in texts:
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_compact_json_obeys_closed_schemas_and_escapes(tiny_engine: Engine) -> None:
    closed = matcher_of(tiny_engine, "compact_closed_schema", json.dumps(SCHEMA))
    assert not accepts(tiny_engine, closed, '{"a b":[1,2],"c":[1,"x y"],"d":1}')
    assert accepts(tiny_engine, matcher_of(tiny_engine, "compact_json_object", ""), '{"d":"\\n"}')
    assert not accepts(tiny_engine, matcher_of(tiny_engine, "compact_json_object", ""), '{"\\u0064":1}')


def test_the_schema_of_a_structural_tag_is_compact_too(tiny_engine: Engine) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    matcher = matcher_of(tiny_engine, "compact_structural_tag", json.dumps(tag))
    assert accepts(tiny_engine, matcher, f"a b <f>{json.dumps(VALUE, separators=(',', ':'))}</f>")
    assert not accepts(tiny_engine, matcher, f"a b <f>{json.dumps(VALUE)}</f>")
