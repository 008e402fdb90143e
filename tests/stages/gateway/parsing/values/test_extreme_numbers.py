"""No number of a client is believed: each field of each body, and of the ZeroMQ protocol, is given values that no
client means. They are refused with a 400, or what is parsed fits the messages between stages, with finite numbers."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.stages.gateway.apis.anthropic import parsing as anthropic
from pipeline.stages.gateway.apis.embeddings import parsing as embeddings
from pipeline.stages.gateway.apis.infill import parsing as infill
from pipeline.stages.gateway.apis.ollama import parsing as ollama
from pipeline.stages.gateway.apis.openai import parsing as parse
from pipeline.stages.gateway.apis.responses import parsing as responses_api
from pipeline.stages.gateway.apis.responses.parsing import StoredSize
from pipeline.stages.gateway.apis.tokens import parsing as tokens_only
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.zmq.parsing import ReceivedMessage, parse_generate
from tests.zmq_requests import generate

LIMITS = RequestLimits("tiny", 8, max_prompt_tokens=512, vocab_size=1000, hidden_size=8, has_priorities=True)
EXTREME = [
    *("-1", "1e308", "-1e308", "1e400", "1e-320", "4294967295.9", "2147483648", "18446744073709551616", "[1e308]"),
    *("1" + "0" * 30, "9" * 5000, "[99999999999999999999]", '{"1":1e308}', '{"99999999999":1}', '{"-1":1}'),
]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
PROMPT = {"model": "tiny", "prompt": "x"}

NOTHING_STORED: Any = SimpleNamespace(
    is_on=True,
    why_off="",
    size=lambda _: StoredSize(),
    conversation=lambda _: [],
    item=lambda *_: None,
    check_size=lambda *_: None,
)

Parser = Callable[[bytes, RequestLimits], Any]
BODIES: dict[str, tuple[Parser, Any, dict[str, Any], str]] = {
    "chat": (parse.parse_chat, parse._chats, CHAT, ""),
    "completion": (parse.parse_completion, parse._completions, PROMPT, ""),
    "messages": (anthropic.parse_messages, anthropic._messages, CHAT | {"max_tokens": 5}, ""),
    "embeddings": (embeddings.parse_embeddings, embeddings._decoder, {"input": "x"}, ""),
    "infill": (infill.parse_infill, infill._decoder, {"input_prefix": "x"}, ""),
    "tokens": (tokens_only.parse_tokens_only, tokens_only._decoder, {"token_ids": [1], "sampling_params": {}}, ""),
    "tokens' parameters": (
        tokens_only.parse_tokens_only,
        tokens_only._decoder,
        {"token_ids": [1], "sampling_params": {}},
        "sampling_params",
    ),
    "responses": (
        lambda body, limits: responses_api.parse_response(body, limits, NOTHING_STORED, "0"),
        responses_api._bodies,
        {"model": "tiny", "input": "x"},
        "",
    ),
    "ollama chat": (ollama.parse_chat, ollama._chats, CHAT, ""),
    "ollama generate": (ollama.parse_generate, ollama._generates, PROMPT, ""),
    "ollama options": (ollama.parse_generate, ollama._generates, PROMPT, "options"),
}


def field_names(kind: Any, part: str) -> list[str]:
    """The names of a body's fields, or of those of the object in its field `part`."""
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    if not part:
        return list(fields)
    inner = [one for one in (fields[part], *getattr(fields[part], "__args__", ())) if hasattr(one, "__struct_fields__")]
    return [field.encode_name for field in msgspec.structs.fields(inner[0])]


def require_finite(value: Any) -> None:
    if isinstance(value, float):
        assert abs(value) < 3.4e38, "as float32, it is not finite"
    elif isinstance(value, dict):
        for each in value.items():
            require_finite(each)
    elif isinstance(value, list | tuple):
        for each in value:
            require_finite(each)


def require_sane(parsed: Any) -> None:
    """What stages are sent can be encoded, and has no number that is not finite."""
    if isinstance(parsed, ParsedRequest):  # its dialect stays in the gateway
        parsed = {name: getattr(parsed, name) for name in parsed.__struct_fields__ if name != "dialect"}
    require_finite(msgspec.msgpack.decode(msgspec.msgpack.encode(parsed)))


@pytest.mark.parametrize("name", BODIES)
def test_a_field_of_a_body_is_refused_or_bounded(name: str) -> None:
    parser, decoder, base, part = BODIES[name]
    names = field_names(decoder.type, part)
    assert len(names) > 3
    for field in names:
        text = json.dumps({key: value for key, value in base.items() if key not in (field, part)})[:-1]
        for value in EXTREME:
            one = f'"{field}": {value}'
            body = f'{text}, "{part}": {{{one}}}}}' if part else f"{text}{', ' if len(text) > 1 else ''}{one}}}"
            try:
                parsed = parser(body.encode(), LIMITS)
            except ApiError as error:
                assert error.status < 500, (body, error.message)
            else:
                require_sane(getattr(parsed, "request", parsed))


WIRE = [
    *(0, 1, -1, 1e308, -1e308, math.nan, math.inf, -math.inf, 5e-324, 2**64 - 1, 2**63, -(2**63), 2**31, True, None),
    *("", "x", b"", b"abc", [], [math.nan], [2**64 - 1], [-1], [b"\0\0\0\x80"], [b"ab"], {}, {1: math.nan}),
    *({2**63: 1.0}, {-1: 1.0}, {1: 1e308}),
]


def test_a_field_of_the_protocol_is_refused_or_bounded() -> None:
    decoder = msgspec.msgpack.Decoder(ReceivedMessage)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(generate(1, "x", credits=1)))
    index = next(i for i, field in enumerate(p.Generate.__struct_fields__, 1) if field == "request")
    num_parsed = 0
    for value in WIRE:
        changed = [[*wire[:i], value, *wire[i + 1 :]] for i in range(1, len(wire))]
        changed += [
            [*wire[:index], {**wire[index], name: value}, *wire[index + 1 :]] for name in p.Request.__struct_fields__
        ]
        for one in changed:
            try:
                message = decoder.decode(msgspec.msgpack.encode(one))
            except (msgspec.ValidationError, OverflowError):
                continue  # the listener answers it
            try:
                parsed = parse_generate(message, LIMITS)
            except ApiError as error:
                assert error.status < 500, (one, error.message)
            else:
                num_parsed += 1
                require_sane(parsed)
    assert num_parsed > 50
