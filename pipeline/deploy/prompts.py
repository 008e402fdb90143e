"""What the router must know of a request: the keys of its prompt's prefixes, and its size. Pure.

Bodies are only read here; the replica validates them. A body that can't be read has no keys.

It runs in the loop that all clients share, so its time must not depend on what a body consists of: a megabyte of small
values takes a hundred times as long to decode as one of text. So fields stay bytes, and only those of few values are
decoded, for their canonical form. The keys of others are those of the bytes as they came: the next turn of a chat
mostly begins with the same ones.
"""

import contextlib
from array import array
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.client.protocol import MAX_TIMEOUT_S
from pipeline.routing.keys import BYTES_PER_TOKEN, CHUNK_BYTES, ID_BYTES, ROOT, keys_of, message_bytes, root, token_keys
from pipeline.routing.policies import Prompt

MAX_COMMAS = 32_768
"""Of a field that is decoded: at most twice as many values."""
MAX_IDS = 262_144
"""Of a prompt of token ids that is decoded."""
MAX_SMALL_BYTES = 1024
"""Of a field that is no prompt: a longer one is ignored."""
KEY_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
"""Tokens that a key stands for."""


class Body(msgspec.Struct):
    """The fields of all generating routes that the router reads, as JSON; empty if they are missing."""

    model: Raw = Raw()
    messages: Raw = Raw()
    tools: Raw = Raw()
    system: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()
    instructions: Raw = Raw()
    n: Raw = Raw()
    cache_salt: Raw = Raw()
    timeout_s: Raw = Raw()


_decoder = msgspec.json.Decoder(Body)
_ids = msgspec.json.Decoder(list[int])
_any = msgspec.json.Decoder()
_FIRST_OF_NUMBER = (b"-", *(b"%d" % digit for digit in range(10)))
_NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def prompt_of(body: bytes, scope: str = "") -> Prompt:
    """The prompt of a body of any route."""
    return read(body, scope)[0]


def read(body: bytes, scope: str = "") -> tuple[Prompt, float | None]:
    """The prompt of a body of any route, and its `timeout_s` if that is valid. `scope` is that of the client's API key,
    if keys don't share the prefix cache: then what others have sent is in no cache for it."""
    prompt, timeout_s = Prompt(max(1, len(body) // BYTES_PER_TOKEN)), None
    with contextlib.suppress(*_NOT_DECODED):
        decoded = _decoder.decode(body)
        with contextlib.suppress(*_NOT_DECODED):
            timeout_s = _timeout_of(decoded)
        prompt = _prompt_of(decoded, scope)
    return prompt, timeout_s


def _timeout_of(body: Body) -> float | None:
    given = _small(body.timeout_s)
    return float(given) if type(given) in (int, float) and 0 < given <= MAX_TIMEOUT_S else None


def _prompt_of(body: Body, scope: str) -> Prompt:
    begin = ROOT
    model, salt = _small(body.model), _small(body.cache_salt)
    if model is not None or salt is not None or scope:
        begin = root(_text(model), _text(salt), scope)
    given = _small(body.n)
    num = given if isinstance(given, int) and 0 < given < 10_000 else 1
    ids = _ids_of(bytes(body.prompt))
    if ids is not None:
        return Prompt(max(1, len(ids) // ID_BYTES), token_keys(ids, KEY_TOKENS, begin), num_sequences=num)
    data = _bytes_of(body)
    return Prompt(max(1, len(data) // BYTES_PER_TOKEN), keys_of(data, root=begin), num_sequences=num)


def _bytes_of(body: Body) -> bytes:
    """The bytes of what becomes the prompt, in the order of templates: canonical, unless they have many values."""
    messages, given, prompt = bytes(body.messages), bytes(body.input), bytes(body.prompt)
    if messages[:1] == b"[":
        return _canonical(body.tools, body.system, messages)
    if _is_set(given):  # of /v1/responses and /v1/embeddings
        return _canonical(body.tools, body.instructions, given)
    if prompt[:1] == b'"':
        text: str = msgspec.json.decode(prompt, type=str)
        return text.encode("utf-8", "surrogatepass")
    return _canonical(Raw(), Raw(), prompt) if _is_set(prompt) else b""


def _canonical(tools: Raw, first: Raw, messages: bytes) -> bytes:
    parts = [bytes(tools), bytes(first), messages]
    if sum(part.count(b",") for part in parts) > MAX_COMMAS:
        return b"".join(part for part in parts if _is_set(part))
    found = _any.decode(messages)
    items = found if isinstance(found, list) else [found]
    if _is_set(parts[1]):
        items = [_any.decode(parts[1]), *items]
    return message_bytes(items, _any.decode(parts[0]) if _is_set(parts[0]) else None)


def _ids_of(prompt: bytes) -> bytes | None:
    """The packed ids of a prompt that is one list of ids."""
    if prompt[:1] != b"[" or prompt[1:64].lstrip()[:1] not in _FIRST_OF_NUMBER or prompt.count(b",") >= MAX_IDS:
        return None
    try:
        return array("i", _ids.decode(prompt)).tobytes()
    except (*_NOT_DECODED, OverflowError):
        return None


def _is_set(field: bytes) -> bool:
    return field not in (b"", b"null")


def _small(field: Raw) -> Any:
    """The value of a field; None if it is missing, null or long."""
    data = bytes(field)
    return _any.decode(data) if data and len(data) <= MAX_SMALL_BYTES else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
