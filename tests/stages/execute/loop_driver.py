"""The executor's loop without its neighbours: messages come when a test says so, and results are kept."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext

INTS = np.zeros(0, np.int32)


def stage_of(inbox: Any, replay_context: ReplayContext) -> tuple[Any, list[m.StepResult]]:
    """The parts of a stage that the loop needs, and the results that it sends."""
    sent: list[m.StepResult] = []
    stage = SimpleNamespace(
        replica=0,
        inbox=inbox,
        replay_context=replay_context,
        control_requests=SimpleNamespace(),
        arrays=SimpleNamespace(take=None, put=lambda array, readers: array.tobytes()),
        outbox=lambda peer: SimpleNamespace(send=lambda message: sent.append(message) or True),
        trace=SimpleNamespace(on=False),
        release=lambda: None,
    )
    return stage, sent


class ScriptedInbox:
    """Each wake is: its latest time in seconds after the previous one, its messages, and how many steps are done."""

    is_replayed = False

    def __init__(self, runner: Any, wakes: list[tuple[float, list[Any], int]]) -> None:
        self._runner, self._wakes = runner, iter(wakes)
        self.now_s = 100.0
        self.num_captured: list[int] = []
        """The time of each turn"""

    def wake_by(self, fd: int) -> None:
        pass

    def wait_all(self, timeout_s: float) -> list[Any]:
        after_s, messages, self._runner.num_over = next(self._wakes)
        self.now_s += min(after_s, timeout_s)
        self.num_captured.append(self._runner.num_captured)
        return messages
