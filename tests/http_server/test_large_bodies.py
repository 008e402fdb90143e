"""What a large body holds Python's lock for is bounded, so that the loop has its turns while a thread parses it."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.http_server.bodies import json_depth
from pipeline.http_server.bodies.body_reader import BodyReader
from pipeline.http_server.bodies.json_depth import check_large, depth_of, shapes_of
from pipeline.http_server.errors import ApiError
from pipeline.stages.gateway.apis.openai.parsing import parse_chat
from tests.stages.gateway.parsing.bodies import LIMITS
from tests.stages.gateway.parsing.values.test_json_depth import VALUES, levels_of

MIB = 1024**2
MAX_BODY = 32 * MIB
CHAT = b'"messages":[{"role":"user","content":"Hi"}]}'
ENTRY_NS, TEXT_NS, COMMA_NS = 200, 60, 20


def cost_of(value: Any) -> int:
    match value:
        case dict():
            keys = len(value) * (ENTRY_NS + TEXT_NS) + sum(map(cost_of, value.values()))
            return ENTRY_NS + keys + max(len(value) - 1, 0) * COMMA_NS
        case list():
            return ENTRY_NS + sum(map(cost_of, value)) + max(len(value) - 1, 0) * COMMA_NS
        case str():
            return TEXT_NS
    return 0


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_a_body_looks_the_same_in_pieces(value: Any, ascii_only: bool, num_bytes: int) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_depth, "PIECE_BYTES", num_bytes)
        patch.setattr(json_depth, "BYTE_NS", 0)  # of what is long and not in strings
        assert depth_of(body) == levels_of(value)
        assert list(shapes_of(body))[-1].cost_ns == cost_of(value)


def many(unit: bytes, begin: bytes, end: bytes = b"") -> Callable[[], bytes]:
    num = (MAX_BODY - len(begin) - len(end)) // (len(unit) + 1)
    return lambda: begin + b",".join([unit] * num) + end


def numbered(begin: bytes, end: bytes) -> bytes:
    return begin + b",".join(b'"%d":1' % number for number in range(2_500_000)) + end


TEXT = b'{"model":"tiny","messages":[{"role":"user","content":"'
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "lists for the template": (many(b"[]", b'{"chat_template_kwargs":{"a":[', b"]}," + CHAT), "too many values"),
    "keys for the template": (lambda: numbered(b'{"chat_template_kwargs":{', b"}," + CHAT), "too many values"),
    "biases": (lambda: numbered(b'{"logit_bias":{', b"}," + CHAT), "too many values"),
    "tools": (many(b'{"type":"function"}', b'{"tools":[', b"]," + CHAT), "too many values"),
    "messages": (many(b'{"role":"a"}', b'{"messages":[', b"]}"), "too many values"),
    "calls": (many(b"{}", b'{"messages":[{"role":"assistant","tool_calls":[', b"]}]}"), "too many values"),
    "stop strings": (many(b'"ab"', b'{"stop":[', b"]," + CHAT), "too many values"),
    "numbers": (many(b"1", b'{"stop_token_ids":[', b"]," + CHAT), "too many values"),
    "digits": (lambda: b'{"seed":' + b"1" * MAX_BODY + b"," + CHAT, "too many values"),
    "spaces": (lambda: b" " * MAX_BODY + b"{" + CHAT, "too many values"),
    "brackets": (lambda: b"[" * MAX_BODY, "nested too deeply"),
    "escapes": (lambda: TEXT + b"\\u00e9" * (MAX_BODY // 6) + b'"}]}', "a text in the body"),
    "an emoji in a long text": (lambda: TEXT + b"a" * MAX_BODY + "😀".encode() + b'"}]}', "a text in the body"),
    "an emoji before a long text": (
        lambda: TEXT + "😀".encode() * MIB + b"a" * 8 * MIB + b'"}]}',
        "has 12582912 bytes",
    ),
    "colons": (lambda: b'{"a":"' + b":" * MAX_BODY + b'", x}', "not valid JSON"),
    "NaN": (lambda: b'{"a":NaN,"b":"' + b"\\n" * 4 * MIB + b'"}', "not valid JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_hold_the_lock_for_long_is_refused(name: str) -> None:
    """They took from 0.2 to 3.8 s, nearly all of it in single calls."""
    make, words = HOSTILE[name]
    body, reader = make(), BodyReader(2 * MAX_BODY, 128)
    begin_s = time.thread_time()
    with pytest.raises(ApiError, match=words) as error:
        reader.parse_now(body, lambda body: parse_chat(body, LIMITS))
    took_s = time.thread_time() - begin_s
    assert error.value.status == 400
    assert took_s < 0.2, "0.05 s is usual"


def test_photos_with_a_text_are_no_hostile_body() -> None:
    """A text that is not ASCII beside images must not make their base64 wide."""
    image = base64.b64encode(bytes(MIB)).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for _ in range(22)]
    chat = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "¿Qué? 😀\n" * 100}]}]}
    body = json.dumps(chat, ensure_ascii=False).encode()
    assert MAX_BODY > len(body) > 29 * MIB
    check_large(body, 128)
    one = base64.b64encode(bytes(23 * MIB))
    check_large(b'{"a":"' + one + b'","b":"' + "é".encode() * MIB + b'"}', 128)


def test_a_limit_on_texts_goes_with_that_of_prompts() -> None:
    body = b'{"a":"' + "é".encode() * 7 * MIB + b'"}'
    with pytest.raises(ApiError, match="12582912 bytes"):
        check_large(body, 128)
    check_large(body, 128, 15 * MIB)


def test_what_is_in_front_of_the_json_hides_nothing_of_it() -> None:
    """Resume points are a client's words: a quote among them turned the marks of the body into text."""
    reader = BodyReader(MAX_BODY, 8)
    points = b': {"id":"x\n'
    deep = b'{"a":' * 9 + b"1" + b"}" * 9
    for body in (deep, deep + b" " * 70_000):
        with pytest.raises(ApiError, match="nested too deeply"):
            reader.parse_now(points + body, len, len(points))
        assert reader.parse_now(deep + b'{"a":1}', len, len(deep)) == len(deep) + 7
