"""Word wrap of streamed answers, on an emulated terminal."""

import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pipeline.cli.chat.wrapping import WordWrap

WIDTH = 12


def shown(pieces: list[str], width: int = WIDTH) -> list[str]:
    """The lines of a terminal after the pieces. Knows line ends, movements to the left, and the erasing of a line's
    end."""
    wrap = WordWrap()
    lines = [""]
    column = 0
    for piece in pieces:
        for control, text in re.findall(r"(\x1b\[\d*[A-Z])|([^\x1b])", wrap.feed(piece, width)):
            if control.endswith("D"):
                column -= int(control[2:-1])
            elif control:
                lines[-1] = lines[-1][:column]
            elif text == "\n":
                lines.append("")
                column = 0
            else:
                assert cell_len(lines[-1]) + cell_len(text) <= width, "the terminal would break the line itself"
                lines[-1] += text
                column = len(lines[-1])
    return [line.rstrip() for line in lines]


def test_lines_break_between_words() -> None:
    assert shown(["a few words of text"]) == ["a few words", "of text"]
    assert shown(["a\nfew  words\n\n", "of text"]) == ["a", "few  words", "", "of text"]


def test_a_word_that_arrives_in_pieces_moves_as_a_whole() -> None:
    assert shown(["a few wo", "rd", "sth", "en"]) == ["a few", "wordsthen"]


def test_a_word_longer_than_a_line_is_broken() -> None:
    assert shown(["an " + "x" * 30]) == ["an", "x" * 12, "x" * 12, "x" * 6]


def test_chinese_text_breaks_anywhere_and_counts_two_columns() -> None:
    assert shown(["the 一二三四五六七"]) == ["the 一二三四", "五六七"]


def test_tabs_are_spaces_up_to_the_next_multiple_of_eight() -> None:
    assert shown(["\tabc"]) == ["        abc"]


@given(st.text("ab \n\t一é", max_size=80), st.lists(st.integers(0, 80), max_size=8), st.integers(4, 20))
def test_the_pieces_make_no_difference_and_nothing_is_lost(text: str, cuts: list[int], width: int) -> None:
    edges = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    lines = shown(pieces, width)
    assert lines == shown([text], width)
    assert "".join("".join(lines).split()) == "".join(text.split())
