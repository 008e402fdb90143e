"""Outputs that match a JSON schema validate: against the JSON-Schema-Test-Suite, and on random schemas."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import utils as conjecture
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator

from pipeline.grammars.engine import Engine
from pipeline.grammars.format_names import KNOWN, LIKE
from tests.grammars.walks import accepts, check, matcher_of, walk
from tests.slices import ALL_CASES, part_of
from tools.benchmarks import structured as benchmark

SUITE = json.loads((Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text())["files"]

MAX_ORDERS = 150


def more(many: Any) -> bool:
    """An attribute that hypothesis removed and hypothesis-jsonschema needs."""
    if not hasattr(many, "levels"):
        many.levels = iter(many.__enter__())
    if next(many.levels, many) is many:
        many.__exit__(None)
        return False
    return True


conjecture.many.more = more  # type: ignore[attr-defined]

Case = tuple[str, dict[str, Any]]


def orders(value: Any, limit: int = MAX_ORDERS) -> Iterator[Any]:
    """A value with its objects' properties in all orders: outputs use the schema's order, tests may not."""
    if isinstance(value, dict):
        names = list(value)
        inner = [list(orders(part, 30)) for part in value.values()]
        orderings = (
            {names[i]: parts[i] for i in order}
            for order in itertools.permutations(range(len(names)))
            for parts in itertools.product(*inner)
        )
        yield from itertools.islice(orderings, limit)
    elif isinstance(value, list):
        lists = (list(parts) for parts in itertools.product(*(list(orders(part, 30)) for part in value)))
        yield from itertools.islice(lists, limit)
    else:
        yield value


def widest(value: Any) -> int:
    """The largest number of properties of an object in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max([len(value) if isinstance(value, dict) else 0, *map(widest, inner)])


def is_accepted(engine: Engine, matcher: Any, value: Any) -> bool:
    return any(accepts(engine, matcher, json.dumps(ordering, ensure_ascii=False)) for ordering in orders(value))


def groups() -> Iterator[Case]:
    for file, tests in SUITE.items():
        for group in tests:
            yield file, group


def is_supported(engine: Engine, group: dict[str, Any]) -> bool:
    return not check(engine, "json_schema", json.dumps(group["schema"])).error


def has_whole_float(value: Any) -> bool:
    match value:
        case float():
            return value.is_integer()
        case dict():
            return any(map(has_whole_float, value.values()))
        case list():
            return any(map(has_whole_float, value))
    return False


def reason_never_generated(file: str, value: Any) -> str:
    """The reason why no output is this valid instance: outputs need not cover all of them."""
    if has_whole_float(value):
        return "whole numbers have no point and no exponent"
    if file == "optional/bignum.json" and isinstance(value, int) and abs(value) > 2**53:
        return "bounds beyond the library's numbers become tighter"
    if file == "format.json" or file.startswith("optional/format/"):
        return "`format` is enforced, and rarer forms of some are not generated"
    if file == "optional/ecmascript-regex.json" and not str(value).isprintable():
        return "control characters without an escape letter, and U+FEFF, are not generated"
    return ""


def has_odd_format(schema: Any) -> bool:
    """Whether a format is an annotation, which every text passes."""
    return isinstance(schema, dict) and schema.get("format") not in (None, *KNOWN, *LIKE)


INEXACT_FORMATS = ("optional/format/date.json", "optional/format/date-time.json", "optional/format/time.json")
"""Here some outputs have the form of a date or a time, but are invalid: 29 February, a leap second at noon. `format` is
an annotation, which validators ignore by default."""


def test_valid_instances_are_accepted_and_others_are_not(tiny_engine: Engine) -> None:
    num_tests, wrong = 0, []
    for file, group in groups():
        if not is_supported(tiny_engine, group):
            continue
        matcher = matcher_of(tiny_engine, "json_schema", json.dumps(group["schema"]))
        for test in group["tests"]:
            num_tests += 1
            value, accepted = test["data"], is_accepted(tiny_engine, matcher, test["data"])
            if test["valid"] and not accepted and not reason_never_generated(file, value):
                wrong.append(("is valid but not accepted", file, group["description"], value))
            # ECMAScript's \S does not match U+FEFF, but Unicode's does.
            by_format = file in INEXACT_FORMATS or value == "\ufeff" or has_odd_format(group["schema"])
            if not test["valid"] and accepted and not by_format:
                wrong.append(("is not valid but accepted", file, group["description"], value))
    assert not wrong
    assert num_tests > 950


KEYWORDS = [
    *("unevaluatedProperties", "unevaluatedItems", "dynamicRef", "dynamicAnchor", "not", "oneOf", "if", "then", "else"),
    *("propertyNames", "contains", "maxContains", "minContains", "uniqueItems", "minProperties"),
    *("dependencies", "dependentSchemas", "dependentRequired"),
]


def test_unsupported_schemas_are_rejected_with_the_keyword(tiny_engine: Engine) -> None:
    reasons = {}
    for file, group in groups():
        error = check(tiny_engine, "json_schema", json.dumps(group["schema"])).error
        if error:
            reasons[file, group["description"]] = error
    assert 130 < len(reasons) < 170
    others = {error for error in reasons.values() if not any(word in error for word in KEYWORDS)}
    known = (
        "which is no part of the schema itself",  # another document
        "Expected positive integer",  # 2.0
        "Unsatisfiable schema",
        "Failed to generate regex for float range",  # beyond 64 bits
        "too many digits",
        "are not disjoint",  # of patternProperties
        "unrecognized escape sequence",
        "look-around",
        "control characters",
        "Unicode",
        "no text matches it",
        "circular references",
    )
    assert not [error for error in others if not any(part in error for part in known)]


def walk_all(engine: Engine, cases: list[Case], num_walks: int, max_ids: int) -> float:
    """Returns the fraction of the walks that ended. Fails if an output is invalid."""
    num_ended = 0
    for file, group in cases:
        matcher = matcher_of(engine, "json_schema", json.dumps(group["schema"]))
        for seed in range(num_walks):
            if (text := walk(engine, matcher, seed, max_ids)) is not None:
                num_ended += 1
                assert_valid(group["schema"], text, f"{file}: {group['description']}")
    return num_ended / (num_walks * len(cases))


def test_random_outputs_validate(tiny_engine: Engine) -> None:
    cases = [case for case in groups() if is_supported(tiny_engine, case[1])]
    assert len(cases) > 200
    assert walk_all(tiny_engine, cases, part_of(8, 3), 300) > 0.8


def test_random_outputs_of_a_real_vocabulary_validate(engine: Engine) -> None:
    cases = [case for case in groups() if is_supported(engine, case[1])][:: 2 if ALL_CASES else 8]
    assert walk_all(engine, cases, 1, 80) > 0.5


def as_python(schema: Any) -> Any:
    """ECMAScript's \\w and \\d are ASCII's."""
    if isinstance(schema, list):
        return [as_python(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: as_python(value) for key, value in schema.items()}
    if isinstance(pattern := changed.get("pattern"), str) and re.search(r"\\[wWdD]", pattern):
        changed["pattern"] = f"(?a){pattern}"
    return changed


def assert_valid(schema: Any, text: str, what: str) -> None:
    try:
        error = next(Draft202012Validator(as_python(schema)).iter_errors(json.loads(text)), None)
    except re.error:  # Python has no \p{…}
        assert "\\\\p" in json.dumps(schema)
        return
    assert error is None, f"{what}: {text!r} does not validate: {error.message}"


NAMES = st.sampled_from(["a", "b", "ä", 'q"', "line\n"])
SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-1000, 1000),
        st.integers(0, 300),
    ),
    st.builds(lambda step: {"type": "integer", "multipleOf": step}, st.integers(1, 30)),
    st.builds(
        lambda low, size, key: {"type": "number", key: low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(1, 30),
        st.sampled_from(["minimum", "exclusiveMinimum"]),
    ),
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-z]{2,5}$", "^(ab|c+)[0-9]$", "x", "^é.?")]),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text('ab/é"\\\n', max_size=4), st.booleans()), min_size=1, max_size=4),
    ),
    st.builds(
        lambda value: {"const": value},
        st.recursive(
            st.text("xy", max_size=2),
            lambda v: st.lists(v, max_size=2) | st.dictionaries(NAMES, v, max_size=2),
            max_leaves=3,
        ),
    ),
)


def compound(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
            schemas,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda properties, num, more: {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:num],
                "additionalProperties": more,
            },
            st.dictionaries(NAMES, schemas, max_size=3),
            st.integers(0, 3),
            st.one_of(st.just(False), schemas),
        ),
        st.builds(lambda first, second: {"anyOf": [first, second]}, schemas, schemas),
        st.builds(lambda first: {"$defs": {"one": first}, "allOf": [{"$ref": "#/$defs/one"}]}, schemas),
    )


SCHEMAS = st.recursive(SCALARS, compound, max_leaves=4)


@settings(
    max_examples=part_of(120, 40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_random_schemas(tiny_engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    # References refer to the whole document, and this becomes a part of one.
    assume(json.dumps(schema).count("$defs") in (0, 2) and ("$defs" not in json.dumps(schema) or "$defs" in schema))
    source = json.dumps(schema)
    made = check(tiny_engine, "json_schema", source)
    if made.error:
        assert "no text matches" in made.error or "Unsatisfiable" in made.error
        return
    matcher = tiny_engine.matcher(made.grammar)
    for seed in range(3):
        if (text := walk(tiny_engine, matcher, seed)) is not None:
            assert_valid(schema, text, source)
    instance = data.draw(from_schema(schema))
    text = json.dumps(instance, ensure_ascii=False)
    if widest(instance) <= 4 and not (has_whole_float(instance) or re.search(r"\de[-+]|\\u|\x7f", text)):
        assert is_accepted(tiny_engine, matcher, instance), (source, text)


@pytest.mark.parametrize("name", benchmark.SCHEMAS)
def test_the_benchmarks_schemas_allow_longer_outputs_than_it_requests(tiny_engine: Engine, name: str) -> None:
    schema = {"type": "array", "items": benchmark.SCHEMAS[name], "minItems": 1000}
    matcher = matcher_of(tiny_engine, "json_schema", json.dumps(schema))
    assert walk(tiny_engine, matcher, seed=1, max_ids=4 * benchmark.TOKENS.most) is None
