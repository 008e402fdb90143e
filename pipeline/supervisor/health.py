"""A round of pings: is every stage's loop turning?"""

import time
from collections.abc import Iterable

from pipeline.runtime.messages import GatewayLoad, Health, Pong, ScheduleLoad, StageHealth
from pipeline.supervisor.process import Child

WORST_FIRST = ("dead", "late", "stopping", "starting")


class HealthRound:
    """One question to every stage, and what they answered until the deadline."""

    def __init__(self, asker: str, nonce: int, timeout_s: float) -> None:
        self.asker = asker
        self._nonce = nonce
        self._begun = time.monotonic()
        self.deadline = self._begun + timeout_s
        self._answers: dict[str, tuple[float, Pong]] = {}

    def answered(self, sender: str, pong: Pong) -> None:
        self._answers[sender] = (time.monotonic() - self._begun, pong)

    def is_over(self, children: Iterable[Child]) -> bool:
        """Whether everybody has answered, or the time is up."""
        return time.monotonic() >= self.deadline or all(
            child.name in self._answers or child.state == "dead" for child in children
        )

    def result(self, children: Iterable[Child]) -> Health:
        stages = []
        schedule: ScheduleLoad | None = None
        num_open_elsewhere = 0
        for child in children:
            took_s, pong = self._answers.get(child.name, (-0.001, None))
            state = child.state if pong is not None or child.state != "ready" else "late"
            stages.append(StageHealth(child.name, child.pid, state, round(took_s * 1000, 3)))
            if pong is not None and isinstance(pong.load, ScheduleLoad):
                schedule = pong.load
            if pong is not None and isinstance(pong.load, GatewayLoad) and child.name != self.asker:
                num_open_elsewhere += pong.load.num_open_requests
        status = next((state for state in WORST_FIRST if any(stage.state == state for stage in stages)), "ok")
        return Health(self._nonce, status, stages, schedule, num_open_elsewhere)
