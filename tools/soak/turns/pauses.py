"""How long a stream may wait: its fair share of the models' turns, and what happened meanwhile took."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

DAY_S = 86_400.0
TOOK = re.compile(
    r"^(\d+):(\d+):([\d.]+) I supervisor\.0@\S+ (?:asleep|awake|\S+ is back) .*\btook_s=([\d.]+)", re.MULTILINE
)
"""The ends of sleeps, wakes and restarts, in the server's log."""


class Wait(NamedTuple):
    """A silence of a stream, between Unix times."""

    begin_s: float
    end_s: float
    model: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Event(NamedTuple):
    """Something that took time, and ended at this second of the day."""

    day_s: float
    took_s: float


def events_of(log: str) -> list[Event]:
    return [
        Event(int(hour) * 3600 + int(minute) * 60 + float(second), float(took))
        for hour, minute, second, took in TOOK.findall(log)
    ]


def fair_s(wait: Wait, events: Sequence[Event], num_models: int, quantum_s: float) -> float:
    """How long the wait may be: each other model has its quantum, and falling asleep, waking and restarts take what
    they took. An event counts if it ended during the wait."""
    begin_s = _day_s(wait.begin_s)
    took_s = sum(one.took_s for one in events if (one.day_s - begin_s) % DAY_S <= wait.seconds + 0.001)
    return (num_models - 1) * quantum_s + took_s


def late_of(
    waits: Sequence[Wait], events: Sequence[Event], num_models: int, quantum_s: float, slack_s: float
) -> list[tuple[Wait, float]]:
    """The waits that are longer than the fair share and the slack, with how much longer than the fair share."""
    over_s = [wait.seconds - fair_s(wait, events, num_models, quantum_s) for wait in waits]
    return [pair for pair in zip(waits, over_s, strict=True) if pair[1] > slack_s]


def _day_s(unix_s: float) -> float:
    """The second of the day, in local time as the log has it."""
    at = datetime.fromtimestamp(unix_s)
    return at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6
