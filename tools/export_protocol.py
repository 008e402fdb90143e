"""What is published of the client wire, made from the types in pipeline/client/protocol/:

docs/protocol.schema.json     every message, as a JSON Schema
docs/protocol.md              the tables of fields and the transcripts between its marks
tests/protocol/vectors.json   messages as hex and as objects, for every client to replay

python -m tools.export_protocol            write them
python -m tools.export_protocol --check    exit with 1 where one of them is not what the types say
"""

import argparse
import json
import re
import struct
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from pipeline.client import protocol as p

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "docs" / "protocol.schema.json"
PAGE = ROOT / "docs" / "protocol.md"
VECTORS = ROOT / "tests" / "protocol" / "vectors.json"

IDS = ("token_ids", "prompt_token_ids", "received")
"""Fields of packed ids: as objects they are lists of numbers. Other binary is written as hex."""
U64 = ("request_id", "seed", "nonce")
"""Fields that may hold more than JSON's numbers keep exactly: as objects they are decimal strings."""
NAMES = {int: "integer", str: "string", bool: "boolean", float: "float", bytes: "binary", type(None): "null"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what is out of date")
    check = parser.parse_args().check
    stale = [path for path, text in published().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(published()[path])
        print(f"{path.relative_to(ROOT)}: {'is out of date' if check else 'written'}")
    return 1 if check and stale else 0


def published() -> dict[Path, str]:
    """What each file must hold."""
    page = PAGE.read_text() if PAGE.exists() else ""
    return {SCHEMA: _json(schema()), VECTORS: _json(vectors()), PAGE: with_tables(page)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------------------------------------ schema


def schema() -> dict[str, Any]:
    """The messages of both directions. msgspec knows the types; the names of an array's places are added here."""
    (to_server, to_client), parts = msgspec.json.schema_components(
        (p.ClientMessage, p.ServerMessage), ref_template="#/$defs/{name}"
    )
    for name, part in parts.items():
        kind = getattr(p, name)
        fields = kind.__struct_fields__
        places = part["prefixItems"]
        for place, field in zip(places[len(places) - len(fields) :], fields, strict=True):
            place.setdefault("title", field)
        if len(places) > len(fields):
            places[0]["title"] = "kind"
        part["description"] = " ".join(part["description"].split())
        _mark_binary(part)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Client wire of Pipeline, version {p.PROTOCOL_VERSION}",
        "description": "Each message is one MessagePack array. Its first place is the message's kind, the others are "
        "its fields in this order; fields with a default may be left out at the end, and further places are to be "
        'ignored. A string with "x-msgpack": "bin" is MessagePack bin.',
        "version": p.PROTOCOL_VERSION,
        "client_to_server": to_server,
        "server_to_client": to_client,
        "$defs": parts,
    }


def _mark_binary(part: Any) -> None:
    match part:
        case {"contentEncoding": "base64"}:
            del part["contentEncoding"]
            part["x-msgpack"] = "bin"
        case dict():
            for value in part.values():
                _mark_binary(value)
        case list():
            for value in part:
                _mark_binary(value)


# ------------------------------------------------------------------------------------------------------------ tables


def with_tables(page: str) -> str:
    """The page with its tables of fields made anew."""

    def replaced(match: re.Match[str]) -> str:
        return f"{match[1]}\n\n{table(getattr(p, match[2]))}\n\n{match[3]}"

    page = re.sub(r"(<!-- fields of (\w+) -->).*?(<!-- end -->)", replaced, page, flags=re.DOTALL)
    for mark, messages in (("transcript", TRANSCRIPT), ("transcript of resuming", RESUMING)):
        begin, end = f"<!-- {mark} -->\n", "<!-- end -->"
        if begin in page:
            before, _, rest = page.partition(begin)
            page = f"{before}{begin}\n{transcript(messages)}\n\n{end}{rest.partition(end)[2]}"
    return page


def table(kind: Any) -> str:
    """A message's fields in Markdown."""
    rows = ["| place | field | type | default | meaning |", "|---|---|---|---|---|"]
    tag = kind.__struct_config__.tag
    if tag is not None:
        rows.append(f'| 0 | kind | string | – | `"{tag}"` |')
    hints = get_type_hints(kind, include_extras=True)
    for place, field in enumerate(msgspec.structs.fields(kind), int(tag is not None)):
        default = "–"
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            default = f"`{shown(value)}`"
        words = _description(hints[field.name])
        rows.append(f"| {place} | {field.name} | {_type_words(hints[field.name])} | {default} | {words} |")
    return "\n".join(rows)


def _description(hint: Any) -> str:
    metas = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, msgspec.Meta)]
    return metas[-1].description or "" if metas else ""


def _type_words(hint: Any) -> str:
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if get_origin(hint) in (Union, types.UnionType):
        words = [_type_words(one) for one in get_args(hint)]
        return " or ".join(words)
    if get_origin(hint) is list:
        return f"array of {_type_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"map of {_type_words(get_args(hint)[0])} to {_type_words(get_args(hint)[1])}"
    return NAMES.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


# ------------------------------------------------------------------------------------------------------- transcripts


def transcript(messages: Iterable[Any]) -> str:
    """Frames, one paragraph each, as a block of Markdown."""
    return "\n\n".join("\n".join(f"    {line}" for line in transcribed(message)) for message in messages)


def transcribed(message: Any) -> list[str]:
    """One frame: its direction, its bytes in lines that fit a page, and what they say."""
    data = msgspec.msgpack.encode(message)
    arrow = "client ──►" if isinstance(message, p.ClientMessage) else "◄── server"
    lines = [data[place : place + 36].hex() for place in range(0, len(data), 36)]
    return [f"{arrow}  {shown(msgspec.msgpack.decode(data))}", *(f"    {line}" for line in lines)]


def shown(value: Any) -> str:
    """A value in the notation of JSON, and binary as h'…'."""
    match value:
        case list():
            return f"[{', '.join(map(shown, value))}]"
        case dict():
            return f"{{{', '.join(f'{shown(name)}: {shown(one)}' for name, one in value.items())}}}"
        case bytes():
            return f"h'{value.hex()}'"
        case _:
            return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------------- vectors


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


MAX_U64 = 2**64 - 1
_RECORDS = struct.pack("<f2i2ff2i2f", -0.125, 6, 300, -0.125, -2.5, -0.25, 7, 8, -0.25, -1.75)
"""Of two ids, each with the two likeliest"""

SAMPLES: dict[str, p.ClientMessage | p.ServerMessage] = {
    "hello": p.Hello(1, 1, "example/1.0"),
    "generate from text": p.Generate(1, "", p.TextPrompt("Once upon a time"), p.Params(max_tokens=8), 16),
    "generate from token ids": p.Generate(
        2, "SmolLM2-135M-Instruct", p.TokensPrompt(packed(1, 4093, 2, 49151)), p.Params(temperature=0.0), 16
    ),
    "generate from a chat, every field": p.Generate(
        MAX_U64,
        "",
        p.ChatPrompt([p.ChatMessage("system", "Be brief."), p.ChatMessage("user", "Hé 👋", "ada")], False),
        p.Params(2, 0.7, 0.9, 40, 0.05, MAX_U64, 64, ["\n\n", "é"], [7, 128001], True, False, True),
        1024,
    ),
    "generate with a negative seed": p.Generate(3, "", p.TextPrompt("x"), p.Params(seed=-(2**63)), 1),
    "resume": p.Generate(4, "", p.TokensPrompt(packed(1, 2)), p.Params(seed=7), 16, [packed(504, 3575, 282)]),
    "resume one of two": p.Generate(5, "", p.TextPrompt("x"), p.Params(n=2, seed=7), 16, [packed(504), b""]),
    "hello with an API key": p.Hello(1, 1, "example/1.0", "sk-example-0123456789"),
    "abort": p.Abort(MAX_U64),
    "credit": p.Credit(1, 16),
    "ping": p.Ping(2**53 + 1),
    "bye": p.Bye(),
    "welcome": p.Welcome(1, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
    "welcome from the second of two gateways": p.Welcome(
        *(1, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
        addresses=["tcp://0.0.0.0:8001", "tcp://0.0.0.0:8002"],
        gateway=1,
        poolings=["last", "mean"],
    ),
    "generate the best": p.Generate(8, "", p.TextPrompt("x"), p.Params(n=2, best_of=4), 1),
    "generate with a name and timings": p.Generate(6, "", p.TextPrompt("x"), p.Params(), 1, [], "user-7/story.3", True),
    "generate with priority, salt and timeout": p.Generate(
        7, "", p.TextPrompt("x"), p.Params(), 1, [], None, False, -(2**31), "tenant é", 2.5
    ),
    "generate with penalties, bias, words and log probabilities": p.Generate(
        9,
        "",
        p.TextPrompt("x"),
        p.Params(
            max_tokens=4,
            repetition_penalty=1.25,
            presence_penalty=-0.5,
            frequency_penalty=2.0,
            logit_bias={"17": -100.0, "504": 2.5},
            allowed_token_ids=[17, 504, 49151],
            bad_words=["né", "never"],
            min_tokens=2,
            truncate_prompt_tokens=-1,
            logprobs=2,
            prompt_logprobs=0,
        ),
        1,
    ),
    "generate with log probabilities of given ids": p.Generate(
        12, "", p.TextPrompt("x"), p.Params(logprob_token_ids=[17, 504, 49151]), 1
    ),
    "generate from the first ids": p.Generate(
        14, "", p.TextPrompt("x"), p.Params(truncate_prompt_tokens=5, truncation_side="right"), 1
    ),
    "generate the best that a beam search finds": p.Generate(
        15,
        "",
        p.TextPrompt("x"),
        p.Params(n=4, max_tokens=8, use_beam_search=True, length_penalty=0.5, early_stopping="never"),
        1,
    ),
    "generate what matches a schema": p.Generate(
        10, "", p.TextPrompt("x"), p.Params(structured_outputs=p.StructuredOutputs("json", '{"type":"object"}')), 1
    ),
    "compute an embedding": p.Generate(13, "", p.TextPrompt("x"), p.Params(), 0, pooling="mean", dimensions=2),
    "generate from a chat with tools": p.Generate(
        11,
        "",
        p.ChatPrompt(
            [
                p.ChatMessage("user", ["Is it cold", "in Athens?"]),
                p.ChatMessage(
                    "assistant",
                    None,
                    None,
                    [p.ToolCall("call-1", "weather", '{"city":"Athens"}')],
                    None,
                    "I have to look.",
                ),
                p.ChatMessage("tool", "31 °C", None, [], "call-1"),
                p.ChatMessage("assistant", "No, it"),
            ],
            False,
            True,
            '[{"type":"function","function":{"name":"weather"}}]',
            "named",
            "weather",
            False,
            '[{"text":"It is hot."}]',
            '{"enable_thinking":false}',
        ),
        p.Params(),
        1,
    ),
    "accepted": p.Accepted(1, packed(1, 4093, 2), MAX_U64, "cmpl-user-7/story.3"),
    "delta": p.Delta(1, [p.Output(0, " there was", packed(665, 436), 17, 4)]),
    "delta with ends": p.Delta(
        2**63,
        [
            p.Output(0, "", b"", 40, 12, "length"),
            p.Output(1, "né", packed(-1, 2**31 - 1), 0, 0, "stop", "é"),
            p.Output(2, "", packed(7), 9, 3, "stop", 7),
            p.Output(3, "", b"", 0, 0, "abort"),
        ],
    ),
    "accepted with pieces": p.Accepted(1, packed(5, 6), 7, "cmpl-1", [b"na", b"\xc3"]),
    "delta with records": p.Delta(
        1,
        [
            p.Output(
                0, "é", packed(6, 7), 0, 0, None, None, _RECORDS, [b"\xc3", b"\xc3", b"e", b"\xa9", b"\xa9", b"\xaa"]
            )
        ],
    ),
    "delta with records of the prompt": p.Delta(1, [], _RECORDS, 3, [b"a", b"e", b"", b"\xff"]),
    "finished": p.Finished(1, 5, 8),
    "finished with timings": p.Finished(1, 5, 8, '{"received":1.5,"total_ms":2.25,"choices":[]}'),
    "finished with cached tokens": p.Finished(1, 37, 8, None, [32, 37]),
    "finished with an embedding": p.Finished(1, 5, 0, None, [0], struct.pack("<2f", 0.6, -0.8)),
    "failed, to be tried again": p.Failed(1, p.Failure(503, "the server is overloaded", None, "overloaded", 4)),
    "failed": p.Failed(1, p.Failure(400, "'temperature' must be a number <= 2.0", "temperature", "invalid_value")),
    "failed without param and code": p.Failed(MAX_U64, p.Failure(500, "the server could not finish this request")),
    "pong": p.Pong(2**53 + 1),
    "error": p.Error(p.Failure(400, "the first message of a connection must be hello", None, "no_hello")),
}


_PARAMS = p.Params(temperature=0.0, max_tokens=6)
_PROMPT_IDS = packed(33, 28, 216, 34, 28, 216, 35, 28)
_WELCOME = p.Welcome(1, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0)

TRANSCRIPT: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(1, 1, "example/1.0"),
    _WELCOME,
    p.Generate(1, "", p.TextPrompt("1, 2, 3,"), _PARAMS, 2),
    p.Accepted(1, _PROMPT_IDS, 8412906318461237094, "cmpl-5f0c1d3b9a7e42468d1f6b3a0c9e7512"),
    p.Delta(1, [p.Output(0, " ", packed(216), 0, 0)]),
    p.Credit(1, 1),
    p.Delta(1, [p.Output(0, "4, ", packed(36, 28, 216), 1, 1)]),
    p.Delta(1, [p.Output(0, "5,", packed(37, 28), 4, 4, "length")]),
    p.Finished(1, 8, 6),
    p.Bye(),
]
RESUMING: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(1, 1, "example/1.0"),
    _WELCOME,
    p.Generate(
        1,
        "",
        p.TokensPrompt(_PROMPT_IDS),
        msgspec.structs.replace(_PARAMS, seed=8412906318461237094),
        2,
        [packed(216, 36, 28, 216)],
    ),
    p.Accepted(1, _PROMPT_IDS, 8412906318461237094, "cmpl-c2a4906be1d84f37b05d9c8e6f1a2374"),
    p.Delta(1, [p.Output(0, "5,", packed(37, 28), 4, 4, "length")]),
    p.Finished(1, 8, 6),
    p.Bye(),
]


def vectors() -> dict[str, Any]:
    """Messages as bytes and as objects."""
    return {
        "version": p.PROTOCOL_VERSION,
        "about": "hex is a message as it stands in its frame; message is the same with its fields by name. Packed ids "
        f"are lists of numbers, other binary is hex; {', '.join(U64)} are decimal strings, for they may exceed what "
        "JSON's numbers keep. "
        "Where exact is false, another encoding of the same message is as good, and clients need only read this one.",
        "vectors": [
            *(_vector(name, sample, msgspec.msgpack.encode(sample), exact=True) for name, sample in SAMPLES.items()),
            *(_vector(name, sample, data, exact=False) for name, sample, data in _other_encodings()),
        ],
    }


def _other_encodings() -> list[tuple[str, Any, bytes]]:
    """What other encoders may write, and what newer peers may append."""
    pack = msgspec.msgpack.encode
    params = p.Params(temperature=1.0, max_tokens=4)
    return [
        (
            "a number without fraction as an integer",
            p.Generate(1, "", p.TextPrompt("x"), params, 1),
            pack(["generate", 1, "", ["text", "x"], [1, 1, 1, 0, 0, None, 4], 1]),
        ),
        ("a small integer in 64 bits", p.Abort(5), b"\x92\xa5abort\xcf" + (5).to_bytes(8, "big")),
        ("a string with a long header", p.Pong(1), b"\x92\xd9\x04pong\x01"),
        (
            "fields that are newer than the reader",
            p.Finished(1, 5, 8),
            pack(["finished", 1, 5, 8, None, [], b"", "new", [1]]),
        ),
        ("fields left out at the end", p.Failed(1, p.Failure(503, "busy")), pack(["failed", 1, [503, "busy"]])),
    ]


def _vector(name: str, sample: Any, data: bytes, *, exact: bool) -> dict[str, Any]:
    to_server = isinstance(sample, p.ClientMessage)
    return {
        "name": name,
        "to": "server" if to_server else "client",
        "exact": exact,
        "hex": data.hex(),
        "message": as_object(sample),
    }


def as_object(value: Any, field: str = "") -> Any:
    """A message with its fields by name, as JSON can hold it."""
    match value:
        case msgspec.Struct():
            tag = value.__struct_config__.tag
            fields = {name: as_object(getattr(value, name), name) for name in value.__struct_fields__}
            return fields if tag is None else {"kind": tag, **fields}
        case list():
            return [as_object(one, field) for one in value]
        case dict():
            return {name: as_object(one) for name, one in value.items()}
        case bytes() if field in IDS:
            return list(struct.unpack(f"<{len(value) // 4}i", value))
        case bytes():
            return value.hex()
        case int() if field in U64:
            return str(value)
        case _:
            return value


if __name__ == "__main__":
    sys.exit(main())
