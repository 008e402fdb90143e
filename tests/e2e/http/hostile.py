"""Requests that try to exhaust a server, each as large as its limits allow."""

import gzip
import zlib
from collections.abc import Callable, Iterator

MAX_BYTES = 4 * 1024**2
"""gateway.max_body_bytes"""


def filled(head: bytes, unit: bytes, tail: bytes, *, comma: bytes = b",", num_bytes: int = MAX_BYTES - 64) -> bytes:
    """As many units as fit."""
    num = (num_bytes - len(head) - len(tail)) // (len(unit) + len(comma))
    return head + comma.join([unit] * num) + tail


def bodies(model: str) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """By name: a path, and a function that makes its body. None of them is a valid request."""
    text = b'{"model":"%s","prompt":"Hi",' % model.encode()
    chat = b'{"model":"%s","messages":[{"role":"user","content":"Hi"}],' % model.encode()
    prompt = b'{"model":"%s","prompt":' % model.encode()
    messages = b'{"model":"%s","messages":' % model.encode()
    schema = b'{"properties":{"a":' * 5000 + b"{}" + b"}}" * 5000

    def completion(make: Callable[[], bytes]) -> tuple[str, Callable[[], bytes]]:
        return "/v1/completions", make

    def chat_completion(make: Callable[[], bytes]) -> tuple[str, Callable[[], bytes]]:
        return "/v1/chat/completions", make

    return {
        "arrays four million deep": completion(lambda: prompt + b"[" * (MAX_BYTES - 100)),
        "objects 800,000 deep": completion(lambda: filled(prompt, b'{"a":', b"", comma=b"")),
        "a schema 5,000 levels deep": chat_completion(
            lambda: (
                chat + b'"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + b"}}}"
            )
        ),
        "a million stop strings": completion(lambda: filled(text + b'"stop":[', b'"a"', b"]}")),
        "two million stop ids": completion(lambda: filled(text + b'"stop_token_ids":[', b"1", b"]}")),
        "140,000 messages": chat_completion(lambda: filled(messages + b"[", b'{"role":"user","content":""}', b"]}")),
        "a million NaN": completion(lambda: filled(text + b'"stop":[', b"NaN", b"]}")),
        "NaN behind a million stop strings": completion(
            lambda: filled(text + b'"stop":[', b'"a"', b'],"temperature":NaN}')
        ),
        "a million bad words": completion(lambda: filled(text + b'"bad_words":[', b'"a"', b"]}")),
        "380,000 biases": completion(
            lambda: text + b'"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(380_000)) + b"}}"
        ),
        "one field 700,000 times, wrong at last": completion(lambda: filled(text, b'"n":1', b',"n":0}')),
        "a text without end": completion(lambda: text + b'"stop":"' + b'\\"' * (MAX_BYTES // 2 - 200)),
        "four million digits": completion(lambda: text + b'"seed":' + b"1" * (MAX_BYTES - 200) + b"}"),
        "a million prompts": completion(lambda: filled(prompt + b"[", b"[1]", b"]}")),
        "two million ids": completion(lambda: filled(prompt + b"[", b"1", b"]}")),
        "four megabytes of one word": completion(lambda: prompt + b'"' + b"a" * (MAX_BYTES - 100) + b'"}'),
        "four megabytes of chat": chat_completion(
            lambda: filled(messages + b'[{"role":"user","content":"', b"a ", b'"}]}', comma=b"")
        ),
        "a million arrays for the template": chat_completion(
            lambda: filled(chat + b'"chat_template_kwargs":{"x":[', b"[[]]", b'],"enable_thinking":1},"n":0}')
        ),
        "a million choices": completion(lambda: filled(text + b'"guided_choice":[', b'"a"', b"]}")),
        "patterns that are all to match": completion(
            lambda: (
                text + b'"guided_grammar":"start: T\\nT: ' + b" & ".join(b"/(.*%d){9}/" % i for i in range(12)) + b'"}'
            )
        ),
        "a number that few divide": completion(
            lambda: text + b'"guided_json":{"type":"integer","multipleOf":99999989,"minimum":1e15}}'
        ),
        "a chain of 4,000 rules": completion(
            lambda: (
                text
                + b'"guided_grammar":"start: r0\\n'
                + b"\\n".join(b"r%d: r%d" % (i, i + 1) for i in range(4000))
                + b'\\nr4000: \\"a\\""}'
            )
        ),
        "a lone surrogate, a million times": completion(lambda: filled(text + b'"stop":[', b'"\\ud800"', b"]}")),
        "zeros": completion(lambda: b"\0" * MAX_BYTES),
        "spaces": completion(lambda: b" " * MAX_BYTES),
        "more than it takes": completion(lambda: prompt + b'"' + b"a" * MAX_BYTES + b'"}'),
    }


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def bomb(num_bytes: int) -> bytes:
    """Zeros, compressed."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(bytes(1024**2)) for _ in range(num_bytes // 1024**2)), packer.flush()])


def raw(model: str) -> dict[str, Callable[[], bytes]]:
    """By name: all bytes that a client sends. The connection ends with a 4xx."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    chunked = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    small = gzip.compress(b'{"model":"' + model.encode() + b'","prompt":""}')
    return {
        "a header of 1 MB": lambda: b"GET /version HTTP/1.1\r\nX-A: " + b"a" * 1024**2 + b"\r\n\r\n",
        "an address of 1 MB": lambda: b"GET /" + b"a" * 1024**2 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "a query of 1 MB": lambda: b"GET /version?" + b"a=1&" * 2**18 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "100,000 headers": lambda: (
            b"GET /version HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(100_000)) + b"\r\n"
        ),
        "512 MB of zeros, packed": lambda: request("/v1/completions", bomb(512 * 1024**2), "Content-Encoding: gzip"),
        "a body packed twice": lambda: request(
            "/v1/completions", gzip.compress(small), "Content-Encoding: gzip", "Content-Encoding: gzip"
        ),
        "a megabyte in chunks of a byte": lambda: chunked + b"1\r\n[\r\n" * 1024**2 + b"0\r\n\r\n",
        "a chunk with an extension of 1 MB": lambda: chunked + b"1;" + b"a" * 1024**2 + b"\r\n[\r\n0\r\n\r\n",
        "a trailer of 1 MB": lambda: chunked + b"1\r\n[\r\n0\r\nX-A: " + b"a" * 1024**2 + b"\r\n\r\n",
        "garbage": lambda: bytes(range(256)) * 4096,
        "2,000 requests at once, then garbage": lambda: (
            b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000 + b"\x00\x01garbage\r\n\r\n"
        ),
        "a body behind a body": lambda: head + b"Content-Length: 2\r\n\r\n{}" + b"garbage\r\n\r\n",
    }


def statuses(reply: bytes) -> Iterator[int]:
    """The statuses of all responses on a connection."""
    for part in reply.split(b"HTTP/1.")[1:]:
        yield int(part[2:5])
