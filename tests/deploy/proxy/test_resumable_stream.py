"""Events are given out with the point behind them, however the bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.deploy.proxy.resumable_stream import ResumableStream

HEAD = b': point {"id":"cmpl-1"}\n'


def event(i: int) -> bytes:
    return b'data: {"text":"%d"}\n\n' % i


def point(i: int) -> bytes:
    return (HEAD if i == 0 else b"") + b": point 0 %d 0 AAAA\n\n" % i


WHOLE = b"".join(event(i) + point(i) for i in range(6)) + b"data: [DONE]\n\n"
EVENTS = b"".join(event(i) for i in range(6)) + b"data: [DONE]\n\n"
CUTS = st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@given(CUTS)
def test_any_cut_of_the_bytes_gives_the_same_events(cuts):
    stream = ResumableStream()
    given_out = b"".join(map(stream.feed, pieces(WHOLE, cuts)))
    assert given_out + stream.rest() == EVENTS
    assert b"".join(stream.points) == b"".join(point(i)[:-1] for i in range(6))
    assert stream.num_point_bytes == len(b"".join(stream.points)) and stream.num_outputs == 6


@given(CUTS, st.integers(0, len(WHOLE)))
def test_what_was_given_out_is_what_the_points_describe(cuts, end):
    stream = ResumableStream()
    given_out = b"".join(stream.feed(one[: max(0, end)]) for one in pieces(WHOLE[:end], [c for c in cuts if c <= end]))
    stream.lose()
    num = len(stream.points)
    assert given_out == b"".join(event(i) for i in range(num))
    again = b"".join(event(i) + point(i) for i in range(num, 6)) + b"data: [DONE]\n\n"
    assert given_out + stream.feed(again) + stream.rest() == EVENTS


def test_keep_alives_are_passed_on_at_once():
    stream = ResumableStream()
    assert stream.feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    assert stream.feed(event(0)) == b""
    assert stream.feed(point(0) + b": keep-alive\n\n") == event(0) + b": keep-alive\n\n"


def test_the_events_of_a_failure_are_held_back():
    stream = ResumableStream()
    stream.feed(event(0) + point(0))
    assert stream.feed(b": point failed stage_died\n\ndata: {}\n\n") == b""
    assert stream.failure == "stage_died" and stream.feed(b"data: [DONE]\n\n") == b""
    assert stream.rest() == b"data: {}\n\ndata: [DONE]\n\n"


def test_behind_off_everything_is_passed_on():
    stream = ResumableStream()
    assert stream.feed(event(0) + b": point off\n\n") == event(0)
    assert not stream.is_resumable
    assert stream.feed(b"data: x") + stream.feed(b"\n\n") == b"data: x\n\n"


class CountedBytes(bytearray):
    """Counts the bytes that searches may read."""

    num_read = 0

    def find(self, sub, start=0, end=None, /):
        self.num_read += len(self) - start
        return super().find(sub, start, end)


@pytest.mark.parametrize("begin", [b"data: ", b": point "], ids=["an event", "a point"])
def test_each_byte_is_searched_once_however_many_pieces_come(begin):
    """An event without a point behind it is held back: 4 MiB in small pieces took the loop 80 s."""
    stream = ResumableStream()
    stream._buffer = CountedBytes()
    num_pieces, piece = 2000, b"a" * 50
    assert stream.feed(begin) == b""
    for _ in range(num_pieces):
        assert stream.feed(piece) == b""
    assert isinstance(stream._buffer, CountedBytes)
    assert 0 < stream._buffer.num_read < 2 * num_pieces * len(piece)
