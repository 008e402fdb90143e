"""What the router must know of a request: the keys of its prompt's prefixes, and its size. Pure.

Bodies are only read here; the replica validates them. A body that can't be read has no keys.
"""

from typing import Any

import msgspec

from pipeline.routing.keys import BYTES_PER_TOKEN, CHUNK_BYTES, ID_BYTES, ROOT, keys_of, message_bytes, root, token_keys
from pipeline.routing.policies import Prompt

KEY_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
"""Tokens that a key stands for."""


class Body(msgspec.Struct):
    """The fields of all generating routes that the router reads."""

    model: Any = None
    messages: Any = None
    tools: Any = None
    system: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    n: Any = None
    cache_salt: Any = None
    stream: Any = None


_decoder = msgspec.json.Decoder(Body)


def prompt_of(body: bytes) -> Prompt:
    """The prompt of a body of any route."""
    try:
        decoded = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt(max(1, len(body) // BYTES_PER_TOKEN))
    begin = ROOT
    if decoded.model is not None or decoded.cache_salt is not None:
        begin = root(_text(decoded.model), _text(decoded.cache_salt))
    num = decoded.n if isinstance(decoded.n, int) and 0 < decoded.n < 10_000 else 1
    ids = _ids_of(decoded.prompt)
    if ids is not None:
        return Prompt(max(1, len(ids) // ID_BYTES), token_keys(ids, KEY_TOKENS, begin), num_sequences=num)
    data = _bytes_of(decoded)
    return Prompt(max(1, len(data) // BYTES_PER_TOKEN), keys_of(data, root=begin), num_sequences=num)


def _bytes_of(body: Body) -> bytes:
    """The canonical bytes of what becomes the prompt, in the order of templates."""
    if isinstance(body.messages, list):
        system = [] if body.system is None else [body.system]
        return message_bytes([*system, *body.messages], body.tools)
    if body.input is not None:  # of /v1/responses and /v1/embeddings
        items = body.input if isinstance(body.input, list) else [body.input]
        instructions = [] if body.instructions is None else [body.instructions]
        return message_bytes([*instructions, *items], body.tools)
    if isinstance(body.prompt, str):
        return body.prompt.encode("utf-8", "surrogatepass")
    return b"" if body.prompt is None else message_bytes([body.prompt])


def _ids_of(prompt: Any) -> bytes | None:
    """The packed ids of a prompt that is one list of ids."""
    if not isinstance(prompt, list) or not prompt or not all(type(one) is int for one in prompt):
        return None
    try:
        return b"".join(one.to_bytes(ID_BYTES, "little", signed=True) for one in prompt)
    except OverflowError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
