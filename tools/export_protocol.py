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
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pipeline.client import protocol as p
from pipeline.stages.gateway.apidocs.schemas import Schemas

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "docs" / "protocol.schema.json"
PAGE = ROOT / "docs" / "protocol.md"
VECTORS = ROOT / "tests" / "protocol" / "vectors.json"

REF = "#/$defs/"
JSON_TEXT = {"type": ["string", "null"], "contentMediaType": "application/json"}
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
        (p.Hello | _Generate | p.Abort | p.Credit | p.Ping | p.Bye, p.ServerMessage), ref_template=f"{REF}{{name}}"
    )
    for name, part in parts.items():
        fields, places = getattr(p, name.strip("_")).__struct_fields__, part["prefixItems"]
        for place, field in zip(places[len(places) - len(fields) :], fields, strict=True):
            place.setdefault("title", field)
        if len(places) > len(fields):
            places[0]["title"] = "kind"
    maps = Schemas(REF, {})
    parts["_Generate"]["prefixItems"][2] = {"title": "request"} | maps.of(p.Request)
    parts["_Generate"] |= {"title": "Generate", "description": p.Generate.__doc__}
    parts["Generate"] = parts.pop("_Generate")
    for name, part in maps.components.items():
        parts[name] = part
        for field, hint in get_type_hints(getattr(p, name), include_extras=True).items():
            if _is_json(hint) and (schema := part["properties"].get(field)) is not None:
                part["properties"][field] = JSON_TEXT | {key: schema[key] for key in ("description",) if key in schema}
    for part in parts.values():
        if "description" in part:
            part["description"] = " ".join(part["description"].split())
        _mark_binary(part)
    to_server = _renamed(to_server)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Client wire of Pipeline, version {p.PROTOCOL_VERSION}",
        "description": "Each message is one MessagePack array. Its first place is the message's kind, the others are "
        "its fields in this order; fields with a default may be left out at the end, and further places are to be "
        "ignored. A request in it is a map of the fields that are given, and so are its parts; other keys are ignored. "
        'A string with "x-msgpack": "bin" is MessagePack bin.',
        "version": p.PROTOCOL_VERSION,
        "client_to_server": to_server,
        "server_to_client": to_client,
        "$defs": parts,
    }


class _Generate(p.Generate, frozen=True, tag="generate"):
    """Without the type of the request, which has fields of any JSON: msgspec makes no schema of those."""

    request: dict[str, Any]  # type: ignore[assignment]


def _renamed(schema: Any) -> Any:
    return json.loads(json.dumps(schema).replace(f"{REF}_Generate", f"{REF}Generate"))


def _is_json(hint: Any) -> bool:
    return hint is msgspec.Raw or getattr(hint, "__origin__", None) is msgspec.Raw


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
    """A struct's fields in Markdown."""
    hints = get_type_hints(kind, include_extras=True)
    if not kind.__struct_config__.array_like:
        rows = ["| field | type | meaning |", "|---|---|---|"]
        for field in msgspec.structs.fields(kind):
            hint = hints[field.name]
            needed = " (required)" if field.required else ""
            rows.append(f"| {field.name}{needed} | {_type_words(hint, is_map=True)} | {_description(hint)} |")
        return "\n".join(rows)
    rows = ["| place | field | type | default | meaning |", "|---|---|---|---|---|"]
    tag = kind.__struct_config__.tag
    if tag is not None:
        rows.append(f'| 0 | kind | string | – | `"{tag}"` |')
    for place, field in enumerate(msgspec.structs.fields(kind), int(tag is not None)):
        default = "–"
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            default = f"`{shown(value)}`"
        words = _description(hints[field.name])
        rows.append(f"| {place} | {field.name} | {_type_words(hints[field.name])} | {default} | {words} |")
    return "\n".join(rows)


def _description(hint: Any) -> str:
    for one in (hint, *get_args(hint)):
        metas = [meta for meta in getattr(one, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
        if words := " ".join(meta.description for meta in metas if meta.description):
            return words
    return ""


def _type_words(hint: Any, *, is_map: bool = False) -> str:
    """A type. In a map, fields of any type may be null or missing, ranges are shown, and JSON is a text."""
    if is_map and _is_json(hint):
        return "JSON text"
    if hasattr(hint, "__metadata__"):
        words = _type_words(hint.__origin__, is_map=is_map)
        bounds = " ".join(filter(None, map(_bounds, hint.__metadata__))) if is_map else ""
        return f"{words} {bounds}".rstrip()
    kinds = get_args(hint)
    match get_origin(hint):
        case origin if origin in (Union, types.UnionType):
            kinds = tuple(one for one in kinds if not (is_map and one is type(None)))
            return " or ".join(_type_words(one, is_map=is_map) for one in kinds)
        case origin if origin is list:
            return f"array of {_type_words(kinds[0], is_map=is_map)}"
        case origin if origin is dict:
            return f"map of {_type_words(kinds[0], is_map=is_map)} to {_type_words(kinds[1], is_map=is_map)}"
        case origin if origin is Literal:
            return " or ".join(f"`{json.dumps(one)}`" for one in kinds)
    return NAMES.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


def _bounds(meta: Any) -> str:
    limits = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
    found = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None and abs(limit) < 2**31]
    return f"({', '.join(found)})" if found else ""


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


def _generate(
    request_id: int, num_credits: int, received: list[bytes] | None = None, name: str | None = None, **fields: Any
) -> p.Generate:
    return p.Generate(request_id, p.Request(**fields), num_credits, received or [], name)


SAMPLES: dict[str, p.ClientMessage | p.ServerMessage] = {
    "hello": p.Hello(2, 2, "example/1.0"),
    "generate from text": _generate(1, 16, prompt="Once upon a time", max_tokens=8),
    "generate from token ids": _generate(
        2, 16, model="SmolLM2-135M-Instruct", prompt_token_ids=packed(1, 4093, 2, 49151), temperature=0.0
    ),
    "generate from a chat": _generate(
        MAX_U64,
        1024,
        messages=[p.MessageParam("system", "Be brief."), p.MessageParam("user", "Hé 👋", "ada")],
        add_generation_prompt=False,
        n=2,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=MAX_U64,
        max_tokens=64,
        stop=["\n\n", "é"],
        stop_token_ids=[7, 128001],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    ),
    "generate with a negative seed": _generate(3, 1, prompt="x", seed=-(2**63)),
    "resume": _generate(4, 16, [packed(504, 3575, 282)], prompt_token_ids=packed(1, 2), seed=7),
    "resume one of two": _generate(5, 16, [packed(504), b""], prompt="x", n=2, seed=7),
    "hello with an API key": p.Hello(2, 2, "example/1.0", "sk-example-0123456789"),
    "abort": p.Abort(MAX_U64),
    "credit": p.Credit(1, 16),
    "ping": p.Ping(2**53 + 1),
    "bye": p.Bye(),
    "welcome": p.Welcome(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
    "welcome from the second of two gateways": p.Welcome(
        *(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0),
        addresses=["tcp://0.0.0.0:8001", "tcp://0.0.0.0:8002"],
        gateway=1,
        poolings=["last", "mean"],
        defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 512},
    ),
    "generate the best": _generate(8, 1, prompt="x", n=2, best_of=4),
    "generate with a name and timings": _generate(6, 1, name="user-7/story.3", prompt="x", timings=True),
    "generate with priority, salt and timeout": _generate(
        7, 1, prompt="x", priority=-(2**31), cache_salt="tenant é", timeout_s=2.5
    ),
    "generate with penalties, bias, words and log probabilities": _generate(
        9,
        1,
        prompt="x",
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
    "generate with log probabilities of given ids": _generate(12, 1, prompt="x", logprob_token_ids=[17, 504, 49151]),
    "generate from the first ids": _generate(14, 1, prompt="x", truncate_prompt_tokens=5, truncation_side="right"),
    "generate the best that a beam search finds": _generate(
        15, 1, prompt="x", n=4, max_tokens=8, use_beam_search=True, length_penalty=0.5, early_stopping="never"
    ),
    "generate what matches a schema": _generate(
        10, 1, prompt="x", structured_outputs=p.StructuredOutputsParam(json=p.json_text('{"type":"object"}'))
    ),
    "generate what is predicted": _generate(16, 1, prompt="x", prediction=p.Prediction("content", "the same")),
    "compute an embedding": _generate(13, 0, prompt="x", pooling="mean", dimensions=2),
    "generate from a chat with tools": _generate(
        11,
        1,
        messages=[
            p.MessageParam("user", [p.ContentPart("text", "Is it cold"), p.ContentPart("text", "in Athens?")]),
            p.MessageParam(
                "assistant",
                tool_calls=[p.ToolCallParam(p.FunctionCall("weather", '{"city":"Athens"}'), "call-1")],
                reasoning="I have to look.",
            ),
            p.MessageParam("tool", "31 °C", tool_call_id="call-1"),
            p.MessageParam("assistant", "No, it"),
        ],
        add_generation_prompt=False,
        continue_final_message=True,
        tools=p.json_text('[{"type":"function","function":{"name":"weather"}}]'),
        tool_choice=p.json_text('{"type":"function","function":{"name":"weather"}}'),
        parallel_tool_calls=False,
        documents=p.json_text('[{"text":"It is hot."}]'),
        chat_template_kwargs=p.json_text('{"enable_thinking":false}'),
    ),
    "generate from a chat that requires a call": _generate(
        17,
        1,
        messages=[p.MessageParam("user", "Is it cold?")],
        tools=p.json_text('[{"type":"function","function":{"name":"weather"}}]'),
        tool_choice=p.json_text("required"),
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


_PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
_PROMPT_IDS = packed(33, 28, 216, 34, 28, 216, 35, 28)
_WELCOME = p.Welcome(2, "pipeline/0.1.0", "SmolLM2-135M-Instruct", 8192, 49152, 1024, 4194304, 1024, 5.0, 30.0)

TRANSCRIPT: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(2, 2, "example/1.0"),
    _WELCOME,
    _generate(1, 2, prompt="1, 2, 3,", **_PARAMS),
    p.Accepted(1, _PROMPT_IDS, 8412906318461237094, "cmpl-5f0c1d3b9a7e42468d1f6b3a0c9e7512"),
    p.Delta(1, [p.Output(0, " ", packed(216), 0, 0)]),
    p.Credit(1, 1),
    p.Delta(1, [p.Output(0, "4, ", packed(36, 28, 216), 1, 1)]),
    p.Delta(1, [p.Output(0, "5,", packed(37, 28), 4, 4, "length")]),
    p.Finished(1, 8, 6),
    p.Bye(),
]
RESUMING: list[p.ClientMessage | p.ServerMessage] = [
    p.Hello(2, 2, "example/1.0"),
    _WELCOME,
    _generate(1, 2, [packed(216, 36, 28, 216)], prompt_token_ids=_PROMPT_IDS, seed=8412906318461237094, **_PARAMS),
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
    return [
        (
            "a number without fraction as an integer",
            _generate(1, 1, prompt="x", temperature=1.0, max_tokens=4),
            pack(["generate", 1, {"max_tokens": 4, "temperature": 1, "prompt": "x"}, 1]),
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
        case msgspec.Struct() if not value.__struct_config__.array_like:
            given = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
            return {name: as_object(one, name) for name, one in given.items()}
        case msgspec.Struct():
            tag = value.__struct_config__.tag
            fields = {name: as_object(getattr(value, name), name) for name in value.__struct_fields__}
            return fields if tag is None else {"kind": tag, **fields}
        case list():
            return [as_object(one, field) for one in value]
        case dict():
            return {name: as_object(one, name) for name, one in value.items()}
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
