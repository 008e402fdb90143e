"""The ZMTP decoder gives the same result for every split of the bytes and bounds its buffers."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.zmq import zmtp
from pipeline.stages.gateway.zmq.zmtp import Command, Decoder, LargeFrame, ProtocolError, UnreadableMessage, ZmtpMessage

MAX_BYTES = 40_000
HANDSHAKE = zmtp.GREETING + zmtp.ready(b"DEALER")
BODIES = st.lists(
    st.one_of(st.binary(max_size=600), st.integers(zmtp.READ_BYTES - 1, MAX_BYTES).map(lambda size: b"x" * size)),
    max_size=4,
)


def read(decoder: Decoder, data: bytes, sizes: list[int]) -> list[Any]:
    """The events of bytes that are read in pieces of these sizes, repeatedly."""
    events, position, number = [], 0, 0
    while position < len(data):
        size = min(sizes[number % len(sizes)], zmtp.READ_BYTES)
        if (missing := decoder.missing) is None:
            decoder.feed(piece := data[position : position + size])
        else:
            piece = data[position : position + min(size, len(missing))]
            missing[: len(piece)] = piece
            decoder.fill(len(piece))
        position, number = position + len(piece), number + 1
        while (event := decoder.next()) is not None:
            events.append(event)
            if isinstance(event, LargeFrame):
                decoder.admit()
            elif isinstance(event, UnreadableMessage):
                return events
    return events


def opened(max_frame_bytes: int = MAX_BYTES) -> Decoder:
    decoder = Decoder(max_frame_bytes)
    assert [event.name for event in read(decoder, HANDSHAKE, [1000])] == [b"greeting", b"READY"]
    return decoder


@given(BODIES, st.lists(st.integers(1, 20_000), min_size=1, max_size=5))
def test_messages_are_decoded_however_their_bytes_are_split(bodies: list[bytes], sizes: list[int]) -> None:
    decoder = Decoder(MAX_BYTES)
    data = HANDSHAKE + b"".join(zmtp.message(body) for body in bodies)
    messages = [event.data for event in read(decoder, data, sizes) if isinstance(event, ZmtpMessage)]
    assert messages == bodies
    assert not decoder.is_inside


@given(st.binary(max_size=400), st.booleans(), st.integers(1, 100))
def test_random_bytes_raise_only_protocol_errors(data: bytes, is_open: bool, size: int) -> None:
    decoder = opened() if is_open else Decoder(MAX_BYTES)
    with contextlib.suppress(ProtocolError):
        read(decoder, data, [size])


@pytest.mark.parametrize("header", [b"\x01\x00", b"\x01\x22", b"\x03" + (2**62).to_bytes(8, "big")])
def test_a_message_of_several_frames_is_rejected_at_its_first_header(header: bytes) -> None:
    assert read(opened(), header, [100]) == [UnreadableMessage("more frames")]


def test_a_too_large_message_is_rejected_at_its_header() -> None:
    decoder = opened(300)
    assert read(decoder, zmtp.message(bytes(300)), [1000]) == [ZmtpMessage(bytes(300))]
    assert read(decoder, zmtp.message(bytes(301))[:9], [1000]) == [UnreadableMessage("too large")]


def test_a_large_frame_has_no_buffer_until_it_is_admitted_and_then_one_for_what_arrives() -> None:
    size = 5 * zmtp.FIRST_BYTES
    decoder, data = opened(size), zmtp.message(bytes(range(256)) * (size // 256))
    decoder.feed(data[:1000])
    assert decoder.next() == decoder.next() == LargeFrame(zmtp.FIRST_BYTES)
    assert decoder.missing is None
    position = 1000
    for num_bytes in (1, 2, 4, 5):
        assert decoder.next() == LargeFrame(num_bytes * zmtp.FIRST_BYTES) and decoder.missing is None
        decoder.admit()
        assert decoder.next() is None
        assert decoder.missing is not None and len(decoder.missing) == num_bytes * zmtp.FIRST_BYTES - (position - 9)
        num_more = len(decoder.missing)
        decoder.missing[:] = data[position : position + num_more]
        decoder.fill(num_more)
        position += num_more
    assert decoder.next() == ZmtpMessage(data[9:])
    assert position == len(data) and not decoder.is_inside


@pytest.mark.parametrize("kind", [b"DEALER", b"REQ", b"ROUTER"])
def test_socket_types_that_can_talk_to_a_router_are_accepted(kind: bytes) -> None:
    (_, ready) = read(Decoder(MAX_BYTES), zmtp.GREETING + zmtp.ready(kind), [1000])
    assert ready.name == b"READY"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(9),
        zmtp.GREETING[:10] + b"\x02\x00",
        zmtp.GREETING.replace(b"NULL", b"CURVE"[:4]),
        zmtp.GREETING + zmtp.message(b"hello"),
        zmtp.GREETING + zmtp.command(b"PING", bytes(2)),
        zmtp.GREETING + zmtp.ready(b"SUB"),
        zmtp.GREETING + zmtp.command(b"READY"),
        zmtp.GREETING + zmtp.command(b"READY", b"\x0bSocket-Type\x00\x00\x00\xffDEALER"),
        zmtp.GREETING + zmtp.command(b"READY", bytes(zmtp.MAX_COMMAND_BYTES)),
        HANDSHAKE + b"\x04\x00",
        HANDSHAKE + b"\x04\x02\x05A",
        HANDSHAKE + b"\x05\x02\x01A",
        HANDSHAKE + b"\x08\x00",
    ],
)
def test_an_invalid_handshake_or_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(Decoder(MAX_BYTES), data, [1000])


def test_a_pong_has_only_the_context_of_the_ping() -> None:
    (ping,) = read(opened(), zmtp.command(b"PING", b"\x00\x64" + b"0123456789abcdefXYZ"), [7])
    assert ping == Command(b"PING", b"\x00\x640123456789abcdefXYZ")
    assert zmtp.pong(ping.data) == zmtp.command(b"PONG", b"0123456789abcdef")
