"""Stop strings: where the text ends, in whatever pieces it arrives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.detokenize.stop_matcher import StopMatcher, StopStrings
from tests.slices import part_of


def match_pieces(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop=include_stop)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.found is not None:
            return shown, matcher.found
    return shown + matcher.finish(), None


def expected(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    """The rule: of the matches that are complete first, the longest."""
    for end in range(1, len(text) + 1):
        if found := max((stop for stop in stops if stop and text[:end].endswith(stop)), key=len, default=None):
            return text[: end if include_stop else end - len(found)], found
    return text, None


@settings(max_examples=part_of(500, 125), deadline=None)
@given(
    stops=st.lists(st.text("abé", max_size=5), max_size=6),
    pieces=st.lists(st.text("abé", max_size=6), max_size=12),
    include_stop=st.booleans(),
)
def test_any_pieces_follow_the_rule(stops, pieces, include_stop):
    assert match_pieces(stops, pieces, include_stop=include_stop) == expected(stops, "".join(pieces), include_stop)


@settings(max_examples=part_of(300, 75), deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), text=st.text("abc", max_size=30))
def test_only_a_possible_start_of_a_stop_string_is_held_back(stops, text):
    matcher = StopMatcher(StopStrings(stops), include_stop=False)
    shown = ""
    for index, character in enumerate(text, 1):
        shown += matcher.push(character)
        if matcher.found is not None:
            return
        held = max(
            length
            for length in range(index + 1)
            if length == 0 or any(stop.startswith(text[index - length : index]) for stop in stops)
        )
        assert shown == text[: index - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["END"], ["abENDcd"], "ab", "END"),
        (["END"], ["ab", "E", "N", "D", "x"], "ab", "END"),
        (["END"], ["abEN"], "abEN", None),
        (["END"], ["abEN", "O"], "abENO", None),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["bcd", "d"], ["abcd"], "a", "bcd"),
        (["a", "ab"], ["ab"], "", "a"),
        (["\n\n"], ["x\n", "\ny"], "x", "\n\n"),
        (["🤖"], ["x🤖"], "x", "🤖"),
        (["", ""], ["x"], "x", None),
        ([], ["x"], "x", None),
    ],
)
def test_cases(stops, pieces, shown, found):
    assert match_pieces(stops, pieces) == (shown, found)


def test_with_include_stop_nothing_is_held_back():
    matcher = StopMatcher(StopStrings(["END"]), include_stop=True)
    assert matcher.push("aEN") == "aEN"
    assert matcher.push("Dx") == "D"
    assert matcher.found == "END"


def test_each_character_is_examined_once(monkeypatch):
    """A text full of starts and thousands of stop strings: there are never more steps back than characters."""
    stops = StopStrings(["a" * 50 + chr(0x4E00 + i) for i in range(2000)])
    matcher = StopMatcher(stops, include_stop=False)
    num_steps = 0

    class Counting(list):
        def __getitem__(self, index):
            nonlocal num_steps
            num_steps += 1
            return super().__getitem__(index)

    monkeypatch.setattr(stops, "_fallback", Counting(stops._fallback))
    for _ in range(5000):
        matcher.push("aaab")
    assert 0 < num_steps <= 4 * 5000


def test_strings_that_no_text_matches_cost_nothing() -> None:
    """Hundreds of requests may come at once, each with other long strings: what is built holds up all output."""
    stops = StopStrings(chr(97 + index) + "xy" * 127 for index in range(16))
    assert stops.num_nodes == 1
    matcher = StopMatcher(stops, include_stop=False)
    shown = ""
    for num_matched in range(1, 255):
        before = stops.num_nodes
        shown += matcher.push(("a" + "xy" * 127)[num_matched - 1])
        assert stops.num_nodes - before <= 16, "one level with a character"
        assert stops.num_nodes <= 16 * num_matched + 1
    assert shown == "" and matcher.push("y") == "" and matcher.found == "a" + "xy" * 127
    assert stops.num_nodes == 16 * 255 + 1
