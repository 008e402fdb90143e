"""Messages as bytes and as objects, for every client to replay."""

import struct
from typing import Any

import msgspec

from pipeline.client import protocol as p
from tools.export_protocol.samples import SAMPLES, generate

IDS = ("token_ids", "prompt_token_ids", "received")
"""Fields of packed ids: as objects they are lists of numbers. Other binary is written as hex."""
U64 = ("request_id", "seed", "nonce")
"""Fields that may hold more than JSON's numbers keep exactly: as objects they are decimal strings."""


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
            generate(1, 1, prompt="x", temperature=1.0, max_tokens=4),
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
