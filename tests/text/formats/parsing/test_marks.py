"""Marks are found in streamed text."""

import re

from hypothesis import given
from hypothesis import strategies as st

from pipeline.text.formats.parsing.marks import MAX_NESTING, pattern_of

marks = st.lists(st.text("ab<|/.", min_size=1, max_size=6), min_size=1, max_size=12)


@given(marks, st.text("ab<|/.", max_size=30))
def test_the_longest_mark_is_found(some: list[str], text: str) -> None:
    found = pattern_of(some)
    assert found is not None
    longest_first = sorted(set(some), key=len, reverse=True)
    assert found.findall(text) == re.findall("|".join(map(re.escape, longest_first)), text)


def test_marks_share_their_beginnings() -> None:
    """Else each `<` of a text is compared with all of them: 20,000 characters took 3 s with 100,000 tokens."""
    found = pattern_of([f"<x{i:03d}>" for i in range(1000)])
    assert found is not None and found.pattern.startswith("<x(?:0(?:0(?:0>|1>")
    assert found.pattern.count("<") == found.pattern.count("x") == 1


def test_marks_that_begin_alike_nest_to_a_limit() -> None:
    some = ["a" * n for n in range(1, 20 * MAX_NESTING)]
    found = pattern_of(some)
    assert found is not None
    match = found.search("b" + "a" * 100 + "b")
    assert match is not None and match.span() == (1, 101)
    assert pattern_of([]) is None
