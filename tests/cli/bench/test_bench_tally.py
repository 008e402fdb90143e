"""Reading streamed answers: chunks of text are counted on arrival, with any framing."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cli.bench.tally import Tally

CHAT = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":"one \\"content\\":\\"x\\""},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"two"},"finish_reason":null}],"usage":null}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}\n\n'
    b"data: [DONE]\n\n"
)


def read(body: bytes, cuts: list[int], endpoint: str = "chat") -> Tally:
    tally = Tally(endpoint)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for number, (start, end) in enumerate(pairwise(edges)):
        tally.feed(body[start:end], float(number))
    tally.end(float(len(edges)))
    return tally


@given(cuts=st.lists(st.integers(0, len(CHAT))), crlf=st.booleans())
def test_an_answer_can_be_split_anywhere(cuts: list[int], crlf: bool) -> None:
    body = CHAT.replace(b"\n", b"\r\n") if crlf else CHAT
    tally = read(body, cuts)
    assert tally.error is None
    assert len(tally.arrivals) == 2
    assert (tally.prompt_tokens, tally.completion_tokens, tally.finish_reason) == (7, 5, "length")


def test_chunks_are_timestamped_on_arrival() -> None:
    first = CHAT.index(b"\n\ndata: ", CHAT.index(b"one")) + 2
    assert read(CHAT, [first]).arrivals == [0.0, 1.0]


@pytest.mark.parametrize("space", [b"", b" "])
def test_completions_and_spaced_json_are_read(space: bytes) -> None:
    body = (
        b'data: {"choices": [{"text":%s"a", "finish_reason": null}]}\n\n'
        b'data: {"choices": [{"text":%s"", "finish_reason": "stop"}], '
        b'"usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n'
        b"data: [DONE]\n\n"
    ) % (space, space)
    tally = read(body, [], "completions")
    assert (len(tally.arrivals), tally.completion_tokens, tally.finish_reason, tally.error) == (1, 1, "stop", None)


def test_usage_and_finish_reason_can_come_with_the_last_text() -> None:
    tally = read(
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}],'
        b'"usage":{"prompt_tokens":4,"completion_tokens":9}}\n\n',
        [],
    )
    assert (tally.prompt_tokens, tally.completion_tokens, tally.finish_reason, tally.error) == (4, 9, "stop", None)


def test_chunks_are_counted_without_usage() -> None:
    body = CHAT[: CHAT.index(b'data: {"choices":[],"usage"')] + b"data: [DONE]\n\n"
    tally = read(body, [])
    assert (tally.has_usage, tally.completion_tokens) == (False, 2)


def test_a_token_without_text_arrives_at_the_end() -> None:
    usage = b'{"prompt_tokens":4,"completion_tokens":1}'
    tally = read(b'data: {"choices":[{"delta":{},"finish_reason":"length"}],"usage":%s}\n\n' % usage, [])
    assert (tally.arrivals, tally.error) == ([2.0], None)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "the stream ended early"),
        (CHAT[: CHAT.index(b"two")], "the stream ended early"),
        (b'data: {"error":{"message":"no more","code":500}}\n\n', "no more"),
        (b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n', "finish_reason abort"),
        (b"data: {oops}\n\n", "not JSON: {oops}"),
        (b"data: [1]\n\n", "not an object: [1]"),
    ],
)
def test_a_broken_answer_is_an_error(body: bytes, error: str) -> None:
    assert read(body, []).error == error
