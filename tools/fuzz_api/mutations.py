"""Spoils bodies: first as values, then as bytes."""

import gzip
import json
import random
from typing import Any

NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**31 - 1,
    -(2**31),
    2**53,
    2**63,
    2**64,
    -(2**63) - 1,
    1e308,
    -1e308,
    1e-320,
    0.5,
    1.0,
    -0.0,
)
TEXTS = (
    "", "a" * 5000, "\x00", "\x1b[2J", "\u202e", "\ufeff", "\ud7ff", "🙂" * 300, "\r\nX: 1", "../../etc/passwd",
    "<|im_end|>", "(a+)+$", "[" * 200, "{{ 1/0 }}", "%s%n", "1" * 400, "NaN", "null", "true", "-1h",
    "10" * 50 + "s", "data:,x",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"": None}, [[[[]]]], {"type": "x"}, {"$ref": "#"})
RAW = (b"NaN", b"Infinity", b"1e999", b"9" * 500, b"-", b'"\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b"[" * 3000, b"{}{}")
"""What a value is replaced with in the text of a body: not JSON, or JSON that Python's encoder doesn't write."""
MARK = "\ue000"


def spoiled(value: Any, rng: random.Random) -> bytes:
    """The JSON text of a value, with some mistakes; in about a third of the cases with none."""
    num = rng.choice((0, 0, 1, 1, 2, 4))
    for _ in range(num):
        value = _changed(value, rng)
    raw = rng.random() < 0.1
    if raw:
        value = _replaced(value, MARK, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    data = text.encode("utf-8", "surrogatepass")
    if raw:
        mark = json.dumps(MARK).encode() if json.dumps(MARK).encode() in data else f'"{MARK}"'.encode()
        data = data.replace(mark, rng.choice(RAW), 1)
    return _torn(data, rng) if rng.random() < 0.12 else data


def _changed(value: Any, rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0 | 1:
            return _replaced(value, rng.choice(NUMBERS), rng)
        case 2 | 3:
            return _replaced(value, rng.choice(TEXTS), rng)
        case 4:
            return _replaced(value, rng.choice(OTHERS), rng)
        case 5:  # deep
            deep: Any = 1
            for _ in range(rng.choice((10, 63, 64, 65, 500))):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            return _replaced(value, deep, rng)
        case 6:  # many
            return _replaced(value, [rng.choice(("a", 1, None, {}))] * rng.choice((65, 1025, 5000)), rng)
        case _:  # an unknown field, or one less
            if isinstance(value, dict) and value:
                value = dict(value)
                if rng.random() < 0.5:
                    value.pop(rng.choice(list(value)))
                else:
                    value[rng.choice(("x", "stream", "n", "user", "\x1b", "echo", "logprobs", "tools"))] = rng.choice(
                        (*NUMBERS, *OTHERS)
                    )
            return value


def _replaced(value: Any, new: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        name = rng.choice(list(value))
        return value | {name: _replaced(value[name], new, rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], _replaced(value[index], new, rng), *value[index + 1 :]]
    return new


def _torn(data: bytes, rng: random.Random) -> bytes:
    """Bytes cut, changed, doubled or put in front."""
    index = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            return data[:index]
        case 1:
            return data[:index] + bytes([rng.randrange(256)]) + data[index + 1 :]
        case 2:
            return data + data
        case 3:
            return b"\xef\xbb\xbf" + data
        case 4:  # a field twice
            return data.replace(b"{", b'{"model": 1, "messages": {}, "max_tokens": 2, ', 1)
    return rng.randbytes(rng.randrange(200))


def coded(data: bytes, rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A body as it is sent, and its headers besides the length."""
    headers = {"Content-Type": "application/json"}
    match rng.randrange(40):
        case 0:
            kinds = ("text/plain", "", "application/xml", "application/json; charset=utf-16")
            headers["Content-Type"] = rng.choice(kinds)
        case 1:
            del headers["Content-Type"]
        case 2 | 3:
            headers["Content-Encoding"] = "gzip"
            data = gzip.compress(data, 1, mtime=0)
        case 4:
            headers["Content-Encoding"] = rng.choice(("gzip", "deflate", "br", "gzip, gzip", "x"))
        case 5:
            headers["Content-Encoding"] = "gzip"
            data = gzip.compress(data, 1, mtime=0)[: rng.randrange(30)]
        case 6:
            headers["Content-Encoding"] = "gzip"
            data = gzip.compress(b" " * rng.choice((10**5, 3 * 10**6)) + data, 1, mtime=0)
        case 7:
            headers["X-Request-Id"] = rng.choice(("a", "b" * 256, "c" * 257, "\x7f", "d e"))
        case 8:
            headers[rng.choice(("X-Pipeline-Resume", "X-Pipeline-Resumable"))] = rng.choice(("1", "0", "-1", "9" * 30))
        case 9:
            headers["Expect"] = "100-continue"
    return data, headers
