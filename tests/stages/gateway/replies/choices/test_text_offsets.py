"""A token's offset is the number of characters before it, for every split and timing of the text."""

import time
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.replies.text_offsets import TextOffsets


def expected(pieces: list[bytes]) -> list[int]:
    """Offsets of pieces that join to a text: characters that begin before each, except one that continues in it."""
    offsets, data = [], b"".join(pieces)
    begin = 0
    for piece in pieces:
        num = sum((byte & 0xC0) != 0x80 for byte in data[:begin])
        is_within = begin < len(data) and (data[begin] & 0xC0) == 0x80
        offsets.append(num - is_within)
        begin += len(piece)
    return offsets


def cut(data: bytes, cuts: tuple[int, ...]) -> list[bytes]:
    ends = [*cuts, len(data)]
    return [data[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]


def test_offsets_are_correct_for_every_split_of_multibyte_text() -> None:
    data = "aé€😀z".encode()
    for num in range(4):
        for cuts in combinations(range(1, len(data)), num):
            pieces = cut(data, cuts)
            offsets = TextOffsets()
            offsets.feed(data.decode())
            assert [offsets.offset_of(piece) for piece in pieces] == expected(pieces)


@given(st.text(), st.data())
def test_offsets_do_not_depend_on_when_the_text_arrives(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))))) if len(raw) > 1 else ()
    pieces = cut(raw, cuts)
    offsets = TextOffsets()
    offsets_found = []
    num_fed = 0
    for piece in pieces:
        end = data.draw(st.integers(num_fed, len(text)))
        offsets.feed(text[num_fed:end])
        num_fed = end
        offsets_found.append(offsets.offset_of(piece))
    assert offsets_found == expected(pieces)


def test_hidden_special_tokens_take_no_characters() -> None:
    offsets = TextOffsets()
    offsets.feed("ab")
    assert [offsets.offset_of(piece) for piece in (b"<s>", b"a", b"<|im_end|>", b"b", b"</s>")] == [0, 0, 1, 1, 2]


def test_hidden_special_tokens_are_detected_when_the_text_arrives() -> None:
    offsets = TextOffsets()
    assert [offsets.offset_of(b"<|im_end|>"), offsets.offset_of(b"a")] == [0, 10]  # unknown before the text arrives
    offsets.feed("ab")
    assert [offsets.offset_of(b"b"), offsets.offset_of(b"c")] == [1, 2]


def test_visible_special_tokens_take_their_characters() -> None:
    offsets = TextOffsets()
    offsets.feed("<s>a<b>")
    assert [offsets.offset_of(piece) for piece in (b"<s>", b"a", b"<b>", b"c")] == [0, 3, 4, 7]


def test_each_truncated_character_counts_as_one() -> None:
    offsets = TextOffsets()
    offsets.feed("\ufffdx\ufffdé")
    assert [offsets.offset_of(piece) for piece in (b"\xf0\x9f", b"x", b"\xf0", b"\xc3\xa9")] == [0, 1, 2, 3]


def test_a_stripped_leading_space_does_not_count() -> None:
    offsets = TextOffsets()
    offsets.feed("Hello there")
    assert [offsets.offset_of(piece) for piece in (b"<s>", b" Hello", b" there")] == [0, 0, 5]


@pytest.mark.parametrize("text", ["Ａｂ c", "xxxxx"])
def test_normalized_text_is_counted_by_its_tokens(text: str) -> None:
    offsets = TextOffsets()
    offsets.feed(text)
    assert [offsets.offset_of(piece) for piece in (b"ab", b" c")] == [0, 2]


def test_a_normalized_space_within_the_text_is_counted() -> None:
    """Only one at the beginning may have been dropped."""
    offsets = TextOffsets()
    offsets.feed("ab\tc d")
    assert [offsets.offset_of(piece) for piece in (b"ab", b" ", b"c", b" d")] == [0, 2, 3, 4]


def test_removed_text_still_counts() -> None:
    offsets = TextOffsets()
    offsets.feed("a")
    assert [offsets.offset_of(piece) for piece in (b"a", b"EN", b"D", b"!")] == [0, 1, 3, 4]


def test_many_tokens_without_text_take_linear_time() -> None:
    """Hidden tokens at the end of a text never get any."""

    def seconds(num: int) -> float:
        offsets = TextOffsets()
        begin_s = time.process_time()
        for _ in range(num):
            offsets.offset_of(b"</s>")
        return time.process_time() - begin_s

    assert seconds(20_000) < 40 * max(seconds(2_000), 0.002)
