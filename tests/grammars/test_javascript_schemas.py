"""What zod 3 and 4 and TypeBox write is enforced, or refused by name: as a response's format and as arguments of tools.

javascript_schemas.mjs makes the schemas, by the libraries themselves, and the texts.
"""

import json
import re
from pathlib import Path

import msgspec
import pytest

from pipeline.grammars.engine import Engine
from pipeline.grammars.simplified import EQUAL_PATTERNS
from pipeline.text.formats.grammar.schema_types import as_json, property_types
from tests.grammars.walks import accepts, check, matcher_of


class Case(msgspec.Struct, frozen=True):
    of: list[str]
    name: str
    good: list[str]
    bad: list[str]
    schema: msgspec.Raw

    @property
    def source(self) -> str:
        return bytes(self.schema).decode()


class File(msgspec.Struct):
    cases: list[Case]


PATH = Path(__file__).parents[1] / "data" / "javascript_schemas.json"
CASES = msgspec.json.decode(PATH.read_bytes(), type=File).cases
LIBRARIES = sorted({library for case in CASES for library in case.of})

REFUSED = {
    ("pattern that looks ahead", "zod 3"): "look-around",
    ("pattern that looks ahead", "zod 4"): "look-around",
    ("hostname", "zod 4"): "look-around",
    ("set", "zod 3"): '"uniqueItems"',
    ("array of different items", "TypeBox 0.34"): '"uniqueItems"',
    ("array of different items", "TypeBox 1"): '"uniqueItems"',
    ("array that contains", "TypeBox 0.34"): '"contains", "minContains"',
    ("array that contains", "TypeBox 1"): '"contains", "minContains"',
    ("record by uuid", "zod 4"): '"propertyNames"',
    ("closed intersection", "TypeBox 0.34"): '"unevaluatedProperties"',
    ("closed intersection", "TypeBox 1"): '"unevaluatedProperties"',
    ("not", "TypeBox 0.34"): '"not"',
    ("regular expression", "TypeBox 0.34"): "Invalid type: RegExp",
    ("intersection of unions", "zod 3"): "required property 'v' is unsatisfiable",  # its unions are closed
    ("document, relative refs", "zod 3"): r"\$ref\" names '(3|1/home)', which is no part of the schema",
    ("document, title", "zod 3"): r"\$ref\" names '/definitions/User/properties/home', which is no part",
}
"""Parts of the errors, as regular expressions."""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", ["json_schema", "closed_schema"])
def test_schemas_are_enforced_or_refused_by_name(tiny_engine: Engine, library: str, kind: str) -> None:
    for case in CASES:
        if library not in case.of:
            continue
        if words := REFUSED.get((case.name, library)):
            assert re.search(words, check(tiny_engine, kind, case.source).error), case
            continue
        matcher = matcher_of(tiny_engine, kind, case.source)
        assert all(accepts(tiny_engine, matcher, text) for text in case.good), case
        assert not any(accepts(tiny_engine, matcher, text) for text in case.bad), case


def test_each_refused_case_is_there() -> None:
    assert REFUSED.keys() <= {(case.name, library) for case in CASES for library in case.of}
    assert sum(len(case.good) for case in CASES) > 300 and sum(len(case.bad) for case in CASES) > 300


@pytest.mark.parametrize("library", LIBRARIES)
def test_arguments_without_quotes_have_the_types_of_the_schema(library: str) -> None:
    """Formats such as Qwen3-Coder's write strings bare."""
    for case in CASES:
        types = property_types(case.source)
        for text in case.good if library in case.of else ():
            value = json.loads(text)
            for name, one in value.items() if isinstance(value, dict) else ():
                if types.get(name) is not None or not isinstance(one, str):
                    bare = one if isinstance(one, str) else json.dumps(one)
                    assert json.loads(as_json(bare, types.get(name))) == one, (case, name)


PARTS: dict[str, tuple[str, ...]] = {
    "P": ("", "1", "T", "W", "1W", "2Y", "3M", "4D", "T5H", "T6M", "T7S", "T8.5S", "T9,5S", "1.5D", "T1H2M3S", "1M2Y"),
    "DE": ("00", "01", "02", "10", "98", "99", "370", "3704004405320130", "a"),
    "": ("👍", "🇩", "\u20e3", "1", "👨\u200d👩", "a", "#\ufe0f\u20e3"),
}
"""Beginnings of texts, and what may follow, also twice."""


@pytest.mark.parametrize("pattern", EQUAL_PATTERNS, ids=range(len(EQUAL_PATTERNS)))
def test_patterns_without_look_around_match_the_same(pattern: str) -> None:
    """By Python's expressions, which have no classes of emoji."""
    classes = {
        r"\p{Extended_Pictographic}": "👍👨👩",
        r"\p{Emoji_Component}": "0-9#*\u200d\u20e3\ufe0f🇦-🇿",
        r"\p{Regional_Indicator}": "🇦-🇿",
    }

    def compiled(text: str) -> re.Pattern[str]:
        for name, chars in classes.items():
            text = text.replace(name, chars)
        return re.compile(text, re.ASCII)

    old, new = compiled(pattern), compiled(EQUAL_PATTERNS[pattern])
    texts = [start + one + two for start, parts in PARTS.items() for one in parts for two in ("", *parts)]
    texts += ["a@b.de", ".a@b.de", "a..b@c.de", "a.b@c.d-e.fg", "a.@b.de", "@b.de", "a@b", "'a+_-@1.aa"]
    texts += [f"DE{number:02}3704004405320" for number in range(100)]
    found = [text for text in texts if bool(old.search(text)) != bool(new.search(text))]
    assert not found
    assert any(old.search(text) for text in texts) and not all(old.search(text) for text in texts)
