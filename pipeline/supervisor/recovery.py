"""Decides what happens when a stage's process dies: when its successor starts, and who learns of it when.

    died ──► restart after a delay ──► the other stages learn of it ──all have answered──► the gateways learn of it
      └────► give up: it has died too often

Gateways are the last: they submit requests again, through stages that must use the successor's inbox by then. They
learn of restarts in order. A process that is started later begins with the newest channels, and does not learn of older
restarts. So a gateway does not start before all stages use the newest channels. All of this is pure: times and names go
in, decisions come out.
"""

from collections.abc import Iterable

import msgspec

DELAYS_S = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Before the first, second … restart of a stage within `WINDOW_S`."""
WINDOW_S = 60.0
MAX_FAILED_STARTS = 3
"""Processes of a stage in a row that end before they are ready."""


class RestartBudget:
    """How often each stage may be restarted."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts` of one stage within a minute; 0: a stage that dies ends the server."""
        self.max_restarts = max_restarts
        self._deaths_s: dict[str, list[float]] = {}
        self._num_failed_starts: dict[str, int] = {}

    def died(self, name: str, now_s: float, *, was_ready: bool) -> float | str:
        """A process has died. Returns the delay before its successor starts, or the reason to give up."""
        deaths = [death_s for death_s in self._deaths_s.get(name, []) if now_s - death_s < WINDOW_S]
        self._deaths_s[name] = [*deaths, now_s]
        self._num_failed_starts[name] = 0 if was_ready else self._num_failed_starts.get(name, 0) + 1
        if not self.max_restarts:
            return "supervisor.max_restarts is 0"
        if len(deaths) >= self.max_restarts:
            return f"it has died {len(deaths) + 1} times within {WINDOW_S:.0f} s (supervisor.max_restarts)"
        if self._num_failed_starts[name] >= MAX_FAILED_STARTS:
            return f"{MAX_FAILED_STARTS} processes in a row ended before they were ready"
        return DELAYS_S[min(len(deaths), len(DELAYS_S) - 1)]


class Round(msgspec.Struct, eq=False):
    """One restart, until all that must know of it have answered."""

    epoch: int
    name: str
    """The process that died."""
    stages: set[str]
    """Stages that have not answered."""
    gateways: set[str]
    """Gateways that have not answered."""
    are_gateways_told: bool = False


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
            if one.name == name and not one.are_gateways_told:
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
            if one.stages and not one.are_gateways_told:
                break
            if not one.are_gateways_told:
                one.are_gateways_told = True
                due.append(one)
        self._rounds = [one for one in self._rounds if one.stages or one.gateways]
        return [one for one in due if one.gateways]
