"""How often each request has killed the executor, in memory that outlives this process: its successor goes on counting.

The memory is an array of entries, request id and number of deaths. An entry without deaths is free.
"""

from struct import Struct

from pipeline.stages.schedule.kv_cache.block_index import NO_MEMORY, IndexMemory

_ENTRY = Struct("<QQ")


class Strikes:
    """Deaths of the executor by request, of requests that are suspects. Without memory, or beyond its end, they are
    forgotten with this process. Entries of requests that never came to this process make room for others."""

    def __init__(self, place: IndexMemory = NO_MEMORY) -> None:
        """`place` is writable, or zeros. It is read when the first request comes: a process that this one replaces on
        purpose writes until then."""
        self._place = place
        self._memory = memoryview(bytearray(0)) if place.memory is None else place.memory
        self._of: dict[int, int] | None = None
        self._entries: dict[int, int] = {}
        """The place of each request's entry. Those that this process only has from the one before come first."""
        self._free: list[int] = []

    @property
    def _num(self) -> dict[int, int]:
        if self._of is None:
            entries = list(_ENTRY.iter_unpack(self._memory))
            used = b"".join(_ENTRY.pack(*entry) for entry in entries if entry[1])
            self._of = dict(_ENTRY.iter_unpack(self._place.observe(used)))
            self._entries = {request_id: place for place, (request_id, num) in enumerate(entries) if num}
            self._free = [place for place, (_, num) in enumerate(entries) if not num][::-1]
        return self._of

    def get(self, request_id: int) -> int:
        return self._num.get(request_id, 0)

    def set(self, request_id: int, num: int) -> None:
        known, place = self._num, self._entries.pop(request_id, None)
        known[request_id] = num
        if place is None:
            place = self._free.pop() if self._free else self._taken_from_oldest()
        if place is not None:
            self._entries[request_id] = place
            _ENTRY.pack_into(self._memory, place * _ENTRY.size, request_id, num)

    def _taken_from_oldest(self) -> int | None:
        """The place of the entry that was set longest ago. None if there is no memory."""
        oldest = next(iter(self._entries), None)
        return None if oldest is None else self._entries.pop(oldest)

    def pop(self, request_id: int) -> int:
        """Forget a request. Returns its deaths."""
        num = self._num.pop(request_id, 0)
        if (place := self._entries.pop(request_id, None)) is not None:
            _ENTRY.pack_into(self._memory, place * _ENTRY.size, 0, 0)
            self._free.append(place)
        return num
