"""Health checks: pings to every stage, to see whether its loop runs."""

import time
from collections.abc import Callable, Iterable

from pipeline.runtime.messages import GatewayLoad, Health, Pong, ScheduleLoad, StageHealth
from pipeline.supervisor.process import Child

WORST_FIRST = ("dead", "recovering", "late", "stopping", "starting")


class HealthRound:
    """One ping to every stage, and the answers up to the deadline."""

    def __init__(self, asker: str, nonce: int, timeout_s: float) -> None:
        self.asker = asker
        self._nonce = nonce
        self._begun = time.monotonic()
        self.deadline = self._begun + timeout_s
        self._answers: dict[str, tuple[float, Pong]] = {}

    def answered(self, sender: str, pong: Pong) -> None:
        self._answers[sender] = (time.monotonic() - self._begun, pong)

    def is_over(self, children: Iterable[Child]) -> bool:
        """Whether all stages have answered, or the deadline has passed."""
        return time.monotonic() >= self.deadline or all(
            child.name in self._answers or child.state != "ready" for child in children
        )

    def result(self, children: Iterable[Child], is_computing: Callable[[Child], bool]) -> Health:
        """The states of the stages. One that has not answered is late, unless `is_computing`."""
        stages = []
        schedule: ScheduleLoad | None = None
        num_open_elsewhere = 0
        for child in children:
            took_s, pong = self._answers.get(child.name, (-0.001, None))
            is_late = pong is None and child.state == "ready" and not is_computing(child)
            state = "late" if is_late else child.state
            stages.append(StageHealth(child.name, child.pid, state, round(took_s * 1000, 3)))
            if pong is not None and isinstance(pong.load, ScheduleLoad):
                schedule = pong.load
            if pong is not None and isinstance(pong.load, GatewayLoad) and child.name != self.asker:
                num_open_elsewhere += pong.load.num_open_requests
        status = next((state for state in WORST_FIRST if any(stage.state == state for stage in stages)), "ok")
        return Health(self._nonce, status, stages, schedule, num_open_elsewhere)


class HealthChecks:
    """The open health rounds."""

    def __init__(
        self,
        ping_all: Callable[[int], None],
        reply: Callable[[str, Health], None],
        is_computing: Callable[[Child], bool],
    ) -> None:
        """`ping_all` sends `Ping` with a nonce to every stage; `reply` sends a result to the process that asked.
        `is_computing`: whether a silent stage is not late (`Heartbeats.is_computing`)."""
        self._ping_all = ping_all
        self._reply = reply
        self._is_computing = is_computing
        self._rounds: dict[int, HealthRound] = {}
        self._next_nonce = 1

    @property
    def deadlines(self) -> list[float]:
        return [one.deadline for one in self._rounds.values()]

    def clear(self) -> None:
        """Forget the open rounds."""
        self._rounds.clear()

    def start(self, asker: str, asker_nonce: int, timeout_s: float) -> None:
        """Ping every stage. The result goes to `asker` when all have answered, or after `timeout_s`."""
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        self._rounds[nonce] = HealthRound(asker, asker_nonce, timeout_s)
        self._ping_all(nonce)

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
