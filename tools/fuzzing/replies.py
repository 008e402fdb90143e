"""Reads HTTP/1.1 replies as strictly as RFC 9112 allows: what a proxy or another client might read differently is an
error. Without sockets: `ReplyReader` is given bytes.
"""

import re

import msgspec

MAX_HEAD_BYTES = 64 * 1024
SERVER = "pipeline"

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9]) ([\t -~]*)")
_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t -~]*?)[ \t]*")
"""A name is a token, and a value is visible ASCII: no server header here needs more."""
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")
_ONCE = (
    "content-length", "content-type", "transfer-encoding", "connection", "date", "server", "allow", "retry-after",
    "www-authenticate", "x-request-id", "request-id",
)  # fmt: skip
NEEDED = {401: "www-authenticate", 405: "allow", 503: "retry-after"}
"""Headers that a status requires (RFC 9110, 15)."""


class FramingError(Exception):
    """A reply that is not what HTTP allows."""


class Reply(msgspec.Struct):
    """A complete reply."""

    minor: int
    """Of its version"""
    status: int
    headers: dict[str, str]
    """By their names in lower case"""
    body: bytes = b""
    num_interim: int = 0
    """Interim replies (100 Continue) before it"""

    @property
    def closes(self) -> bool:
        """The server ends the connection after it."""
        connection = self.headers.get("connection", "").lower()
        return connection == "close" or (self.minor == 0 and connection != "keep-alive")


class ReplyReader:
    """The replies on one connection. Call `expect` for each request before its reply is read."""

    def __init__(self) -> None:
        self._methods: list[str] = []
        self._data = b""
        self._head: Reply | None = None
        self._num_interim = 0
        self._parts: list[bytes] = []
        self._is_over = False

    @property
    def is_at_start(self) -> bool:
        """Nothing of a reply has arrived, and none is expected."""
        return not self._data and self._head is None and not self._methods

    @property
    def has_no_byte(self) -> bool:
        """Nothing of the next reply has arrived."""
        return not self._data and self._head is None and not self._num_interim

    def expect(self, method: str) -> None:
        """A request with this method was sent."""
        self._methods.append(method)

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that end in `data`, to requests that were announced with `expect`: what follows stays for a later
        call. Raises FramingError."""
        self._data += data
        replies = []
        while self._methods and (reply := self._next()) is not None:
            replies.append(reply)
        return replies

    def end(self) -> list[Reply]:
        """The connection has ended. Returns the reply that ends with it. Raises FramingError."""
        head = self._head
        if head is not None and self._is_until_end(head):
            return [self._complete(head, b"".join([*self._parts, self._data]), len(self._data))]
        if head is not None or self._data:
            raise FramingError(f"the connection ended within a reply: {self._data[:80]!r}")
        return []

    def _next(self) -> Reply | None:
        if self._head is None:
            self._head = self._take_head()
            if self._head is None:
                return None
        head = self._head
        if not self._has_body(head):
            return self._complete(head, b"", 0)
        if "transfer-encoding" in head.headers:
            return self._chunks(head)
        if self._is_until_end(head):
            return None
        length = int(head.headers["content-length"])
        return None if len(self._data) < length else self._complete(head, self._data[:length], length)

    def _has_body(self, head: Reply) -> bool:
        return self._methods[0] != "HEAD" and head.status not in (204, 304)

    def _is_until_end(self, head: Reply) -> bool:
        return self._has_body(head) and not {"transfer-encoding", "content-length"} & set(head.headers)

    def _complete(self, head: Reply, body: bytes, num_taken: int) -> Reply:
        self._data = self._data[num_taken:]
        self._head, self._parts = None, []
        del self._methods[0]
        head.body, head.num_interim, self._num_interim = body, self._num_interim, 0
        if body and "content-type" not in head.headers:
            raise FramingError(f"a body without a type: {head}")
        return head

    def _take_head(self) -> Reply | None:
        """The head of the next final reply. Raises FramingError."""
        while True:
            if not self._data:
                return None
            cut = self._data.find(b"\r\n\r\n")
            if cut < 0:
                if not b"HTTP/1.".startswith(self._data[:7]) or len(self._data) > MAX_HEAD_BYTES:
                    raise FramingError(f"no head of a reply: {self._data[:200]!r}")
                return None
            head = _head_of(self._data[:cut])
            self._data = self._data[cut + 4 :]
            if head.status >= 200:
                _check_head(head, self._methods[0])
                return head
            if head.status != 100 or head.headers:
                raise FramingError(f"an unknown interim reply: {head}")
            self._num_interim += 1

    def _chunks(self, head: Reply) -> Reply | None:
        while True:
            end = self._data.find(b"\r\n")
            if end < 0:
                if len(self._data) > 8:
                    raise FramingError(f"a chunk without a size: {self._data[:80]!r}")
                return None
            line = self._data[:end]
            if not _CHUNK_SIZE.fullmatch(line):
                raise FramingError(f"the size of a chunk is {line[:80]!r}")
            size = int(line, 16)
            if len(self._data) < end + 4 + size:
                return None
            if self._data[end + 2 + size : end + 4 + size] != b"\r\n":
                raise FramingError(f"a chunk of {size} bytes does not end there")
            self._parts.append(self._data[end + 2 : end + 2 + size])
            self._data = self._data[end + 4 + size :]
            if not size:
                return self._complete(head, b"".join(self._parts), 0)


def _head_of(data: bytes) -> Reply:
    """Decode a head, without the empty line. Raises FramingError."""
    first, *lines = data.split(b"\r\n")
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise FramingError(f"the status line is {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        if (found := _HEADER.fullmatch(line)) is None:
            raise FramingError(f"a header is {line[:80]!r}")
        name = found[1].decode().lower()
        if name in headers and name in _ONCE:
            raise FramingError(f"two headers {name}")
        headers[name] = found[2].decode()
    return Reply(int(match[1]), int(match[2]), headers)


def _check_head(head: Reply, method: str) -> None:
    headers = head.headers
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    where = f"{head.status} to {method}: {headers}"
    if length is not None and not re.fullmatch("0|[1-9][0-9]*", length):
        raise FramingError(f"the length is {length!r}: {where}")
    if coding is not None and (coding != "chunked" or length is not None or head.minor == 0):
        raise FramingError(f"the coding is {coding!r}: {where}")
    if head.status == 204 and (length or coding):
        raise FramingError(f"a body's length: {where}")
    is_short = method == "HEAD" or head.status in (204, 304)
    if not is_short and length is None and coding is None and not head.closes:
        raise FramingError(f"no end: {where}")
    if headers.get("server") != SERVER:
        raise FramingError(f"the server is {headers.get('server')!r}: {where}")
    for name in ("date", *([NEEDED[head.status]] if head.status in NEEDED else [])):
        if name not in headers:
            raise FramingError(f"no header {name}: {where}")
