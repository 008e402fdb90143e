"""A token's offset is the number of characters that begin before it, wherever the text is cut, whenever it comes."""

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.replies.text_offsets import TextOffsets


def expected(pieces: list[bytes]) -> list[int]:
    """Of pieces that are a text as a whole: characters whose first byte comes before, less the one that goes on."""
    offsets, data = [], b"".join(pieces)
    begin = 0
    for piece in pieces:
        num = sum((byte & 0xC0) != 0x80 for byte in data[:begin])
        is_within = begin < len(data) and (data[begin] & 0xC0) == 0x80
        offsets.append(num - is_within)
        begin += len(piece)
    return offsets


def cut(data: bytes, places: tuple[int, ...]) -> list[bytes]:
    ends = [*places, len(data)]
    return [data[begin:end] for begin, end in zip([0, *places], ends, strict=True)]


def test_at_every_cut_of_a_text_of_all_lengths_of_characters() -> None:
    data = "aé€😀z".encode()
    for num in range(4):
        for places in combinations(range(1, len(data)), num):
            pieces = cut(data, places)
            offsets = TextOffsets()
            offsets.feed(data.decode())
            assert [offsets.place(piece) for piece in pieces] == expected(pieces)


@given(st.text(), st.data())
def test_whenever_the_text_comes(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    places = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))) if len(raw) > 1 else ()
    pieces = cut(raw, places)
    offsets = TextOffsets()
    told = []
    given_out = 0
    for piece in pieces:
        end = data.draw(st.integers(given_out, len(text)))
        offsets.feed(text[given_out:end])
        given_out = end
        told.append(offsets.place(piece))
    assert told == expected(pieces)


def test_special_tokens_that_are_not_shown_take_no_characters() -> None:
    offsets = TextOffsets()
    offsets.feed("ab")
    assert [offsets.place(piece) for piece in (b"<s>", b"a", b"<|im_end|>", b"b", b"</s>")] == [0, 0, 1, 1, 2]


def test_nor_where_it_shows_later() -> None:
    offsets = TextOffsets()
    assert [offsets.place(b"<|im_end|>"), offsets.place(b"a")] == [0, 10]  # as far as anybody knows
    offsets.feed("ab")
    assert [offsets.place(b"b"), offsets.place(b"c")] == [1, 2]


def test_those_that_are_shown_take_theirs() -> None:
    offsets = TextOffsets()
    offsets.feed("<s>a<b>")
    assert [offsets.place(piece) for piece in (b"<s>", b"a", b"<b>", b"c")] == [0, 3, 4, 7]


def test_bytes_that_make_no_character_are_one_each_time_they_break_off() -> None:
    offsets = TextOffsets()
    offsets.feed("\ufffdx\ufffdé")
    assert [offsets.place(piece) for piece in (b"\xf0\x9f", b"x", b"\xf0", b"\xc3\xa9")] == [0, 1, 2, 3]


def test_the_space_that_a_text_does_not_begin_with() -> None:
    offsets = TextOffsets()
    offsets.feed("Hello there")
    assert [offsets.place(piece) for piece in (b"<s>", b" Hello", b" there")] == [0, 0, 5]


@pytest.mark.parametrize("text", ["Ａｂ c", "xxxxx"])
def test_a_text_that_was_written_otherwise_is_counted_by_its_tokens(text: str) -> None:
    offsets = TextOffsets()
    offsets.feed(text)
    assert [offsets.place(piece) for piece in (b"ab", b" c")] == [0, 2]


def test_text_that_was_left_out_counts_as_if_it_were_there() -> None:
    offsets = TextOffsets()
    offsets.feed("a")
    assert [offsets.place(piece) for piece in (b"a", b"EN", b"D", b"!")] == [0, 1, 3, 4]


def test_many_tokens_whose_text_does_not_come_cost_no_more_each() -> None:
    """Those that are hidden at the end of a text wait for it in vain."""

    def seconds(num: int) -> float:
        offsets = TextOffsets()
        begin_s = time.process_time()
        for _ in range(num):
            offsets.place(b"</s>")
        return time.process_time() - begin_s

    assert seconds(20_000) < 40 * max(seconds(2_000), 0.002)
