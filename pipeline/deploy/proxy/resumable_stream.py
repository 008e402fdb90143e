"""Separates the events of a stream from its resume points (pipeline/runtime/resume_points.py has their form). Pure.

Events are given out only once the point behind them is here. So if the connection ends, what the client has is exactly
what the points describe, and the rest comes again from another replica.
"""

from pipeline.runtime.resume_points import PREFIX

MAX_HELD_BYTES = 4 * 1024 * 1024
"""Bytes without a point behind them that are held back. A stream with more can't be continued from there on."""
MAX_POINTS_BYTES = 16 * 1024 * 1024
"""The most that a gateway reads in front of a body that continues a stream."""
_MARK = b"\n\n" + PREFIX
_KEEP_ALIVES = (b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n')
"""Belong to no output, so they are passed on at once."""


class ResumableStream:
    """One stream, over one or several connections."""

    def __init__(self) -> None:
        self.points: list[bytes] = []
        """All points so far, with the comment's prefix."""
        self.num_point_bytes = 0
        self.num_outputs = 0
        """Points that named output: more than before means progress."""
        self.is_off = False
        """It can't be continued from here on."""
        self.failure: str | None = None
        """The code of the error with which the replica ends the stream. The events of the error are held back."""
        self._buffer = bytearray()
        self._no_mark_before = 0
        """No point begins in the buffer before this place, so that each byte is searched once however many pieces an
        event comes in."""
        self._no_close_before = 0
        """The same for the end of the first point in the buffer."""

    @property
    def is_resumable(self) -> bool:
        """Whether what was given out can be continued. Before the first point, that is nothing."""
        return not self.is_off

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the response. Returns those to give out."""
        self._buffer += data
        if self.is_off and self.failure is None and PREFIX not in self._buffer:
            return self.rest()
        given = []
        begin = 0
        while (point := self._next_point(begin)) is not None:
            end, close = point
            if self.failure is None:
                given.append(bytes(self._buffer[begin:end]))
                self._take(bytes(self._buffer[end : close + 1]))
            begin = close + 2
        self._drop(begin)
        if len(self._buffer) > MAX_HELD_BYTES or self.num_point_bytes > MAX_POINTS_BYTES:
            self.is_off = True
            self.points.clear()
        if self.failure is None and (self._buffer in _KEEP_ALIVES or (self.is_off and self._buffer)):
            given.append(self.rest())
        return given[0] if len(given) == 1 else b"".join(given)

    def _next_point(self, begin: int) -> tuple[int, int] | None:
        """Where the first complete point of the buffer behind `begin` begins and ends."""
        data = self._buffer
        if data.startswith(PREFIX, begin):
            end = begin
        else:
            found = data.find(_MARK, max(begin, self._no_mark_before))
            if found < 0:
                self._no_mark_before = max(begin, len(data) - len(_MARK) + 1)
                return None
            self._no_mark_before = found
            end = found + 2
        close = data.find(b"\n\n", max(end + len(PREFIX), self._no_close_before))
        if close < 0:
            self._no_close_before = max(end, len(data) - 1)
            return None
        return end, close

    def _drop(self, num: int) -> None:
        """Forget the first bytes of the buffer."""
        del self._buffer[:num]
        self._no_mark_before = max(0, self._no_mark_before - num)
        self._no_close_before = max(0, self._no_close_before - num)

    def _take(self, block: bytes) -> None:
        """Take the lines of a point."""
        word = block[len(PREFIX) :].split(maxsplit=1)[0]
        if word == b"failed":
            self.failure = block[len(PREFIX) + len(word) :].strip().decode("latin-1")
        elif word == b"off":
            self.is_off = True
        elif not self.is_off:
            self.points.append(block)
            self.num_point_bytes += len(block)
            self.num_outputs += not word.startswith(b"{") or block.count(b"\n") > 1

    def rest(self) -> bytes:
        """What is held back: give it out if the response has ended properly."""
        rest = bytes(self._buffer)
        self._drop(len(rest))
        return rest

    def lose(self) -> None:
        """The connection has ended early: forget what is held back."""
        self._drop(len(self._buffer))
        self.failure = None
