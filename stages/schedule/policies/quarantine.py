"""Runs requests that may have killed the executor, or schedule itself, in groups.

    a process crashed ──► suspects: all requests that it had in work
                            └── groups of at most 32 ──crashed again──► of 4 ──crashed again──► each alone
                                  └── each sequence of a suspect has some new ids: it is cleared

The supervisor counts the crashes of each suspect, and decides which of them fails: one that was alone at its third
crash (pipeline/supervisor/crashes/crash_counts.py). One that kills is in a smaller group after each crash, whatever the
others do, and alone after the third. Beside groups of 32, requests that are cleared run. Beside smaller ones, nothing
runs: a request that was cleared and kills later would make the group look like the reason.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

GROUP_SIZES = (32, 4, 1)
"""After the first, second, … crash."""
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

    def __init__(self, crash_counts: Mapping[int, int]) -> None:
        """`crash_counts` are those of requests that may come, as in `Launch`."""
        self._crash_counts = dict(crash_counts)
        """Of the suspects, here or not."""
        self._groups: deque[Group] = deque()
        """The first one runs."""
        self._cleared: list[int] = []

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

    def is_suspect(self, request_id: int) -> bool:
        """Whether a process has crashed that had this request in work, and it was not cleared since."""
        return request_id in self._crash_counts

    def add(
        self, request_id: int, uncleared: Iterable[int], num_sequences: int = 1, *, others_run: bool = False
    ) -> None:
        """A suspect has come. If there were no others here, the first group is what runs and is `uncleared`: none, if
        all that runs got ids already (`others_run`), so that it stops before a smaller group runs."""
        if not self._groups and ((others := dict.fromkeys(uncleared, 1)) or others_run):
            self._groups.append(Group(others))
        self._insert(request_id, num_sequences, num_running=1)

    def executor_lost(self, crash_counts: Mapping[int, int], present: Mapping[int, int]) -> None:
        """The executor has died. `crash_counts` are the newest; `present` are the open requests, by id, with their
        numbers of sequences. Nothing runs now, so the groups are made anew."""
        self._crash_counts |= crash_counts
        self._groups.clear()
        for request_id in sorted(self._crash_counts.keys() & present.keys()):
            self._insert(request_id, present[request_id], num_running=0)

    def _insert(self, request_id: int, num_sequences: int, *, num_running: int) -> None:
        """Add a suspect to a group with room. Those in most crashes go first, but not before the groups that run."""
        size = GROUP_SIZES[min(self._crash_counts[request_id], len(GROUP_SIZES)) - 1]
        num_ids = NUM_CLEARING_IDS * num_sequences
        with_room = (one for one in self._groups if one.size == size and len(one.request_ids) < size)
        if (group := next(with_room, None)) is not None:
            group.request_ids[request_id] = num_ids
            return
        later = (index for index, one in enumerate(self._groups) if index >= num_running and one.size > size)
        self._groups.insert(next(later, len(self._groups)), Group({request_id: num_ids}, size))

    def settled(self, request_id: int) -> None:
        """A sequence of this request has got an id, or several, in one step."""
        for group in self._groups:
            if request_id in group.request_ids:
                group.request_ids[request_id] -= 1
                if group.request_ids[request_id] <= 0:
                    self.ended(request_id, is_complete=True)
                return

    def ended(self, request_id: int, *, is_complete: bool) -> None:
        """Nothing is computed for this request any more. It is cleared if its output `is_complete`."""
        for group in self._groups:
            group.request_ids.pop(request_id, None)
        if is_complete and self._crash_counts.pop(request_id, 0):
            self._cleared.append(request_id)

    def take_cleared(self) -> list[int]:
        """The suspects that were cleared since the last call."""
        cleared, self._cleared = self._cleared, []
        return cleared

    def next_group(self) -> bool:
        """If the group that runs is cleared, go on to the next one. Returns whether that has changed who may run."""
        if not self.is_cleared:
            return False
        while self._groups and not self._groups[0].request_ids:
            self._groups.popleft()
        return True
