"""Messages between stages: each decodes to what was sent, and no field changes its position."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import CONTROL_REQUESTS, MessageDecoder
from tests.runtime.messages.samples import COMPLETED_OPTIONS, GIVEN_OPTIONS, SAMPLES
from tests.slices import part_of

SNAPSHOT = Path(__file__).parents[2] / "data" / "wire.json"
"""Sample → its MessagePack in hex. Appending a field extends a line here; any other change breaks older or newer
peers."""

INBOXES: dict[str, Any] = {
    "supervisor": m.SupervisorInbox,
    "gateway": m.GatewayInbox,
    "ingest": m.IngestInbox,
    "schedule": m.ScheduleInbox,
    "execute": m.ExecuteInbox,
    "detokenize": m.DetokenizeInbox,
}


def inboxes_of(struct: msgspec.Struct) -> list[str]:
    return [name for name, union in INBOXES.items() if type(struct) in get_args(union)]


def plain(value: Any) -> Any:
    """A struct as builtins, so that undecoded parts compare by their bytes."""
    if isinstance(value, msgspec.Raw):
        return bytes(value)
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, *(plain(getattr(value, name)) for name in value.__struct_fields__)]
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("name", SAMPLES)
def test_a_message_decodes_to_what_was_sent_in_every_inbox(name):
    sample = SAMPLES[name]
    data = msgspec.msgpack.encode(sample)
    for union in [INBOXES[inbox] for inbox in inboxes_of(sample)] or [type(sample)]:
        assert plain(MessageDecoder[Any](union).decode(data)) == plain(sample)


def test_every_member_of_every_inbox_has_a_sample():
    sampled = {type(sample) for sample in SAMPLES.values()}
    for union in INBOXES.values():
        assert set(get_args(union)) <= sampled
    assert set(CONTROL_REQUESTS) <= sampled


@pytest.mark.parametrize(
    ("formats", "quantization"), [("bf16", "none"), ("", "none"), ("q8_0+bf16+q4_1", "q4_1+q8_0"), ("int4", "int4")]
)
def test_the_formats_of_its_weights_say_the_quantization_of_a_model(formats, quantization):
    assert m.ExecuteFacts(1, 16, 2048, 9, weight_formats=formats).quantization == quantization


def test_every_field_of_the_options_is_sampled_with_a_value_other_than_its_default():
    default = m.GenerationOptions()
    for name in m.GenerationOptions.__struct_fields__:
        assert any(getattr(one, name) != getattr(default, name) for one in (GIVEN_OPTIONS, COMPLETED_OPTIONS)), name


def test_every_inbox_accepts_the_supervisor_s_control_messages():
    for name, union in INBOXES.items():
        assert name == "supervisor" or set(get_args(m.Control)) <= set(get_args(union))


@pytest.mark.parametrize("name", INBOXES)
def test_tags_are_unique_in_an_inbox(name):
    tags = [member.__struct_config__.tag for member in get_args(INBOXES[name])]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) for tag in tags)


def test_a_tag_means_one_message_everywhere():
    members = {member for union in INBOXES.values() for member in get_args(union)}
    assert len({member.__struct_config__.tag for member in members}) == len(members)


def test_the_encoding_has_not_changed():
    now = {name: msgspec.msgpack.encode(sample).hex() for name, sample in SAMPLES.items() if name != "launch"}
    assert now == json.loads(SNAPSHOT.read_text())


@pytest.mark.parametrize("name", ["deltas", "abort", "settled", "open"])
def test_an_appended_field_is_ignored_by_older_decoders(name):
    sample = SAMPLES[name]
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
    longer = msgspec.msgpack.encode([*fields, "new"])
    for inbox in inboxes_of(sample):
        assert plain(MessageDecoder[Any](INBOXES[inbox]).decode(longer)) == plain(sample)


DECODERS = [MessageDecoder[Any](union) for union in [*INBOXES.values(), m.Envelope, m.Launch]]


@settings(max_examples=part_of(300, 75), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_decode_errors(data):
    for decoder in DECODERS:
        try:
            decoder.decode(data)
        except msgspec.DecodeError:
            continue


@settings(max_examples=part_of(300, 75), deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 10_000),
    tail=st.sampled_from([b"", b"\x91" * 3000, b"\xa1\xff"]),
)
def test_damaged_messages_raise_only_decode_errors(name, edits, cut, tail):
    data = bytearray(msgspec.msgpack.encode(SAMPLES[name]))
    for index, value in edits:
        data[index % len(data)] = value
    spoilt = bytes(data[: cut % (len(data) + 1)]) + tail
    for decoder in DECODERS:
        for candidate in (bytes(data), spoilt):
            try:
                decoder.decode(candidate)
            except msgspec.DecodeError:
                continue
