"""The events of a background response that is streamed.

    task of the response ──append──► EventLog ──read from any event on──► clients, now or later

Clients may disconnect and come back, so the log keeps all events. It lives as long as the stored response.
"""

import asyncio

EVENT_END = b"\n\n"
"""Ends an event. JSON has no line breaks in strings, so it is nowhere else."""

OBJECT_BYTES = 48
"""Of an event, besides its bytes."""

READ_BYTES = 16 * 1024
"""What a slow client is sent at once, besides one event."""


class EventLog:
    """The events of one response. The position of an event is its `sequence_number`."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.num_bytes = 0
        """Size of the events, each with what an object takes."""
        self.is_over = False
        """No more events follow."""
        self.readers: set[object] = set()
        """Clients that read it now. They keep it, also when its response is stored no more."""
        self.num_counted = 0
        """Bytes that admission counts for them."""

    def __len__(self) -> int:
        return len(self._events)

    def append(self, data: bytes) -> None:
        """Append whole events. Does nothing if there is none."""
        if data:
            events = [event + EVENT_END for event in data.removesuffix(EVENT_END).split(EVENT_END)]
            self._events += events
            self.num_bytes += len(data) + OBJECT_BYTES * len(events)
            self._wake()

    def close(self) -> None:
        """The last event was appended."""
        self.is_over = True
        self._wake()

    def read(self, first: int) -> tuple[bytes, int]:
        """Events from the position `first` on, about READ_BYTES at most, and the position after them. A larger event
        comes alone, because it is not copied then."""
        end, num_bytes = first, 0
        while end < len(self._events) and num_bytes < READ_BYTES:
            num_bytes += len(self._events[end])
            if num_bytes > 2 * READ_BYTES and end > first:
                break
            end += 1
        return b"".join(self._events[first:end]), end

    async def more(self, num_read: int) -> None:
        """Wait until there are more than `num_read` events, or no more follow. It needs no deadline: the task that
        appends closes the log when its request ends, which the stages' messages or the end of a drain bring about."""
        while len(self._events) <= num_read and not self.is_over:
            await self._news.wait()

    def _wake(self) -> None:
        """Wake all that wait."""
        self._news.set()
        self._news = asyncio.Event()
