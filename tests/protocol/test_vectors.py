"""The published wire format: its files match the types, and our encoder and decoder match the vectors."""

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import protocol as p
from pipeline.client.protocol import sampling
from tools.export_protocol.published import PAGE, ROOT, VECTORS, published
from tools.export_protocol.vectors import as_object

KEPT = Path(__file__).parent / "version_2.json"
"""The vectors that were published with version 2; never rewritten."""
DOCUMENT: Any = json.loads(VECTORS.read_text())
UNIONS: dict[str, Any] = {"server": p.ClientMessage, "client": p.ServerMessage}
KINDS = {member.__struct_config__.tag: member for union in UNIONS.values() for member in union.__args__}


@pytest.mark.parametrize("path", published(), ids=lambda path: path.name)
def test_the_published_files_match_the_types(path: Any) -> None:
    assert path.read_text() == published()[path], f"python -m tools.export_protocol writes {path.relative_to(ROOT)}"


@pytest.mark.parametrize("vector", DOCUMENT["vectors"], ids=lambda vector: vector["name"])
def test_a_vector_decodes_to_its_object_and_encodes_to_its_bytes(vector: Any) -> None:
    data = bytes.fromhex(vector["hex"])
    message = msgspec.msgpack.decode(data, type=UNIONS[vector["to"]])
    assert as_object(message) == vector["message"]
    if vector["exact"]:
        assert msgspec.msgpack.encode(message) == data


def test_every_message_has_a_vector() -> None:
    assert {vector["message"]["kind"] for vector in DOCUMENT["vectors"]} == set(KINDS)


@pytest.mark.parametrize("vector", json.loads(KEPT.read_text())["vectors"], ids=lambda vector: vector["name"])
def test_messages_as_they_were_published_are_decoded_correctly(vector: Any) -> None:
    """Fields may be added, never removed or moved: that would break every existing client."""
    message = msgspec.msgpack.decode(bytes.fromhex(vector["hex"]), type=UNIONS[vector["to"]])
    assert with_fields_of(as_object(message), vector["message"]) == vector["message"]
    assert p.PROTOCOL_VERSION == 2


def with_fields_of(value: Any, kept: Any) -> Any:
    """A value without the fields that are missing in `kept`."""
    if isinstance(kept, dict):
        return {name: with_fields_of(value[name], one) for name, one in kept.items()}
    if isinstance(kept, list) and len(kept) == len(value):
        return [with_fields_of(one, old) for one, old in zip(value, kept, strict=True)]
    return value


def test_the_page_has_a_section_for_every_message_and_struct() -> None:
    page = PAGE.read_text()
    structs: dict[str, Any] = {
        name: kind for name, kind in vars(p).items() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    assert len(structs) > len(KINDS)
    for name, kind in structs.items():
        if name != "WireMessage":
            heading = kind.__struct_config__.tag if kind in KINDS.values() else name
            assert re.search(rf"^### {heading}$", page, re.MULTILINE), f"docs/protocol.md has no section on {heading}"
            assert f"<!-- fields of {name} -->" in page


def test_the_page_has_the_limits_of_the_code() -> None:
    from pipeline.config.settings import LimitSettings
    from pipeline.stages.gateway.zmq import handshake, listener, peer_sender, stream, sweeper

    page = " ".join(PAGE.read_text().split())
    caps = LimitSettings()
    for words in (
        f"within {sweeper.HELLO_S:g} s of connecting",
        f"read nothing for {stream.STALL_S:g} s",
        f"more than {peer_sender.MAX_PENDING_MESSAGES:,} messages",
        f"those of all clients take {peer_sender.MAX_PENDING_BYTES // 1024**2} MiB",
        f"({listener.MAX_CONNECTIONS:,}, or a quarter",
        f"| {caps.max_n}; {caps.max_stop_strings} of 1 to {sampling.MAX_STOP_CHARS} characters; ",
        f" characters; {caps.max_stop_token_ids} |",
        f"| {caps.max_logit_bias:,}; {caps.max_bad_words:,} of 1 to {sampling.MAX_STOP_CHARS} characters; ",
        f" characters; {caps.max_logprobs} |",
        f"| within {sweeper.HELLO_S:g} s of connecting; at most {handshake.MAX_HELLO_BYTES // 1024} KiB |",
        f"not complete {sweeper.MESSAGE_S:g} s after",
        f"| {listener.RECEIVE_BOUND}, then",
        f"| partly received messages above {listener.SMALL_BYTES // 1024} KiB,",
        f"room for {listener.NUM_LARGE} × `max_message_bytes`",
    ):
        assert words in page, words


def test_sampling_params_have_the_limits_of_every_server() -> None:
    from pipeline.client.inputs import sampling_params
    from pipeline.config.settings import LimitSettings

    assert {f"max_{name}" for name in sampling_params.MOST} <= set(LimitSettings.__struct_fields__)
    for name, most in sampling_params.MOST.items():
        (meta,) = [
            one for one in get_type_hints(LimitSettings, include_extras=True)[f"max_{name}"].__metadata__ if one.le
        ]
        assert most == meta.le, f"{name}: what no server takes"


def test_sampling_params_have_the_fields_and_ranges_of_a_request() -> None:
    from pipeline.client.inputs.sampling_params import SamplingParams

    assert set(SamplingParams.__struct_fields__) <= set(p.Request.__struct_fields__)
    assert set(sampling.SamplingFields.__struct_fields__) <= set(SamplingParams.__struct_fields__)
    info = msgspec.inspect.type_info(p.Request)
    assert isinstance(info, msgspec.inspect.StructType)
    outside = [
        (field.name, value)
        for field in info.fields
        if field.name in SamplingParams.__struct_fields__
        for value in out_of_range(field.type)
    ]
    assert len(outside) > 20
    for name, value in outside:
        with pytest.raises(ValueError, match=f"^{name} must be "):
            SamplingParams(**{name: value})  # type: ignore[arg-type]


def out_of_range(info: Any) -> list[float]:
    """Numbers just out of a type's range."""
    match info:
        case msgspec.inspect.UnionType():
            return [value for one in info.types for value in out_of_range(one)]
        case msgspec.inspect.Metadata():
            return out_of_range(info.type)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            found = (info.ge, -1), (info.gt, 0), (info.le, 1), (info.lt, 0)
            return [bound + step for bound, step in found if bound is not None]
    return []


@given(st.binary(max_size=100))
def test_random_bytes_raise_only_decoding_errors(data: bytes) -> None:
    for union in UNIONS.values():
        try:
            msgspec.msgpack.decode(data, type=union)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
