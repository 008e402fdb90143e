"""The file format of recordings.

    8 bytes of magic │ frame │ frame │ …          frame: length (u32) │ CRC-32 of the data (u32) │ data

Numbers are little-endian. The data of the first frame is a `Header`, of each further one an `Entry`, as MessagePack.
The last is an `End`. A file without one is truncated: its complete frames are valid, and the rest is ignored. Zeros in
place of a frame end it too: memory that was not written.

The recording of a crash also has raw frames, which take less time to write. They have a kind (u32) instead of a
checksum, and `RAW` is set in their length:

    BEGIN            seconds (f64)         the clock, when the recording began
    SENDER           incarnation │ name    of messages with this number, in the bits from SENDER_SHIFT on
    MESSAGE          the message           part of the next LoopTurn; with the number of its sender
      … + HAS_ARRAYS size (u32) │ message │ size (u32), bytes of each shared array
    TURN             seconds (f64)         all of its messages came
    TURN_AND_CLOCK   seconds (f64)         the same, and then a Value of `monotonic` with this time
    CLOCK            seconds (f64)         a Value of `monotonic`
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any, BinaryIO

import msgspec

from pipeline.config.renamed import with_new_names
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.messages import ExecuteFacts
from pipeline.runtime.model.generation_config import ExcludedTokens, GenerationDefaults
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.version import VERSION

MAGIC = b"PLRECORD"
FORMAT = 4
"""Raised when a message changes otherwise than by a new last field: recordings of another format are refused."""
MAX_FRAME_BYTES = 2**30
"""Upper limit of an entry's size. A larger length means that the file is damaged."""
_HEAD = Struct("<II")
RAW = 2**31
CLOCK, MESSAGE, TURN, TURN_AND_CLOCK, SENDER, BEGIN = 3, 4, 5, 6, 7, 8
KINDS = 0xFF
HAS_ARRAYS = 1 << 8
SENDER_SHIFT = 9
_INCARNATION = Struct("<Q")
_SIZE = Struct("<I")
_NUMBER = Struct("<IId")
_SECONDS = Struct("<d")


class SegmentSize(msgspec.Struct, array_like=True, frozen=True):
    name: str
    num_bytes: int
    writable: bool


class Header(msgspec.Struct, array_like=True, frozen=True):
    """The recorded stage and its launch parameters."""

    format: int
    version: str
    """Version of the program that recorded."""
    stage: str
    replica: int
    rank: int
    incarnation: int
    from_start: bool
    """Whether the recording began with the stage."""
    has_sent: bool
    """Whether the stage's sends are recorded too."""
    settings: msgspec.Raw
    """`Settings`"""
    model_dir: str
    peers: list[str]
    segments: list[SegmentSize]
    facts: ExecuteFacts | None = None
    """The facts from `Start`, if the recording began after it."""
    instant: bool = False
    """Whether the stage was the instant executor, which computes nothing."""
    generation: GenerationDefaults | None = None
    """What the folder in `settings.generation_config` recommended, so that a replay does not need it."""
    launch_facts: ExecuteFacts | None = None
    """The facts that an executor was started with, because it replaced another one."""
    incarnations: dict[str, int] = {}
    """Of the peers' processes when it started."""
    excluded: ExcludedTokens = ExcludedTokens()
    """The tokens that the folder of `generation` excludes."""
    crash_counts: dict[int, int] = {}
    """Those that it was started with."""

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.replica}"


class LoopTurn(msgspec.Struct, array_like=True, frozen=True, tag="wake"):
    """The messages of one turn, as parallel lists. Empty after a timeout, or if there were no messages."""

    time_ns: int
    """Seconds since the recording began."""
    senders: list[str]
    incarnations: list[int]
    bodies: list[bytes]
    arrays: list[list[bytes]]
    """For each message, the bytes of its `ShmRef`s, in the order of its fields."""


class Value(msgspec.Struct, array_like=True, frozen=True, tag="value"):
    """A value that the stage read: monotonic, time or random."""

    kind: str
    number: float | int


class ObservedEvent(msgspec.Struct, array_like=True, frozen=True, tag="event"):
    """An event that is not a message; see `ReplayContext.event` and `ReplayContext.await_external`."""

    name: str
    key: int
    data: bytes


class SendRefused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """A send was refused here because the socket was full."""

    peer: str


class Sent(msgspec.Struct, array_like=True, frozen=True, tag="sent"):
    """A message that the stage sent here; `arrays` as in `LoopTurn`."""

    peer: str
    """A stage such as `ingest.0`, or a client's request such as `client 12`."""
    body: bytes
    """A message, or the bytes written to the client."""
    arrays: list[bytes]


class End(msgspec.Struct, array_like=True, frozen=True, tag="end"):
    """The end of the recording, and its reason."""

    reason: str
    counts: dict[str, int] = {}
    """In a replay: counts of what was left out."""


Entry = LoopTurn | Value | ObservedEvent | SendRefused | Sent | End

_ZEROS = bytes(_HEAD.size)
_encoder = msgspec.msgpack.Encoder()
_headers: MessageDecoder[Header] = MessageDecoder(Header)
_entries: MessageDecoder[Entry] = MessageDecoder(Entry)


def frame(struct: Header | Entry) -> bytes:
    """Encode a frame."""
    data = _encoder.encode(struct)
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


put_raw_head = _HEAD.pack_into
"""(memory, place, RAW | size, kind): write the head of a raw frame. The data comes first: a process may die in between.
"""
HEAD_BYTES = _HEAD.size
KIND_AT = 4
"""The place of the kind's lowest byte in a head."""

put_number = _NUMBER.pack_into
"""(memory, place, NUMBER, kind, seconds): write a raw frame of a time."""
NUMBER_BYTES = _NUMBER.size
NUMBER = RAW | _SECONDS.size


def number_frame(kind: int, number: float) -> bytes:
    """A raw frame of a time."""
    return _NUMBER.pack(NUMBER, kind, number)


def raw_frame(kind: int, data: bytes) -> bytes:
    """A raw frame."""
    return _HEAD.pack(RAW | len(data), kind) + data


def seconds_in(memory: memoryview, offset: int) -> float:
    """The time in a raw frame of one."""
    return float(_SECONDS.unpack_from(memory, offset + HEAD_BYTES)[0])


def sender_data(name: str, incarnation: int) -> bytes:
    """The data of a raw frame SENDER."""
    return _INCARNATION.pack(incarnation) + name.encode()


def with_arrays(body: bytes, arrays: list[bytes]) -> bytes:
    """The data of a raw frame MESSAGE that HAS_ARRAYS."""
    return b"".join(part for one in (body, *arrays) for part in (_SIZE.pack(len(one)), one))


def _parts_of(data: bytes) -> list[bytes]:
    """What `with_arrays` has joined."""
    parts, begin = [], 0
    while begin < len(data):
        (size,) = _SIZE.unpack_from(data, begin)
        begin += _SIZE.size
        parts.append(data[begin : begin + size])
        begin += size
    return parts


def raw_frames(memory: memoryview, begin: int, end: int, num: int) -> Iterator[tuple[int, int, int]]:
    """Where the first `num` frames in a part of a recording begin, their kinds (0 for those that are not raw), and
    where they end."""
    for _ in range(num):
        if begin >= end:
            return
        size, kind = _HEAD.unpack_from(memory, begin)
        begin, offset = begin + HEAD_BYTES + (size & ~RAW), begin
        yield offset, kind if size & RAW else 0, begin


class _RawFrames:
    """Makes entries of raw frames."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._senders: dict[int, tuple[str, int]] = {}
        self._turn = LoopTurn(0, [], [], [], [])

    def entries(self, kind: int, data: bytes) -> list[Entry]:
        """The entries that end with this frame. Raises ValueError if it is of no known kind."""
        if kind & KINDS == MESSAGE:
            sender, incarnation = self._senders[kind >> SENDER_SHIFT]
            body, *arrays = _parts_of(data) if kind & HAS_ARRAYS else [data]
            self._turn.senders.append(sender)
            self._turn.incarnations.append(incarnation)
            self._turn.bodies.append(body)
            self._turn.arrays.append(arrays)
            return []
        if kind & KINDS == SENDER:
            (incarnation,) = _INCARNATION.unpack_from(data)
            self._senders[kind >> SENDER_SHIFT] = data[_INCARNATION.size :].decode(), incarnation
            return []
        (now_s,) = _SECONDS.unpack(data)
        if kind == BEGIN:
            self._begun_s = now_s
            return []
        if kind == CLOCK:
            return [Value("monotonic", now_s)]
        if kind in (TURN, TURN_AND_CLOCK):
            turn = msgspec.structs.replace(self._turn, time_ns=round((now_s - self._begun_s) * 1e9))
            self._turn = LoopTurn(0, [], [], [], [])
            return [turn, Value("monotonic", now_s)] if kind == TURN_AND_CLOCK else [turn]
        raise ValueError(f"kind {kind}")


def client(number: int) -> str:
    """The name of a client's request."""
    return f"client {number}"


def settings_of(header: Header) -> Settings:
    """The settings of the recorded stage. Raises UserError if they are not valid in this version."""
    try:
        tree = msgspec.msgpack.decode(header.settings, type=dict[str, Any])
        return msgspec.convert(with_new_names(tree), Settings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(
            f"the recording's settings, of version {header.version}, are not valid in this version, {VERSION}: {error}"
        ) from error


class RecordingReader:
    """Reads a recording. Use as a context manager, and iterate once; then `flaw` and `end` are set. Raises UserError if
    the file can't be read or is not a recording."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.flaw = ""
        """Why the file ends without an `End`; empty if it has one."""
        self.end: End | None = None
        self._kind = 0
        """Of the last frame, if it is raw."""
        try:
            self._file: BinaryIO = self.path.open("rb")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot read {self.path}: {reason}") from error
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> Header:
        try:
            magic = self._file.read(len(MAGIC))
        except OSError as error:  # a directory
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        if magic != MAGIC:
            raise UserError(f"{self.path} is not a recording of `pipeline record`: wrong magic bytes")
        data = self._frame()
        if data is None:
            raise UserError(f"{self.path} is empty: {self.flaw or 'it ends before its header'}")
        try:
            fields = msgspec.msgpack.decode(data, type=list[msgspec.Raw])
            if (format := msgspec.msgpack.decode(fields[0], type=int)) != FORMAT:
                recorded = msgspec.msgpack.decode(fields[1], type=str)
                raise UserError(
                    f"{self.path} has recording format {format}, and this version, {VERSION}, replays format {FORMAT}: "
                    f"replay it with the version that recorded it, {recorded}"
                )
            return _headers.decode(data)
        except (msgspec.DecodeError, IndexError) as error:
            raise UserError(f"{self.path} is not a recording: its header can't be read: {error}") from error

    def _frame(self) -> bytes | None:
        """The data of the next frame; None at the end of the file, or where the file is damaged."""
        offset = self._file.tell()
        head = self._file.read(_HEAD.size)
        if not head or head == _ZEROS:
            return None
        if len(head) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            self._kind = checksum if length & RAW else 0
            length &= ~RAW
            if length > MAX_FRAME_BYTES:
                self.flaw = f"it is damaged at byte {offset}; what follows is ignored"
                return None
            data = self._file.read(length)
            if len(data) == length:
                if self._kind or zlib.crc32(data) == checksum:
                    return data
                self.flaw = f"it is damaged at byte {offset}; what follows is ignored"
                return None
        self.flaw = f"it is truncated: {self._file.tell() - offset} bytes at its end, from byte {offset}, are ignored"
        return None

    def __iter__(self) -> Iterator[Entry]:
        raw = _RawFrames()
        while (data := self._frame()) is not None:
            try:
                if self._kind:
                    yield from raw.entries(self._kind, data)
                    continue
                entry = _entries.decode(data)
            except (msgspec.DecodeError, ValueError, KeyError, OverflowError, StructError) as error:
                raise UserError(
                    f"{self.path}: an entry before byte {self._file.tell()} can't be read: {error}"
                ) from error
            if isinstance(entry, End):
                self.end = entry
                return
            yield entry
        self.flaw = self.flaw or "it is truncated: it has no end"

    def __enter__(self) -> "RecordingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
