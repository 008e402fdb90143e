"""Finds requests that kill the executor, or schedule itself.

    a process died ──► suspects: all requests that it had in work
                         └── groups of at most 32 ──died again──► of 4 ──died again──► each alone ──died again──► failed
                               └── each sequence of a suspect has some new ids: it is cleared

Only a request that was in work alone fails: beside others, any of them may be the reason. Each death counts for all
requests that were in work, so one that kills is in a smaller group after each of its deaths, whatever the others do,
and alone after the third. Beside groups of 32, requests that are cleared run. Beside smaller ones, nothing runs: a
request that was cleared and kills later would make the group look guilty. A restart on purpose and a death before the
process was ready do not count.

If the executor died, those in work are the requests of the steps in flight, also those that have left their rows since.
Schedule's successor goes on counting these deaths (strikes.py). Those of schedule are counted by the gateways, which
fail requests (stages/gateway/recovery.py); a request that waits in a queue of schedule is in work too, unless it is
held back.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from pipeline.stages.schedule.strikes import Strikes

GROUP_SIZES = (32, 4, 1)
"""After the first, second, … death."""
MAX_STRIKES = 3
"""Deaths of the executor, of which the last was alone, before a request fails."""
NUM_CLEARING_IDS = 4
"""Steps with a sampled id after which a suspect is cleared, for each of its sequences. More than are settled in one
wake, which may end before they are sent, and more than are in flight: a request that kills at a certain id is not
cleared by the ids before that."""


class Group(msgspec.Struct, eq=False):
    """Suspects that run together."""

    request_ids: dict[int, int]
    """Those that are not cleared, and the number of ids after which they are."""
    size: int = 0
    """How many suspects it may have; 0: it is complete. Its requests ran before there were suspects."""


class Quarantine:
    """The suspects, by request id."""

    def __init__(self, strikes: Strikes | None = None) -> None:
        """`strikes` are deaths of the executor, also those that a process of schedule before this one counted."""
        self._groups: deque[Group] = deque()
        """The first one runs."""
        self._strikes = Strikes() if strikes is None else strikes

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    @property
    def is_cleared(self) -> bool:
        """Whether all suspects that ran are cleared, so that the next ones may run."""
        return bool(self._groups) and not self._groups[0].request_ids

    @property
    def is_alone(self) -> bool:
        """Whether the group that runs must have no other requests beside it, not even cleared ones. If it is cleared:
        whether the next one must."""
        group = next((one for one in self._groups if one.request_ids), None)
        return group is not None and 0 < group.size < GROUP_SIZES[0]

    def excludes(self, request_id: int) -> bool:
        """Whether a request must wait until the quarantine is over, or until its group runs."""
        return bool(self._groups) and request_id not in self._groups[0].request_ids

    def num_strikes(self, request_id: int) -> int:
        """Deaths of the executor since this request was cleared."""
        return self._strikes.get(request_id)

    def add(
        self,
        request_id: int,
        num_deaths: int,
        uncleared: Iterable[int],
        num_sequences: int = 1,
        num_strikes: int = 0,
    ) -> None:
        """A request was in work when schedule died, `num_deaths` times in a row, or its attempt before when the
        executor died, `num_strikes` times. If there were no suspects, the first group is what runs and is
        `uncleared`."""
        if not self._groups and (others := dict.fromkeys(uncleared, 1)):
            self._groups.append(Group(others))
        if num_strikes:
            self._strikes.set(request_id, num_strikes)
        self._insert(request_id, num_sequences, _size_after(max(num_deaths, num_strikes)), num_running=1)

    def died(self, suspects: Mapping[int, int], *, is_alone: bool) -> list[int]:
        """The executor died while it computed these requests, by id, with their numbers of sequences. `is_alone`: it
        computed one request only. Returns those that have to fail."""
        sizes: dict[int, int] = {}
        for group in self._groups:
            for request_id in suspects.keys() & group.request_ids.keys():
                del group.request_ids[request_id]
                sizes[request_id] = group.size or GROUP_SIZES[0]
        self._groups = deque(group for group in self._groups if group.request_ids)
        failed: list[int] = []
        for request_id, num_sequences in suspects.items():
            num_strikes = self._strikes.pop(request_id) + 1
            if is_alone and num_strikes >= MAX_STRIKES:
                failed.append(request_id)
                self._strikes.set(request_id, num_strikes)  # it may come again before its gateway learns of this
                continue
            self._strikes.set(request_id, num_strikes)
            size = min(_size_after(num_strikes), sizes.get(request_id, GROUP_SIZES[0]))
            self._insert(request_id, num_sequences, size, num_running=0)
        if failed:
            # Nothing runs before their failures are sent: if another request killed schedule first, they would come
            # again and kill the executor again, and so on.
            self._groups.appendleft(Group({}))
        return failed

    def _insert(self, request_id: int, num_sequences: int, size: int, *, num_running: int) -> None:
        """Add a suspect to a group with room. Those in most deaths go first, but behind the groups that run already."""
        num_ids = NUM_CLEARING_IDS * num_sequences
        with_room = (one for one in self._groups if one.size == size and len(one.request_ids) < size)
        if (group := next(with_room, None)) is not None:
            group.request_ids[request_id] = num_ids
            return
        later = (place for place, one in enumerate(self._groups) if place >= num_running and one.size > size)
        self._groups.insert(next(later, len(self._groups)), Group({request_id: num_ids}, size))

    def settled(self, request_id: int) -> None:
        """A sequence of this request has got an id, or several, in one step."""
        for group in self._groups:
            if request_id in group.request_ids:
                group.request_ids[request_id] -= 1
                if group.request_ids[request_id] <= 0:
                    del group.request_ids[request_id]
                    self._strikes.pop(request_id)

    def ended(self, request_id: int) -> None:
        """This request has ended: by itself, or because `died` has returned it."""
        if self._strikes.get(request_id) < MAX_STRIKES:
            self._strikes.pop(request_id)
        for group in self._groups:
            group.request_ids.pop(request_id, None)

    def closed(self, request_id: int) -> None:
        """No one needs this request any more."""
        self._strikes.pop(request_id)

    def next_group(self) -> bool:
        """If the group that runs is cleared, go on to the next one. Returns whether that has changed who may run."""
        if not self.is_cleared:
            return False
        while self._groups and not self._groups[0].request_ids:
            self._groups.popleft()
        return True


def _size_after(num_deaths: int) -> int:
    return GROUP_SIZES[min(num_deaths, len(GROUP_SIZES)) - 1]
