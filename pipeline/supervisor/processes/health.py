"""Health checks: pings to every stage, to see whether its loop runs."""

import time
from collections.abc import Callable, Collection, Iterable

from pipeline.runtime.messages import ExecuteLoad, GatewayLoad, Health, Pong, ScheduleLoad, StageHealth
from pipeline.supervisor.processes.child import Child

WORST_FIRST = ("dead", "recovering", "late", "stopping", "starting", "waking", "sleeping")
ANSWERING = ("ready", "leaving")
"""States of stages that answer pings."""


class HealthRound:
    """One ping to every stage, and the answers up to the deadline."""

    def __init__(self, asker: str, nonce: int, timeout_s: float, late: Collection[str] = ()) -> None:
        """`late` are stages that were not pinged, because they have not answered an earlier ping."""
        self.asker = asker
        self._late = late
        self._nonce = nonce
        self._begun = time.monotonic()
        self.deadline = self._begun + timeout_s
        self._answers: dict[str, tuple[float, Pong]] = {}

    def answered(self, sender: str, pong: Pong) -> None:
        self._answers[sender] = (time.monotonic() - self._begun, pong)

    def is_over(self, children: Iterable[Child]) -> bool:
        """Whether all stages have answered, or the deadline has passed."""
        return time.monotonic() >= self.deadline or all(
            child.name in self._answers or child.state != "ready" or child.name in self._late for child in children
        )

    def result(self, children: Iterable[Child], is_computing: Callable[[Child], bool]) -> Health:
        """The states of the stages. One that has not answered is late, unless `is_computing`."""
        stages = []
        schedule: ScheduleLoad | None = None
        num_open_elsewhere = num_nan = 0
        last_nan_s = 0.0
        for child in children:
            took_s, pong = self._answers.get(child.name, (-0.001, None))
            is_late = pong is None and child.state == "ready" and (child.name in self._late or not is_computing(child))
            state = "late" if is_late else child.state
            stages.append(StageHealth(child.name, child.pid, state, round(took_s * 1000, 3)))
            if pong is not None and isinstance(pong.load, ScheduleLoad):
                schedule = pong.load
            if pong is not None and isinstance(pong.load, GatewayLoad) and child.name != self.asker:
                num_open_elsewhere += pong.load.num_open_requests
            if pong is not None and isinstance(pong.load, ExecuteLoad):
                num_nan += pong.load.num_nan
                last_nan_s = max(last_nan_s, pong.load.last_nan_s)
        status = next((state for state in WORST_FIRST if any(stage.state == state for stage in stages)), "ok")
        return Health(self._nonce, status, stages, schedule, num_open_elsewhere, num_nan, last_nan_s)


class HealthChecks:
    """The open health rounds."""

    def __init__(
        self,
        ping: Callable[[str, int], None],
        reply: Callable[[str, Health], None],
        is_computing: Callable[[Child], bool],
        is_late: Callable[[Child], bool],
    ) -> None:
        """`ping` sends `Ping` with a nonce to a stage; `reply` sends a result to the process that asked.
        `is_computing`: whether a silent stage is not late. `is_late`: whether it is known to be (`Heartbeats`)."""
        self._ping = ping
        self._reply = reply
        self._is_computing = is_computing
        self._is_late = is_late
        self._rounds: dict[int, HealthRound] = {}
        self._next_nonce = 1

    @property
    def deadlines(self) -> list[float]:
        return [one.deadline for one in self._rounds.values()]

    def clear(self) -> None:
        """Forget the open rounds."""
        self._rounds.clear()

    def start(self, asker: str, asker_nonce: int, timeout_s: float, children: Iterable[Child]) -> None:
        """Ping every stage that may answer. The result goes to `asker` when all have, or after `timeout_s`.

        A stage that is late or starting gets no ping: however often someone asks, its inbox does not fill."""
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        pinged = [child for child in children if child.state in ANSWERING]
        late = {child.name for child in pinged if self._is_late(child)}
        self._rounds[nonce] = HealthRound(asker, asker_nonce, timeout_s, late)
        for child in pinged:
            if child.name not in late:
                self._ping(child.name, nonce)

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long."""
        for one in self._rounds.values():
            one.deadline += seconds

    def answered(self, nonce: int, sender: str, pong: Pong, children: Iterable[Child]) -> None:
        """Add an answer, unless its round has ended."""
        if nonce in self._rounds:
            self._rounds[nonce].answered(sender, pong)
            self.end_rounds(children)

    def end_rounds(self, children: Iterable[Child]) -> None:
        """Report the rounds that are complete or late. `children` are all stages."""
        for nonce, one in list(self._rounds.items()):
            if one.is_over(children):
                del self._rounds[nonce]
                self._reply(one.asker, one.result(children, self._is_computing))
