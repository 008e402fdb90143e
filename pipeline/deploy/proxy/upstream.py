"""A small HTTP/1.1 client that passes a response on as it arrives: the relay's way to a replica's gateway.

aiohttp's client copies each piece through a queue and wakes a task for it. Here, what arrives is given to a function at
once, in the callback of the event loop.
"""

import asyncio
import contextlib
import errno
import math
import re
import time
from typing import NamedTuple, Protocol, cast

CONNECT_S = 5.0
MAX_HEAD_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8 * 1024
MAX_INTERIM = 8
"""Interim responses (1xx) before the response itself."""
MAX_WHOLE_BYTES = 16 * 1024 * 1024
"""The largest response that `ResponseCollector` collects."""
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_STATUS = re.compile(r"[1-9][0-9]{2}")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
NUM_IDLE = 64
"""Connections of a replica that are kept for the next request."""


SLOW_S = 0.5
"""A client that makes the ingress wait so long at once reads slowly."""
_OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of `connect` that say nothing about the other side."""


class UpstreamLost(ConnectionError):
    """The connection ended before the response did, or could not be made."""

    def __init__(self, why: str, *, is_own_fault: bool = False) -> None:
        """`is_own_fault`: this process has a part in it, so it need not mean that the replica is dead."""
        super().__init__(why)
        self.is_own_fault = is_own_fault


class Head(NamedTuple):
    status: int
    headers: list[tuple[str, str]]

    def get(self, name: str) -> str:
        """The value of the header with this name in lower case; empty if there is none."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    def all(self, name: str) -> list[str]:
        """The values of all headers with this name in lower case."""
        return [value for key, value in self.headers if key.lower() == name]


class Sink(Protocol):
    """Gets a response. Its functions are called from the event loop's callbacks and must not block. If one raises
    ValueError, the connection is closed."""

    def head(self, head: Head) -> None: ...

    def data(self, data: bytes) -> None: ...


class Connection(asyncio.Protocol):
    """One connection to a gateway: one request after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self.was_used = False
        """It has had a response before, so the gateway may have closed it meanwhile."""
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""
        self._has_head = False
        self._has_body = True
        self._num_interim = 0
        self._is_chunked = False
        self._is_chunk_over = False
        self._left = 0
        """Bytes left of the body, or of its chunk; -1 until the connection ends."""
        self._keeps_alive = True
        self.has_begun = False
        """A byte of the response has arrived."""
        self._paused_s = math.inf
        """When reading was paused; infinite while it is not."""
        self._was_slow = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Not if the last request was answered before it was sent whole: its rest would stay with the connection."""
        is_kept = self.is_open and self._keeps_alive and self._done is None
        return is_kept and self._transport is not None and not self._transport.get_write_buffer_size()

    def send(self, *parts: bytes, sink: Sink, has_body: bool = True) -> "asyncio.Future[None]":
        """Send a request, in parts that are not copied: uvloop refers to them until they are sent. The future is done
        when the response has ended; it raises UpstreamLost. The response to HEAD has no body, whatever its headers
        say."""
        assert self._done is None, "a request is open on this connection"
        self._reset()
        self._has_body = has_body
        self._sink = sink
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._done = done
        if self._transport is None or self._transport.is_closing():
            self._fail("the connection has ended")
        else:
            self._transport.writelines([part for part in parts if part])
        return done

    def pause(self) -> None:
        """Take no more bytes: the client reads slowly."""
        self._paused_s = min(self._paused_s, time.monotonic())
        if self._transport is not None and self.is_open:
            with contextlib.suppress(RuntimeError):  # is paused already
                self._transport.pause_reading()

    def resume(self) -> None:
        self._was_slow, self._paused_s = self.was_slow, math.inf
        if self._transport is not None and self.is_open:
            with contextlib.suppress(RuntimeError):
                self._transport.resume_reading()

    @property
    def was_slow(self) -> bool:
        """Whether the response was not read for SLOW_S at once. A gateway ends the connection of a client that reads
        nothing for long, and for it that is this one."""
        return self._was_slow or time.monotonic() - self._paused_s >= SLOW_S

    def close(self) -> None:
        """End the connection, and with it an open request."""
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed")

    # ---------------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._has_head and self._left == -1 and error is None:
            self._end()
        self._fail("the connection was lost" + ", which its client read slowly" * self.was_slow)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._sink is None:
            self._keeps_alive = False  # no request is open
            return
        self.has_begun = True
        try:
            if not self._has_head:
                rest = self._take_head(self._buffer + data)
                if rest is None:
                    return
                data = rest
            self._take_body(data)
        except ValueError as error:
            self._fail(f"the response is not HTTP/1.1: {error}")
            self.close()

    def _take_head(self, data: bytes) -> bytes | None:
        """Read the head. Returns what follows; None if it is not complete. Raises ValueError."""
        while True:
            end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
            if end < 0:
                if len(data) >= MAX_HEAD_BYTES:
                    raise ValueError("its head is too long")
                self._buffer = data
                return None
            head, data = head_of(data[:end]), data[end + 4 :]
            if head.status >= 200:
                break
            self._num_interim += 1
            if head.status == 101 or self._num_interim > MAX_INTERIM:
                raise ValueError(f"it has the status {head.status}, which was not asked for")
        self._buffer = b""
        self._has_head = True
        options = (one.strip().lower() for value in head.all("connection") for one in value.split(","))
        self._keeps_alive = "close" not in options
        self._is_chunked, self._left = _framing(head)
        if not self._has_body or head.status in (204, 304):
            self._is_chunked, self._left = False, 0
        assert self._sink is not None
        self._sink.head(head)
        return data

    def _take_body(self, data: bytes) -> None:
        if self._is_chunked:
            self._take_chunks(data)
            return
        assert self._sink is not None
        if self._left >= 0:
            if len(data) > self._left:
                self._keeps_alive = False  # it sent more than it said
            data, self._left = data[: self._left], self._left - min(self._left, len(data))
        if data:
            self._sink.data(data)
        if self._left == 0:
            self._end()

    def _take_chunks(self, data: bytes) -> None:
        """Raises ValueError."""
        assert self._sink is not None
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        given = []
        begin = 0
        is_over = False
        while begin < len(data):
            if self._left:
                piece = data[begin : begin + self._left]
                given.append(piece)
                begin += len(piece)
                self._left -= len(piece)
                self._is_chunk_over = not self._left
                continue
            if self._is_chunk_over:  # the line's end behind a chunk
                if len(data) - begin < 2:
                    break
                if data[begin : begin + 2] != b"\r\n":
                    raise ValueError("a chunk is longer than its size")
                begin += 2
                self._is_chunk_over = False
                continue
            end = data.find(b"\r\n", begin, begin + MAX_LINE_BYTES)
            if end < 0:
                if len(data) - begin >= MAX_LINE_BYTES:
                    raise ValueError("a chunk has no size")
                break
            text = data[begin:end].split(b";", 1)[0].rstrip()
            if not _SIZE.fullmatch(text):
                raise ValueError("a chunk has no size")
            size = int(text, 16)
            if size == 0:
                if data[end + 2 : end + 4] != b"\r\n" and b"\r\n\r\n" not in data[end:]:
                    if len(data) - end > MAX_TRAILER_BYTES:
                        raise ValueError("its trailers are too long")
                    break
                is_over = True
                begin = len(data)
                break
            begin, self._left = end + 2, size
        self._buffer = data[begin:]
        if given:
            self._sink.data(given[0] if len(given) == 1 else b"".join(given))
        if is_over:
            self._end()

    def _end(self) -> None:
        done, self._done, self._sink = self._done, None, None
        if done is not None and not done.done():
            done.set_result(None)

    def _fail(self, why: str) -> None:
        done, self._done, self._sink = self._done, None, None
        self._keeps_alive = False
        if done is not None and not done.done():
            done.set_exception(UpstreamLost(why, is_own_fault=self.was_slow))


class Upstream:
    """The connections to one gateway address."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def connect(self, *, fresh: bool = False) -> Connection:
        """A connection without an open request; `fresh` is one that was never used. Raises UpstreamLost."""
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_reusable:
                self._busy.add(connection)
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(Connection, self.host, self.port)
        except TimeoutError as error:
            raise UpstreamLost(f"{self.host}:{self.port} accepted no connection within {CONNECT_S:g} s") from error
        except OSError as error:
            is_own_fault = error.errno in _OWN_FAULTS
            raise UpstreamLost(
                f"{self.host}:{self.port}: {error.strerror or error}", is_own_fault=is_own_fault
            ) from error
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose response has ended for the next request; close another."""
        self._busy.discard(connection)
        if connection.is_reusable and len(self._idle) < NUM_IDLE:
            connection.was_used = True
            self._idle.append(connection)
        else:
            connection.close()

    def drop(self, connection: Connection) -> None:
        """End a connection."""
        self._busy.discard(connection)
        connection.close()

    def close(self) -> None:
        """End all connections, and with them their requests."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        self._busy.clear()


class ResponseCollector:
    """A sink that collects a response of up to `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_WHOLE_BYTES) -> None:
        self.response = Head(0, [])
        self.body = bytearray()
        self._max_bytes = max_bytes

    def head(self, head: Head) -> None:
        self.response = head

    def data(self, data: bytes) -> None:
        if len(self.body) + len(data) > self._max_bytes:
            raise ValueError(f"its body is longer than {self._max_bytes} bytes")
        self.body += data


async def fetch(upstream: Upstream, target: str, timeout_s: float) -> tuple[int, bytes]:
    """GET over a connection of its own, which then ends. Returns status and body. Raises UpstreamLost, also at the
    timeout."""
    sink = ResponseCollector()
    request = f"GET {target} HTTP/1.1\r\nHost: {host_header(upstream)}\r\n\r\n".encode()
    connection = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await upstream.connect(fresh=True)
            await connection.send(request, sink=sink)
    except TimeoutError as error:
        raise UpstreamLost(f"{upstream.host}:{upstream.port} did not answer {target} in {timeout_s:g} s") from error
    finally:
        if connection is not None:
            upstream.drop(connection)
    return sink.response.status, bytes(sink.body)


def host_header(upstream: Upstream) -> str:
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    return f"{host}:{upstream.port}"


def head_of(data: bytes) -> Head:
    """Decode a response's head, without the empty line. Raises ValueError."""
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not _STATUS.fullmatch(status):
        raise ValueError(f"it begins with {first[:40]!r}")
    headers = []
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise ValueError(f"it has the header {line[:40]!r}")
        headers.append((name, value.strip()))
    return Head(int(status), headers)


def _framing(head: Head) -> tuple[bool, int]:
    """Whether the body is chunked, and else its length; -1 if it ends with the connection. A body whose end could be
    read in two ways could be taken for the response to another request. Raises ValueError."""
    codings = head.all("transfer-encoding")
    lengths = set(head.all("content-length"))
    if codings:
        if lengths or [one.lower() for one in codings] != ["chunked"]:
            raise ValueError("its Transfer-Encoding must be chunked, without a Content-Length")
        return True, 0
    if not lengths:
        return False, -1
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise ValueError("its Content-Length is not a number")
    return False, int(length)
