"""Finds requests that kill the executor.

    executor died ──► suspects: all requests that it was computing
                        └── groups of at most 8 ──died again──► of 2 ──died again──► each alone ──died again──► failed
                              └── a step of the group settled: its requests are cleared

Only requests that are cleared run beside a group, so an innocent request dies with a guilty one a few times at most,
and waits for a few steps of others. A process may die for other reasons: only a request that has died `MAX_STRIKES`
times without a settled step in between fails, or one that died alone with one strike less. A restart on purpose and a
death before the executor was ready do not count.
"""

from collections import deque
from collections.abc import Iterable

GROUP_SIZES = (8, 2, 1)
MAX_STRIKES = 4


class Quarantine:
    """The suspects, by request id."""

    def __init__(self) -> None:
        self._groups: deque[list[int]] = deque()
        """The first one runs."""
        self._strikes: dict[int, int] = {}

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    def excludes(self, request_id: int) -> bool:
        """Whether a request must wait until the quarantine is over, or until its group runs."""
        return bool(self._groups) and request_id not in self._groups[0]

    def died(self, aboard: Iterable[int]) -> list[int]:
        """The executor died while it computed these requests. Returns those that have to fail."""
        suspects = sorted(set(aboard))
        if not suspects:
            return []
        if self._groups:  # beside the group, only cleared requests ran
            suspects = [request_id for request_id in suspects if request_id in self._groups[0]] or suspects
        for request_id in suspects:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        limit = MAX_STRIKES - 1 if len(suspects) == 1 else MAX_STRIKES
        failed = [request_id for request_id in suspects if self._strikes[request_id] >= limit]
        suspects = [request_id for request_id in suspects if request_id not in failed]
        size = next((size for size in GROUP_SIZES if size < len(suspects)), 1)
        groups = [suspects[begin : begin + size] for begin in range(0, len(suspects), size)]
        if self._groups:
            waiting = [one for one in self._groups.popleft() if one not in suspects and one not in failed]
            groups.append(waiting)
        self._groups.extendleft(reversed(groups))
        for request_id in failed:
            del self._strikes[request_id]
        return failed

    def settled(self, request_id: int) -> None:
        """A sampled id of this request has arrived, or it has ended: it is cleared."""
        self._strikes.pop(request_id, None)
        for group in self._groups:
            if request_id in group:
                group.remove(request_id)

    def next_group(self) -> bool:
        """If the group that runs is cleared, go on to the next one. Returns whether that has changed who may run."""
        if not self._groups or self._groups[0]:
            return False
        while self._groups and not self._groups[0]:
            self._groups.popleft()
        return True
