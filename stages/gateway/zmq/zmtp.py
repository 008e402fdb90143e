"""The server's side of ZMTP 3, ZeroMQ's wire protocol: greeting, READY, frames (https://rfc.zeromq.org/spec/37/).

libzmq is not safe with hostile clients. It bounds the size of a frame and the number of messages, but collects the
frames of a message until the last one: a message that never ends uses all memory. Here a message is one frame, and a
frame with the MORE flag is refused when its header is read.

    bytes ──feed──► Decoder ──next──► ZmtpMessage, Command, LargeFrame or UnreadableMessage
                                      None if more bytes are needed
"""

import struct
from typing import Literal, NamedTuple

MAX_COMMAND_BYTES = 4096
"""Largest command, such as READY with all its properties."""
MAX_PING_CONTEXT_BYTES = 16
READ_BYTES = 16384
"""Frames up to this size are collected in the read buffer; larger ones have their own buffer."""
FIRST_BYTES = 65536
"""The first size of that buffer. It doubles whenever it is full, so a frame takes memory only as its bytes arrive."""

_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + _MECHANISM + bytes(32)
"""Version 3.1, mechanism NULL, as-server false."""
PEER_TYPES = (b"DEALER", b"REQ", b"ROUTER")
"""Socket types that may connect to a ROUTER."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_LENGTH = struct.Struct(">Q")


class ProtocolError(Exception):
    """The bytes are not ZMTP 3 with mechanism NULL, or the peer's socket type is not compatible."""


class ZmtpMessage(NamedTuple):
    data: bytes | bytearray


class Command(NamedTuple):
    name: bytes
    data: bytes


class LargeFrame(NamedTuple):
    """A large frame, or more of it, can be received: call `admit` when there is memory for `num_bytes` of it."""

    num_bytes: int


class UnreadableMessage(NamedTuple):
    """A message that is not read. Nothing after it can be read either."""

    reason: Literal["more frames", "too large"]


Event = ZmtpMessage | Command | LargeFrame | UnreadableMessage


class Decoder:
    """Decodes the bytes of one peer. Holds at most the bytes of two reads, and what was admitted of a large frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """Largest message; may change between messages."""
        self._state: Literal["greeting", "ready", "frames"] = "greeting"
        self._bytes = bytearray()
        """Read but not decoded yet."""
        self._large: bytearray | None = None
        """The large frame being received: its first part, with room for more."""
        self._filled = 0
        """Bytes of it that have arrived."""
        self._size = 0
        """Bytes that it has in all."""

    @property
    def is_inside(self) -> bool:
        """Whether a part of a frame has arrived and is not decoded."""
        return self._large is not None or bool(self._bytes)

    @property
    def num_arrived(self) -> int:
        """Bytes of the incomplete frame that have arrived."""
        return len(self._bytes) if self._large is None else self._filled

    @property
    def missing(self) -> memoryview | None:
        """Buffer for more of a large frame, never empty; None if there is none now."""
        if self._large is None or self._filled == len(self._large):
            return None
        return memoryview(self._large)[self._filled :]

    def fill(self, num_bytes: int) -> None:
        """`num_bytes` were read into `missing`."""
        self._filled += num_bytes

    def feed(self, data: bytes | memoryview) -> None:
        """Add bytes that were read while `missing` was None."""
        self._bytes += data

    def admit(self) -> None:
        """Receive the large frame whose header has arrived, or more of the one whose buffer is full."""
        before: bytes | bytearray = b""
        if self._large is None:
            header = self._header()
            assert header is not None
            _, begin, self._size = header
            del self._bytes[:begin]
        else:
            assert self._filled == len(self._large) < self._size
            before = self._large
        # A new buffer, because the old one may still be exported to the transport.
        buffer = bytearray(self._next_bytes)
        buffer[: len(before)] = before
        here = self._bytes[: len(buffer) - len(before)]
        del self._bytes[: len(here)]
        self._filled = len(before) + len(here)
        buffer[len(before) : self._filled] = here
        self._large = buffer

    @property
    def _next_bytes(self) -> int:
        """Bytes that the buffer will have."""
        return min(self._size, max(FIRST_BYTES, 2 * self._filled))

    def next(self) -> Event | None:
        """The next event; None if it is incomplete. Raises ProtocolError."""
        if self._state == "greeting":
            return self._greeting()
        event = self._frame()
        if self._state == "ready" and event is not None:
            if not isinstance(event, Command) or event.name != b"READY":
                raise ProtocolError("READY must follow the greeting")
            if (kind := _properties(event.data).get(b"socket-type")) not in PEER_TYPES:
                raise ProtocolError(f"a socket of type {kind!r} cannot connect to a ROUTER")
            self._state = "frames"
        return event

    def _greeting(self) -> Command | None:
        data = self._bytes
        # Bytes 1 to 8 of the signature are the identity length of an old version; ignore them.
        if (data and data[0] != 0xFF) or (len(data) > 9 and data[9] != 0x7F):
            raise ProtocolError("invalid greeting")
        if len(data) > 10 and data[10] < 3:
            raise ProtocolError(f"ZMTP version {data[10]} is not supported")
        if len(data) < len(GREETING):
            return None
        if data[12:32] != _MECHANISM:
            raise ProtocolError("the mechanism is not NULL")
        del data[: len(GREETING)]
        self._state = "ready"
        return Command(b"greeting", b"")

    def _header(self) -> tuple[int, int, int] | None:
        """Flags, header length and body length; None if the header is incomplete."""
        data = self._bytes
        if len(data) < 2:
            return None
        flags = data[0]
        if not flags & _LONG:
            return flags, 2, data[1]
        return (flags, 9, _LENGTH.unpack_from(data, 1)[0]) if len(data) >= 9 else None

    def _frame(self) -> Event | None:
        if self._large is not None:
            if self._filled < len(self._large):
                return None
            if self._filled < self._size:
                return LargeFrame(self._next_bytes)
            whole, self._large, self._filled = self._large, None, 0
            return ZmtpMessage(whole)
        if (header := self._header()) is None:
            return None
        flags, begin, size = header
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ProtocolError(f"invalid flags {flags:#x}")
        if flags & _COMMAND:
            if size > MAX_COMMAND_BYTES:
                raise ProtocolError(f"a command has {size} bytes")
        elif flags & _MORE:
            return UnreadableMessage("more frames")
        elif size > self.max_frame_bytes:
            return UnreadableMessage("too large")
        elif size > READ_BYTES:
            return LargeFrame(min(size, FIRST_BYTES))
        end = begin + size
        if len(self._bytes) < end:
            return None
        with memoryview(self._bytes) as view:
            body = bytes(view[begin:end])
        del self._bytes[:end]
        return _command(body) if flags & _COMMAND else ZmtpMessage(body)


def message(data: bytes) -> bytes:
    """Encode a message of one frame."""
    return _header(0, len(data)) + data


def command(name: bytes, data: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name + data
    return _header(_COMMAND, len(body)) + body


def ready(socket_type: bytes) -> bytes:
    return command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def pong(ping: bytes) -> bytes:
    """The reply to PING: its context, which follows the two bytes of the TTL."""
    return command(b"PONG", ping[2 : 2 + MAX_PING_CONTEXT_BYTES])


def _header(flags: int, size: int) -> bytes:
    return bytes((flags, size)) if size < 256 else bytes([flags | _LONG]) + _LENGTH.pack(size)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(body: bytes) -> Command:
    length = body[0] if body else 0
    if not 0 < length < len(body):
        raise ProtocolError("a command has no name")
    return Command(body[1 : 1 + length], body[1 + length :])


def _properties(data: bytes) -> dict[bytes, bytes]:
    """The properties of READY. Names are case-insensitive, and returned in lower case."""
    found: dict[bytes, bytes] = {}
    while data:
        name_end = 1 + data[0]
        value_begin = name_end + 4
        value_end = value_begin + int.from_bytes(data[name_end:value_begin], "big")
        if len(data) < value_begin or len(data) < value_end or name_end == 1:
            raise ProtocolError("READY has truncated properties")
        found[data[1:name_end].lower()] = data[value_begin:value_end]
        data = data[value_end:]
    return found
