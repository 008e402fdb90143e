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
from pipeline.client.protocol import generation, sampling
from tools.export_protocol import PAGE, ROOT, VECTORS, as_object, published

KEPT = Path(__file__).parent / "version_1.json"
"""The vectors that were published with version 1; never rewritten."""
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
def test_messages_of_version_1_are_decoded_correctly(vector: Any) -> None:
    """Fields may be added, never removed or moved: that would break every existing client."""
    message = msgspec.msgpack.decode(bytes.fromhex(vector["hex"]), type=UNIONS[vector["to"]])
    assert with_fields_of(as_object(message), vector["message"]) == vector["message"]
    assert p.PROTOCOL_VERSION == 1


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
        name: kind for name, kind in vars(p).items() if isinstance(kind, type) and kind.__module__ == p.__name__
    }
    for name, kind in structs.items():
        if name != "WireMessage":
            heading = kind.__struct_config__.tag if kind in KINDS.values() else name
            assert re.search(rf"^### {heading}$", page, re.MULTILINE), f"docs/protocol.md has no section on {heading}"
            assert f"<!-- fields of {name} -->" in page


def test_the_page_has_the_limits_of_the_code() -> None:
    from pipeline.config.settings import LimitSettings
    from pipeline.stages.gateway.zmq import listener, server, stream

    page = " ".join(PAGE.read_text().split())
    caps = LimitSettings()
    for words in (
        f"within {server.HELLO_S:g} s of connecting",
        f"read nothing for {stream.STALL_S:g} s",
        f"more than {server.MAX_PENDING_MESSAGES:,} messages",
        f"those of all clients take {server.MAX_PENDING_BYTES // 1024**2} MiB",
        f"({listener.MAX_CONNECTIONS:,}, or a quarter",
        f"| {caps.max_n}; {caps.max_stop_strings} of 1 to {sampling.MAX_STOP_CHARS} characters; ",
        f" characters; {caps.max_stop_token_ids} |",
        f"| {caps.max_logit_bias:,}; {caps.max_bad_words:,} of 1 to {sampling.MAX_STOP_CHARS} characters; ",
        f" characters; {caps.max_logprobs} |",
        f"| within {server.HELLO_S:g} s of connecting; at most {server.MAX_HELLO_BYTES // 1024} KiB |",
        f"not complete {server.MESSAGE_S:g} s after",
        f"| {listener.RECEIVE_BOUND}, then",
        f"| partly received messages above {listener.SMALL_BYTES // 1024} KiB,",
        f"room for {listener.NUM_LARGE} × `max_message_bytes`",
    ):
        assert words in page, words


def test_sampling_params_have_the_same_limits_as_over_http() -> None:
    from pipeline.client.inputs import sampling_params, structured_params
    from pipeline.config.settings import LimitSettings

    for name in (
        "MAX_STOP_CHARS",
        "MAX_LOGPROB_TOKEN_IDS",
        "MAX_BIAS",
        "MIN_REPETITION_PENALTY",
        "MAX_REPETITION_PENALTY",
    ):
        assert getattr(sampling_params, name) == getattr(sampling, name)
    assert {f"max_{name}" for name in sampling_params.MOST} <= set(LimitSettings.__struct_fields__)
    for name, most in sampling_params.MOST.items():
        (meta,) = [
            one for one in get_type_hints(LimitSettings, include_extras=True)[f"max_{name}"].__metadata__ if one.le
        ]
        assert most == meta.le, f"{name}: what no server takes"
    fields = set(sampling_params.SamplingParams.__struct_fields__)
    assert set(p.Params.__struct_fields__) == fields - {"spaces_between_special_tokens"}
    assert structured_params.KINDS == generation.KINDS


@given(st.binary(max_size=100))
def test_random_bytes_raise_only_decoding_errors(data: bytes) -> None:
    for union in UNIONS.values():
        try:
            msgspec.msgpack.decode(data, type=union)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
