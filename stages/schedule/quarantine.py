"""Finds requests that kill the executor, or schedule itself.

    executor died ──► suspects: all requests that it was computing
                        └── groups of at most 8 ──died again──► of 2 ──died again──► each alone ──died again──► failed
                              └── a step of the group settled: its requests are cleared

    schedule died ──► suspects: all requests that were running, as its successor learns with their `Admit`
                        └── groups of at most 32 ──died again──► of 4 ──died again──► each alone

Only requests that are cleared run beside a group, so an innocent request dies with a guilty one a few times at most,
and waits for a few steps of others. Beside the small groups of schedule's suspects, nothing runs: one that was cleared
and kills later would make the group look guilty. The executor may die for other reasons: only a request that has died
`MAX_STRIKES` times without a settled step in between fails, or one that died alone with one strike less. A restart on
purpose and a death before the process was ready do not count.

Schedule forgets all of this when it dies itself. So the gateways count these deaths, and fail requests
(stages/gateway/recovery.py). A restart of schedule keeps the KV cache, so its groups are larger: a step of one is soon
repeated. The last ids that it settled may not have reached the gateway, so its suspects need several new ones.
"""

from collections import deque
from collections.abc import Iterable

import msgspec

GROUP_SIZES = (8, 2, 1)
MAX_STRIKES = 4
GROUP_SIZES_OF_SCHEDULE = (32, 4, 1)
"""After the first, second, … death of schedule."""
NUM_CLEARING_IDS = 4
"""Sampled ids after which a suspect of schedule's death is cleared, for each of its sequences. More than are settled in
one wake, which may end before they are sent."""


class Group(msgspec.Struct, eq=False):
    """Suspects that run together."""

    request_ids: dict[int, int]
    """Those that are not cleared, and the number of ids after which they are."""
    size: int = 0
    """How many suspects of deaths of schedule it may have; 0: those of the executor's death are complete."""


class Quarantine:
    """The suspects, by request id."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        """The first one runs."""
        self._strikes: dict[int, int] = {}
        """Deaths of the executor."""

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    @property
    def is_cleared(self) -> bool:
        """Whether all suspects that ran are cleared, so that the next ones may run."""
        return bool(self._groups) and not self._groups[0].request_ids

    @property
    def is_alone(self) -> bool:
        """Whether the group that runs must have no other requests beside it, not even cleared ones."""
        return bool(self._groups) and 0 < self._groups[0].size < GROUP_SIZES_OF_SCHEDULE[0]

    def excludes(self, request_id: int) -> bool:
        """Whether a request must wait until the quarantine is over, or until its group runs."""
        return bool(self._groups) and request_id not in self._groups[0].request_ids

    def add(self, request_id: int, num_deaths: int, uncleared: Iterable[int], num_sequences: int = 1) -> None:
        """A request was running when schedule died, `num_deaths` times in a row. If there were no suspects, the first
        group is what runs and is `uncleared`."""
        if not self._groups and (others := dict.fromkeys(uncleared, 1)):
            self._groups.append(Group(others))
        num_ids = NUM_CLEARING_IDS * num_sequences
        size = GROUP_SIZES_OF_SCHEDULE[min(num_deaths, len(GROUP_SIZES_OF_SCHEDULE)) - 1]
        with_room = (one for one in self._groups if one.size == size and len(one.request_ids) < size)
        if (group := next(with_room, None)) is not None:
            group.request_ids[request_id] = num_ids
            return
        # Those in most deaths go first, but the first group runs already.
        later = (place for place, one in enumerate(self._groups) if place and one.size > size)
        self._groups.insert(next(later, len(self._groups)), Group({request_id: num_ids}, size))

    def died(self, aboard: Iterable[int]) -> list[int]:
        """The executor died while it computed these requests. Returns those that have to fail."""
        suspects = sorted(set(aboard))
        if not suspects:
            return []
        if self._groups:  # beside the group, only cleared requests ran
            running = self._groups[0].request_ids
            suspects = [request_id for request_id in suspects if request_id in running] or suspects
        for request_id in suspects:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        limit = MAX_STRIKES - 1 if len(suspects) == 1 else MAX_STRIKES
        failed = [request_id for request_id in suspects if self._strikes[request_id] >= limit]
        suspects = [request_id for request_id in suspects if request_id not in failed]
        size = next((size for size in GROUP_SIZES if size < len(suspects)), 1)
        groups = [Group(dict.fromkeys(suspects[begin : begin + size], 1)) for begin in range(0, len(suspects), size)]
        if self._groups:
            first = self._groups.popleft()
            waiting = {one: num for one, num in first.request_ids.items() if one not in suspects and one not in failed}
            groups.append(Group(waiting, first.size))
        self._groups.extendleft(reversed(groups))
        for request_id in failed:
            del self._strikes[request_id]
        return failed

    def settled(self, request_id: int) -> None:
        """A sampled id of this request has arrived."""
        self._strikes.pop(request_id, None)
        for group in self._groups:
            if request_id in group.request_ids:
                group.request_ids[request_id] -= 1
                if group.request_ids[request_id] <= 0:
                    del group.request_ids[request_id]

    def ended(self, request_id: int) -> None:
        """This request has ended."""
        self._strikes.pop(request_id, None)
        for group in self._groups:
            group.request_ids.pop(request_id, None)

    def next_group(self) -> bool:
        """If the group that runs is cleared, go on to the next one. Returns whether that has changed who may run."""
        if not self.is_cleared:
            return False
        while self._groups and not self._groups[0].request_ids:
            self._groups.popleft()
        return True
