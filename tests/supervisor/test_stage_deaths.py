"""What a process has sent before its end is received, also if it comes late."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.supervisor.restart.stage_deaths import StageDeaths
from pipeline.supervisor.stopping import Stopping

LATE_S = 2.0
"""How long a message is on the way on a busy machine."""


class Deaths:
    """Of one child, which has sent `Prepared` and ended, before the server is ready. Its message arrives late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str, exit_code: int) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("pipeline.supervisor.restart.stage_deaths.time.monotonic", lambda: self.now_s)
        self.state = SimpleNamespace(prepared=None, reasons={}, drained=set(), is_serving=False)
        child = SimpleNamespace(
            name=f"{stage}.0",
            stage=stage,
            state="starting",
            is_alive=False,
            exit_code=exit_code,
            describe_end=lambda: f"exited with code {exit_code}",
        )
        table = SimpleNamespace(
            children={child.name: child}, is_watched=lambda child: True, mark_dead=lambda child: None
        )
        others: dict[str, Any] = {
            "resources": None,
            "restarts": SimpleNamespace(planned=SimpleNamespace(has_killed=lambda name: False)),
            "scaling": SimpleNamespace(died=lambda name, reason: False),
            "questions": SimpleNamespace(lost=lambda name: None),
            "heartbeats": None,
            "sleeper": SimpleNamespace(died=lambda child, said: False),
            "crash_reports": SimpleNamespace(died=lambda child, reason: {}),
        }
        parts: dict[str, Any] = {"state": self.state, "table": table, "inbox": self, "drain_inbox": self._drain}
        self.deaths = StageDeaths(**parts, **others, log=logging.getLogger("test"))

    def wait(self, timeout_s: float) -> bool:
        self.now_s = min(self.now_s + timeout_s, max(self.now_s, LATE_S))
        return self.now_s >= LATE_S

    def _drain(self) -> None:
        if self.now_s >= LATE_S:
            self.state.prepared = "a folder"


def test_the_result_of_prepare_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = Deaths(monkeypatch, "prepare", 0)
    deaths.deaths.check()
    assert deaths.state.prepared and deaths.now_s == LATE_S


def test_a_process_that_has_failed_is_not_waited_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = Deaths(monkeypatch, "prepare", 1)
    with pytest.raises(Stopping):
        deaths.deaths.check()
    assert deaths.now_s < LATE_S
