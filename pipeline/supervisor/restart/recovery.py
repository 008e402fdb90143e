"""Decides what happens when a stage's process dies: when its successor starts, and who learns of it when.

    died ──► restart after a delay ──► the other stages learn of it ──all have answered──► the gateways learn of it
      └────► give up: it has died too often

Gateways are the last: they submit requests again, through stages that must use the successor's inbox by then. They
learn of restarts in order. A process that is started later begins with the newest channels, and does not learn of older
restarts. So a gateway does not start before all stages use the newest channels. All of this is pure: times and names go
in, decisions come out.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipeline.runtime.topology import stage_of

DELAYS_S = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Before the first, second … restart of a stage within `WINDOW_S`."""
WINDOW_S = 60.0
MAX_FAILED_STARTS = 3
"""Processes of a stage in a row that end before they are ready."""
DEATHS_OF_A_REQUEST = 8
"""Within `WINDOW_S`, that one request may be the reason of. It fails after 2 to 4 of them. It may cost some more if it
was cleared in between, because the output that cleared it came late."""


class _Death(NamedTuple):
    at_s: float
    suspects: frozenset[int]
    counts: bool
    """Against the limit."""


class RestartBudget:
    """How often each stage may be restarted.

    A death does not count if a request may be the reason, however many such requests there are. This shows in the
    suspects: one of them was in few deaths before. It will fail soon, or it is cleared (crashes/crash_counts.py). If
    all suspects were in many deaths, they have been cleared again and again, so the reason is another one.

    A gateway takes with it what is known of its requests, so any of its deaths may be due to one. They never end the
    server, but its successors start later and later.
    """

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts` of one stage within a minute; 0: a stage that dies ends the server."""
        self.max_restarts = max_restarts
        self._deaths: dict[str, list[_Death]] = {}
        self._num_failed_starts: dict[str, int] = {}

    def died(self, name: str, now_s: float, *, was_ready: bool, suspects: Iterable[int] = ()) -> float | str:
        """A process has died. `suspects` are the requests that may be the reason. Returns the delay before its
        successor starts, or the reason to give up."""
        recent = [death for death in self._deaths.get(name, []) if now_s - death.at_s < WINDOW_S]
        suspected = frozenset(suspects)
        num_earlier = Counter(one for death in recent for one in death.suspects & suspected)
        counts = all(num_earlier[one] >= DEATHS_OF_A_REQUEST for one in suspected)
        num_counted = sum(death.counts for death in recent)
        self._deaths[name] = [*recent, _Death(now_s, suspected, counts)]
        self._num_failed_starts[name] = 0 if was_ready else self._num_failed_starts.get(name, 0) + 1
        may_be_request = was_ready and stage_of(name) == "gateway"
        if not self.max_restarts:
            return "supervisor.max_restarts is 0"
        if counts and num_counted >= self.max_restarts and not may_be_request:
            return f"it has died {len(recent) + 1} times within {WINDOW_S:.0f} s (supervisor.max_restarts)"
        if self._num_failed_starts[name] >= MAX_FAILED_STARTS:
            return f"{MAX_FAILED_STARTS} processes in a row ended before they were ready"
        return DELAYS_S[min(num_counted, len(DELAYS_S) - 1)] if counts else 0.0


class Round(msgspec.Struct, eq=False):
    """One restart, until all that must know of it have answered."""

    epoch: int
    name: str
    """The process that died."""
    stages: set[str]
    """Stages that have not answered."""
    gateways: set[str]
    """Gateways that have not answered."""
    gateways_notified: bool = False


class Recovery:
    """The rounds that are not over."""

    def __init__(self) -> None:
        self._rounds: list[Round] = []
        self._epoch = 0

    @property
    def is_over(self) -> bool:
        return not self._rounds

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def died(self, name: str, stages: Iterable[str], gateways: Iterable[str]) -> int:
        """A process has died: these learn of its successor, the stages at once. Returns the epoch of the round."""
        self._epoch += 1
        for one in self._rounds:
            one.stages.discard(name)
            one.gateways.discard(name)
            if one.name == name and not one.gateways_notified:
                one.gateways.clear()  # they are informed of the newest successor only
        self._rounds.append(Round(self._epoch, name, set(stages) - {name}, set(gateways) - {name}))
        return self._epoch

    def is_known(self, name: str) -> bool:
        """Whether all have answered that had to learn of the newest process of this name, or of its end."""
        return not any(one.name == name for one in self._rounds)

    def answered(self, name: str, epoch: int) -> None:
        """A process has answered."""
        for one in self._rounds:
            if one.epoch == epoch:
                one.stages.discard(name)
                one.gateways.discard(name)

    def may_start(self, name: str) -> bool:
        """Whether a successor may start now. What a new gateway submits would be lost in a stage that still uses an
        older channel, or dropped by one that has yet to drop the requests of the gateway before."""
        return not (name.startswith("gateway.") and any(one.stages for one in self._rounds))

    def rounds_for_gateways(self) -> list[Round]:
        """The rounds of which the gateways are to be informed now, in order. Each is returned once."""
        due: list[Round] = []
        for one in self._rounds:
            if one.stages and not one.gateways_notified:
                break
            if not one.gateways_notified:
                one.gateways_notified = True
                due.append(one)
        self._rounds = [one for one in self._rounds if one.stages or one.gateways]
        return [one for one in due if one.gateways]
